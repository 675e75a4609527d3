"""`Adapters` loads, replaces and unloads adapters by name while the engine serves; the public interface to adapters.

It owns names, host memory and the threads that read files and fill slots; the slot table decides what is on the device.
Next to read: ../adapters/slots.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import anyio
from anyio.lowlevel import checkpoint

from headrace.adapters.bank import AdapterDevice
from headrace.adapters.slots import AdapterVersion, Move, Replacing, Residency, SlotTable
from headrace.engine.concurrency.ask import ask
from headrace.engine.concurrency.threads import Poster, Worker
from headrace.engine.config import EngineConfig
from headrace.engine.errors import AdapterRejected, AdapterUnavailable, EngineStopped, InvalidParams, UnknownAdapter
from headrace.engine.intake.adapter_names import find
from headrace.engine.steps.loop import StepLoop

if TYPE_CHECKING:
    from headrace.adapters.loaded import LoadedAdapter, Stamp

__all__ = ["AdapterInfo", "Adapters", "slots_of"]

logger = logging.getLogger("headrace.engine")

_NO_SLOTS = "adapters need an engine that was opened with adapter_slots=1 or more"
_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """Description of a loaded adapter."""

    name: str
    digest: str
    """Digest of the weights, in hexadecimal: two adapters with the same digest give the same tokens."""
    nbytes: int
    """Bytes of the weights: in float32 on a CPU, else in the model's dtype."""
    virtual_tokens: int
    """Number of tokens that a prompt or prefix adapter puts before every prompt."""
    where: Literal["device", "loading", "host", "disk"]
    pinned: bool
    requests: int
    """Number of requests with this adapter that have not ended."""


@dataclass(slots=True)
class _Named:
    version: AdapterVersion
    nbytes: int
    pinned: bool = False


class _Source(NamedTuple):
    path: str
    root: Path | None
    stamp: Stamp | None = None
    """Stamp of the files that were read from the folder."""


