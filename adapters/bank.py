"""`AdapterBank`: what a device offers for adapters; a protocol, and never a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.adapters.loaded import LoadedAdapter

__all__ = ["AdapterBank"]


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
