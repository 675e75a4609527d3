"""`MemoryCalls`: the methods of `Engine` that change how much memory it has; they move nothing themselves.

Next to read: life/memory.py.
"""

from __future__ import annotations

from typing import Literal

from headrace.engine.life.memory import DeviceMemory
from headrace.engine.life.serving import Serving

__all__ = ["MemoryCalls"]


class MemoryCalls:
    """Methods of `Engine` that resize the memory of keys and values, and put the engine to sleep."""

    _serving: Serving

    async def resize_kv(self, kv_memory: int | str) -> None:
        """Change the memory for keys and values; requests go on, and none loses a token.

        With less memory, prefixes that nobody uses are evicted first; then requests are preempted, the last in the
        policy's order first, as when pages run out. A request that would outgrow the new size ends there with `length`.

        Args:
            kv_memory: New size: bytes, or text such as "2GiB".

        Raises:
            InvalidParams: The size is not valid, less than a page or than a request has tokens for already, or more
                than there is; nothing has changed. Or the model is an encoder, which keeps no keys and values.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
            HeadraceError: The device failed in another way; nothing has changed.
        """
        await DeviceMemory(self._serving).resize(kv_memory)

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give back the memory of keys and values and of the weights; `wake` takes it again.

        Streams stay open: they get no token while the engine sleeps, and go on afterwards as if it had not. New
        requests wait as well. Deadlines pass. Pages in `swap_memory` come back; the others are computed again.

        Args:
            level: 1 keeps the weights in host memory, where a CPU has them anyway. 2 drops them and all that was
                computed with them: `wake` reads the files again. An engine that sleeps as deeply stays as it is.

        Raises:
            InvalidParams: `level` is not 1 or 2, the device cannot sleep, or the host has no room for the weights; the
                engine stays awake.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
            HeadraceError: The device failed in another way; the engine is as awake as before, if it could be woken.
        """
        await DeviceMemory(self._serving).sleep(level)

    async def wake(self) -> None:
        """End a `sleep`: take the memory of the weights and pages again, and go on; do nothing if the engine is awake.

        Raises:
            DeviceUnavailable: The device has too little free memory; the engine sleeps on. Free some, or `resize_kv` to
                less, and wake it again.
            ModelRejected: The model's files can no longer be used; the engine sleeps on.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
            HeadraceError: The device failed in another way; the engine sleeps on.
        """
        await DeviceMemory(self._serving).wake()

    @property
    def sleep_level(self) -> int:
        """The level of `sleep`; 0 while the engine is awake.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        return self._serving.parts(draining=True).loop.scheduler.resizing.sleep_level