class Adapters:
    """The loaded adapters of one engine, available as `engine.adapters`.

    All methods are called on the engine's event loop, and raise `RuntimeError` on another loop or in another thread.
    """

    def __init__(
        self,
        device: AdapterDevice | None,
        config: EngineConfig,
        model: str,
        loop: StepLoop,
        make_worker: Callable[..., Worker] = Worker,
    ) -> None:
        """Start empty; `device` is None in an engine without adapter slots, `model` is the base model's name."""
        self._device = device
        self._loop = loop
        self._slots = loop.scheduler.slots
        self._most = config.max_adapters
        self._most_bytes = config.adapter_host_memory
        self._model = model
        self._names: dict[str, _Named] = {}
        self.versions: dict[str, AdapterVersion] = {}
        """Present version of each name."""
        self._pool: WeakKeyDictionary[AdapterVersion, LoadedAdapter] = WeakKeyDictionary()
        """Weights in host memory, least recently used first."""
        self._sources: WeakKeyDictionary[AdapterVersion, dict[str, _Source]] = WeakKeyDictionary()
        """Folder of each name of a version; for a version without names, the folder of its last name."""
        self._turn = anyio.Lock()
        self._closed_by: Exception | None = None
        self._workers: tuple[Worker, ...] = ()
        self._post = Poster()
        if device is not None:
            self._reader = make_worker("headrace-adapter-reader", self._post)
            self._mover = make_worker("headrace-adapter-mover", self._post)
            self._workers = (self._reader, self._mover)
            loop.carry_out = self._carry_out

    async def load(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str] | None = None,
        pinned: bool | None = None,
    ) -> AdapterInfo:
        """Read, check and register a PEFT folder under `name`, replacing the adapter that has that name.

        Requests that began with the replaced adapter go on with it; later ones use the new one.

        Args:
            name: 1 to 64 letters, digits, dots, dashes and underscores, the first not a dot; not the model's name.
            path: The folder; with `root`, the plain name of a folder in it, and no link is followed.
            root: The only folder that may be read from.
            pinned: Pin the adapter, or unpin it, as `pin` does; None leaves that as it is.

        Returns:
            The description of the adapter, as in `list`.

        Raises:
            AdapterRejected: The name, the files or the size do not fit; nothing changes.
            InvalidParams: The engine has no adapter slots, or the adapter cannot be pinned; nothing changes.
            EngineStopped: The engine is closing.
        """
        self._post.check_here()
        device = self._opened_for_adapters()
        if not isinstance(name, str) or _NAME.fullmatch(name) is None or name == self._model:
            _reject(
                "name", name, "1 to 64 letters, digits, dots (none first), dashes, underscores, and not the model's"
            )
        async with self._turn:
            self._check_open()  # the engine may have closed while others had their turn
            self._check_count(name)
            source = _source(os.fspath(path), root)
            loaded = await ask(self._reader.submit, partial(device.read, source.path, source.root, None))
            self._check_count(name)
            self._check_open()
            if pinned:
                self._check_pin(name, loaded.digest)
            self._register(name, loaded, source._replace(stamp=loaded.stamp), device)
            if pinned is not None:
                self.pin(name, pinned)
            return self._info(name, self._names[name])

    async def unload(self, name: str) -> None:
        """Unload `name`: new requests are rejected, running ones finish, then its memory is freed.

        Raises:
            UnknownAdapter: No adapter has that name.
        """
        self._post.check_here()
        named = find(name, self._names)
        del self._names[name], self.versions[name]
        named.version.pins -= named.pinned
        self._part(name, named.version)
        self._loop.wake()
        await checkpoint()

    def list(self) -> list[AdapterInfo]:
        """Return all loaded adapters in the order of their names."""
        self._post.check_here()
        return [self._info(name, named) for name, named in sorted(self._names.items())]

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter on the device, or no longer. It is fetched now if no adapter in use has to be evicted.

        A pinned adapter is evicted only if a request could not be served otherwise.

        Raises:
            UnknownAdapter: No adapter has that name.
            InvalidParams: All slots but one are pinned.
        """
        self._post.check_here()
        named = find(name, self._names)
        if pinned and not named.pinned:
            self._check_pin(name, named.version.digest)
        if pinned != named.pinned:
            named.pinned = pinned
            named.version.pins += 1 if pinned else -1
        if pinned:
            self._slots.fetch(named.version)
            self._loop.wake()

    def close(self, error: Exception) -> Callable[[], None]:
        """End calls that wait for files with `error`; return a call that joins the threads and may block."""
        self._closed_by = error
        for worker in self._workers:
            worker.drop(error)
        return self._join

    # -- names ------------------------------------------------------------------------------------------------------

    def _register(self, name: str, loaded: LoadedAdapter, source: _Source, device: AdapterDevice) -> None:
        granules = max(1, -(-loaded.nbytes // device.granule_bytes))
        if granules > device.granules:
            _reject("adapter_memory", loaded.nbytes, f"at most {device.granules * device.granule_bytes} bytes")
        old = self._names.get(name)
        twins = (named.version for named in self._names.values() if named.version.digest == loaded.digest)
        version = next(twins, None)
        if version is None:
            version = AdapterVersion(digest=loaded.digest, granules=granules, virtual_tokens=loaded.virtual_tokens)
        self._sources.setdefault(version, {})[name] = source
        self._keep(version, loaded)
        if old is None or old.version is not version:
            self._names[name] = _Named(version, loaded.nbytes)
            self.versions[name] = version
            if old is not None:
                if old.pinned:
                    self._names[name].pinned = True
                    version.pins += 1
                    old.version.pins -= 1
                self._part(name, old.version)
        self._slots.fetch(version, Replacing.NOTHING)
        self._loop.wake()

    def _part(self, name: str, version: AdapterVersion) -> None:
        """Detach `name` from `version`, and retire a version that no other name has."""
        if any(named.version is version for named in self._names.values()):
            del self._sources[version][name]
        else:
            self._slots.retire(version)

    def _info(self, name: str, named: _Named) -> AdapterInfo:
        version = named.version
        where: Literal["device", "loading", "host", "disk"] = "host" if version in self._pool else "disk"
        if version.residency is not Residency.ABSENT:
            where = "device" if version.residency is Residency.RESIDENT else "loading"
        return AdapterInfo(
            name=name,
            digest=version.digest.hex(),
            nbytes=named.nbytes,
            virtual_tokens=version.virtual_tokens,
            where=where,
            pinned=named.pinned,
            requests=version.users,
        )

    def _opened_for_adapters(self) -> AdapterDevice:
        if self._device is None:
            raise InvalidParams(f"adapter_slots: {_NO_SLOTS}, got 0", field="adapter_slots", value=0, limit={"ge": 1})
        return self._device

    def known_to(self, name: object) -> Mapping[str, AdapterVersion]:
        """Return the present version of each name, for a request with the adapter `name`, which may be None.

        Raises:
            UnknownAdapter: The engine was opened without adapter slots; the message names the option.
        """
        if self._device is None and isinstance(name, str):
            raise UnknownAdapter(
                f"adapter: none is loaded under the name {name!r}; adapter_slots: {_NO_SLOTS}",
                field="adapter",
                value=name,
            )
        return self.versions

    def _check_open(self) -> None:
        if self._closed_by is not None:
            raise self._closed_by.with_traceback(None)
        if self._loop.closed:
            raise EngineStopped("the engine closed before the adapter was loaded")

    def _check_count(self, name: str) -> None:
        if name not in self._names and len(self._names) >= self._most:
            _reject("max_adapters", len(self._names) + 1, f"at most {self._most} adapters")

    def _check_pin(self, name: str, digest: bytes) -> None:
        """Refuse to pin an adapter with this name and digest if too many others are pinned."""
        most = self._slots.slots - 1
        others = {each.version.digest for other, each in self._names.items() if each.pinned and other != name}
        if len(others - {digest}) >= most:
            raise InvalidParams(
                f"name: {name!r} cannot be pinned: of {most + 1} slots at most {most} can, one is for the others",
                field="name",
                value=name,
                limit=most,
            )

    # -- memory -----------------------------------------------------------------------------------------------------

    def _keep(self, version: AdapterVersion, loaded: LoadedAdapter) -> None:
        """Keep weights in host memory as the most recently used, and drop those of others as necessary."""
        if self._closed_by is not None:
            return
        self._pool.pop(version, None)
        self._pool[version] = loaded
        held = sum(each.host_bytes for each in self._pool.values())
        for other in list(self._pool):
            if held <= self._most_bytes or other is version:
                break
            held -= self._pool.pop(other).host_bytes

    def _carry_out(self, moves: Iterable[Move]) -> None:
        """Carry out decisions of the slot table in the mover's thread."""
        for move in moves:
            version = move.version
            if version is None:
                self._mover.submit(partial(self._empty, move.slot), lambda result, error: None)
            else:
                fill = partial(self._fill, move, version, self._pool.get(version), dict(self._sources[version]))
                self._mover.submit(fill, partial(self._filled, version))

    def _empty(self, slot: int) -> None:
        self._opened_for_adapters().bank.take(slot)

    def _fill(
        self, move: Move, version: AdapterVersion, loaded: LoadedAdapter | None, sources: dict[str, _Source]
    ) -> tuple[LoadedAdapter, str | None]:
        """Copy an adapter's weights to the device, from host memory or a name's folder; runs in the mover's thread."""
        device = self._opened_for_adapters()
        name = None
        if loaded is None:
            loaded, name = self._read_again(device, version, sources)
        device.bank.put(move.slot, move.start, loaded)
        return loaded, name

    def _read_again(
        self, device: AdapterDevice, version: AdapterVersion, sources: dict[str, _Source]
    ) -> tuple[LoadedAdapter, str]:
        """Read `version` from the first name's folder that still has it: two names may have loaded the same weights."""
        *others, last = sources
        for name in others:
            with contextlib.suppress(AdapterRejected):
                loaded = device.read(*sources[name])
                if loaded.digest == version.digest:
                    return loaded, name
        loaded = device.read(*sources[last])
        if loaded.digest != version.digest:
            _reject("path", sources[last].path, "the files that were loaded; they have changed since")
        return loaded, last

    def _filled(
        self,
        version: AdapterVersion,
        filled: tuple[LoadedAdapter, str | None] | None,
        error: BaseException | None,
    ) -> None:
        if filled is not None:
            loaded, name = filled
            known = self._sources[version]
            if name in known:  # its files may have been too recent for a stamp before
                known[name] = known[name]._replace(stamp=loaded.stamp)
            self._keep(version, loaded)
            self._slots.arrived(version)
        else:
            if self._closed_by is None:
                names = ", ".join(self._sources[version])
                logger.warning("the adapter %s could not be brought to the device: %s", names, error)
            failure = AdapterUnavailable(f"the adapter could not be brought to the device: {error}")
            failure.__cause__ = error
            self._slots.failed(version)
            self._loop.fail_adapter(version, failure)
        self._loop.wake()

    def _join(self) -> None:
        for worker in self._workers:
            worker.close()
        self._pool.clear()


def _source(path: str, root: str | os.PathLike[str] | None) -> _Source:
    """Return a source with absolute paths, which stay valid if the process changes its folder."""
    if root is None:
        return _Source(str(Path(path).expanduser().absolute()), None)
    return _Source(path, Path(root).expanduser().absolute())


def slots_of(device: AdapterDevice | None, config: EngineConfig) -> SlotTable:
    """Return an empty slot table for a device."""
    if device is None:
        return SlotTable()
    most = config.max_step_adapter_memory
    return SlotTable(
        device.slots,
        device.granules,
        most_active=config.max_step_adapters,
        most_active_granules=None if most is None else most // device.granule_bytes,
    )


def _reject(field: str, value: object, limit: str) -> NoReturn:
    raise AdapterRejected(f"{field}: must be {limit}, got {str(value)[:200]!r}", field=field, value=value, limit=limit)
