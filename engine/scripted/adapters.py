"""`ScriptedBank`: the LoRA slots of the scripted device, with adapters read without a model or torch.

Owns the content of each slot; never decides which adapters are on the device. Next to read: testing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.adapters.bank import AdapterDevice
from headrace.adapters.folder import described, open_adapter, parse_description
from headrace.engine.config import EngineConfig

if TYPE_CHECKING:
    from headrace.adapters.loaded import LoadedAdapter, Stamp

__all__ = ["ScriptedBank"]

_GRANULE = 1 << 20
_BLOCK = 1 << 20
_ROOM = 1 << 40  # bytes: room for every adapter that is allowed


@dataclass(frozen=True, eq=False)
class _Described:
    """An adapter without its weights."""

    digest: bytes
    nbytes: int
    virtual_tokens: int
    host_bytes: int = 0
    stamp: None = None


class ScriptedBank:
    """Adapters by slot."""

    def __init__(self) -> None:
        """Start with empty slots."""
        self._digests: dict[int, bytes] = {}

    def put(self, slot: int, start: int, adapter: LoadedAdapter) -> None:
        """Put `adapter` into `slot` for the rows that name it."""
        self._digests[slot] = adapter.digest

    def take(self, slot: int) -> None:
        """Empty `slot`."""
        self._digests.pop(slot, None)

    def contents(self, slot: int) -> tuple[int, ...]:
        """Return the digest of the adapter in `slot`, as integers; empty for slot -1."""
        return () if slot < 0 else tuple(self._digests[slot])

    def device(self, config: EngineConfig) -> AdapterDevice | None:
        """Describe the device to an engine; return None if `config` asks for no slots."""
        if not config.adapter_slots:
            return None
        memory = _ROOM if config.adapter_memory is None else config.adapter_memory
        return AdapterDevice(self, config.adapter_slots, memory // _GRANULE, _GRANULE, _reader(config.max_adapter_rank))


def _reader(max_rank: int) -> Callable[[str, Path | None, Stamp | None], LoadedAdapter]:
    def read(path: str, root: Path | None, stamp: Stamp | None) -> LoadedAdapter:
        with open_adapter(path, root) as opened:
            config_bytes, header = described(opened)
            weights, digest = opened[1], blake2b(config_bytes)
            weights.seek(0)
            while block := weights.read(_BLOCK):
                digest.update(block)
            size = weights.tell()
            config, _ = parse_description(config_bytes, header, size, max_rank=max_rank)
        found: Any = _Described(digest.digest(), size, config.virtual_tokens)
        return found  # type: ignore[no-any-return]

    return read
