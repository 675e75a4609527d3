"""`AdapterBank` and `AdapterDevice`: the interface of a device that holds adapters; never imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.adapters.loaded import LoadedAdapter, Stamp

__all__ = ["AdapterBank", "AdapterDevice"]


class AdapterBank(Protocol):
    """Adapters on a device, each in a LoRA slot; rows name slots.

    `put` and `take` are called from a thread that is not the event loop's, one at a time, and may block it.
    """

    def put(self, slot: int, start: int, adapter: LoadedAdapter) -> None:
        """Put `adapter` into `slot` for the rows that name it; returns once the device has it.

        No row of a launched step uses the slot, and nobody uses its granules, during the call.

        Args:
            slot: The slot, from 0.
            start: The first of the device's granules for the adapter's weights; as many follow as the weights need.
            adapter: Weights in host memory, which may be dropped afterwards.
        """
        ...

    def take(self, slot: int) -> None:
        """Empty `slot`; no row of a launched step uses it."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterDevice:
    """A device that holds adapters."""

    bank: AdapterBank
    slots: int
    """Number of adapters that the device holds at a time."""
    granules: int
    """Memory of the device for adapters, in units of `granule_bytes`."""
    granule_bytes: int
    read: Callable[[str, Path | None, Stamp | None], LoadedAdapter]
    """Function that reads and checks an adapter's folder, from any thread; given a root, the path is the plain name of
    a folder in the root. `read_adapter` describes the stamp.

    Raises `AdapterRejected`.
    """
