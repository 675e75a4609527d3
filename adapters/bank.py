"""`AdapterBank` and `AdapterDevice`: what a device offers for adapters; never imports what holds a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.adapters.loaded import LoadedAdapter, Stamp

__all__ = ["AdapterBank", "AdapterDevice"]


class AdapterBank(Protocol):
    """Adapters on a device, each in a slot; rows name slots.

    `put` and `take` are called from a thread that is not the event loop's, one at a time, and may block it.
    """

    def put(self, slot: int, start: int, adapter: LoadedAdapter) -> None:
        """Make `adapter` what the rows of `slot` wear; returns once the device has it.

        No row of a launched step wears the slot, and nobody uses its granules, during the call.

        Args:
            slot: The slot.
            start: The first of the device's granules for the adapter's weights; as many follow as they need.
            adapter: Weights in host memory, which may be dropped afterwards.
        """
        ...

    def take(self, slot: int) -> None:
        """Let go of what `slot` holds; no row of a launched step wears it."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterDevice:
    """A device that takes adapters."""

    bank: AdapterBank
    slots: int
    """Adapters that it holds at a time."""
    granules: int
    """Memory of the device for adapters, in units of `granule_bytes`."""
    granule_bytes: int
    read: Callable[[str, Path | None, Stamp | None], LoadedAdapter]
    """Reads and checks a folder, from any thread; with a root the plain name of a folder in it; `read_adapter`
    says what the stamp is for.

    Raises `AdapterRejected`.
    """
