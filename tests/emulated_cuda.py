"""A GPU that is not there: everything on the host side of the CUDA path runs for real, above slow kernels; no tests.

`emulated()` replaces what lies below: torch's streams, events, graphs and pinned memory, the modules `triton` and
`flashinfer`, and by way of their declarations the kernels of products, experts and attention (emulated_products.py,
emulated_experts.py, emulated_attention.py); those that are not declared are in emulated_kernels.py. It is stricter than
a GPU where a GPU is merely unlucky:

- Copies from and to pinned memory are as late as they may be: they happen when somebody waits for an event or stream
  behind them. Pinned memory that changes before that is a fault, and whoever reads a result too early reads nonsense.
- A graph records single operations, with the values they had when it was captured, and replays those; nothing that
  belongs to a capture runs before that.
- FlashInfer's plans go through pinned memory to the integer workspace that `run` reads, which other plans may share.
- Memory of pages that is given back reads as NaN.
- Once the device is lost, every call raises, and pinned memory that is freed is a fault.

Everything else runs when it is launched: of the device's own slowness only what pinned memory shows can be seen.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import inspect
import mmap
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated_attention import emulated_decodes, emulated_prefills
from emulated_drafts import DRAFT_KERNELS
from emulated_experts import EmulatedExperts
from emulated_kernels import KERNELS, Misuse, attend, attend_rows
from emulated_latents import LATENT_KERNELS
from emulated_products import EmulatedProduct
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.engine.model.checkpoint import parameters as weight_files

__all__ = ["Gpu", "built_anew", "emulated", "kernels_on"]

NONSENSE = -0x5A5A5A5A
PROCESSORS = 132
CHIPS = {
    (7, 5): ("NVIDIA T4", 64 << 10),
    (8, 0): ("NVIDIA A100-SXM4-80GB", 163 << 10),
    (8, 6): ("NVIDIA RTX A6000", 99 << 10),
    (8, 9): ("NVIDIA L4", 99 << 10),
    (9, 0): ("NVIDIA H200", 227 << 10),
    (12, 0): ("NVIDIA GeForce RTX 5090", 99 << 10),
}
"""By compute capability: a GPU's name, and the most shared memory of one of its blocks."""
BUILT_ON = ("headrace.ops.cuda", "headrace.engine.model.cuda")
EVERY_KERNEL = {**KERNELS, **LATENT_KERNELS, **DRAFT_KERNELS}
HERE = threading.local()
"""Of this thread: `streams` entered, and `recorder` of the graph that is being captured."""


class Gpu:
    """The emulated device: one line of work, however many streams, and what went wrong on it."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.capability = capability
        self.faults: list[str] = []
        """What a real GPU might have survived by luck, or would not have survived."""
        self.launches: dict[str, int] = {}
        """How often each kernel ran."""
        self.replays: list[int] = []
        """For each replay of a graph, how many operations it had."""
        self.captured_in: list[str] = []
        """For each capture, the name of the thread that made it."""
        self.free_bytes = 8 << 30
        self.allocated = 0
        self.fail_at: Callable[[str], Exception | None] = lambda kernel: None
        """Asked before each launch outside a graph: what to raise there."""
        self.lost = False
        self.addresses = Addresses(self)
        self._lock = threading.RLock()
        self._issued = self._done = 0
        self._pending: deque[tuple[int, Callable[[], None]]] = deque()
        self._reads: list[tuple[int, int, int]] = []
        """Of copies in the line, what they read of pinned memory."""

    def fault(self, what: str) -> None:
        """Note a fault, which `emulated` raises at its end."""
        self.faults.append(what)

    def lose(self, why: str) -> None:
        """Fail now and for ever."""
        self.lost = True
        raise torch.AcceleratorError(f"CUDA error: {why}")

    def check(self) -> None:
        """Raise if the device is lost."""
        if self.lost:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def launch(self, name: str, work: Callable[[], None]) -> None:
        """Run `work`, or leave it to the graph that this thread captures."""
        self.check()
        recorder = getattr(HERE, "recorder", None)
        if recorder is not None:
            recorder.operations.append(lambda: self.run(name, work))
            return
        error = self.fail_at(name)
        if error is not None:
            self.lost = "CUDA" in str(error)
            raise error
        self.run(name, work)

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Run a kernel now."""
        self.launches[name] = self.launches.get(name, 0) + 1
        try:
            work()
        except Misuse as error:
            self.fault(f"{name}: {error}")
            self.lose("an illegal memory access was encountered")

    def later(self, action: Callable[[], None], reads: Tensor | None = None) -> None:
        """Put a copy into the line, which reads pinned memory if that is given."""
        with self._lock:
            self._issued += 1
            self._pending.append((self._issued, action))
            if reads is not None:
                self._reads.append((self._issued, reads.data_ptr(), reads.data_ptr() + reads.nbytes))

    def read_before(self, target: Tensor) -> None:
        """Let the copies happen that read what a later copy of the device writes: the line keeps their order."""
        start, end = target.data_ptr(), target.data_ptr() + target.nbytes
        with self._lock, torch.inference_mode():
            last = max((mark for mark, first, behind in self._reads if first < end and start < behind), default=0)
            self._happen(last)

    def mark(self) -> int:
        """The end of the line as it is now."""
        return self._issued

    def wait(self, mark: int) -> None:
        """Let everything up to `mark` happen."""
        self.check()
        if getattr(HERE, "recorder", None) is not None:
            self.fault("a wait while a graph is captured")
        with self._lock, torch.inference_mode():
            self._happen(mark)

    def has_happened(self, mark: int) -> bool:
        """Whether everything up to `mark` has."""
        return not self._pending or self._pending[0][0] > mark

    def _happen(self, mark: int) -> None:
        while self._pending and self._pending[0][0] <= mark:
            self._pending.popleft()[1]()
        self._reads = [each for each in self._reads if each[0] > mark]


# -- pinned memory --------------------------------------------------------------------------------------------------


class Pinned(Tensor):
    """Host memory whose copies are late."""

    gpu: Gpu

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_:
            target, source = args[:2]
            return cls._copy(target, source, non_blocking=kwargs.get("non_blocking", False))
        if func is Tensor.to and isinstance(args[1], torch.device):
            gone = plain(args[0]).clone()
            cls._copy(gone, args[0], non_blocking=kwargs.get("non_blocking", False))
            return gone
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def _copy(cls, target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
        gpu, there, kept = cls.gpu, plain(target), plain(source).clone()
        gpu.check()
        origin = plain(source) if isinstance(source, Pinned) else None
        if origin is not None:
            there.copy_(kept)

            def arrive() -> None:
                if not torch.equal(origin.view(torch.uint8), kept.view(torch.uint8)):  # NaN is no number's equal
                    gpu.fault("pinned memory was written before the device had read it")
        else:
            gpu.read_before(there)
            there.fill_(NONSENSE if there.dtype.is_signed else 0xA5)

            def arrive() -> None:
                there.copy_(kept)

        gpu.later(arrive, reads=origin)
        if not non_blocking:
            gpu.wait(gpu.mark())
        return target


def plain(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def emulated_empty(gpu: Gpu, empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.empty`, or another that makes tensors, that knows pinned memory."""

    def freed() -> None:
        if gpu.lost:
            gpu.fault("pinned memory was freed after the device was lost, which ends the process")

    def make(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = empty(*size, **options)
        if not pin_memory:
            return made
        gpu.check()
        if made.dtype == torch.int32:
            made.fill_(NONSENSE)
        pinned = made.as_subclass(Pinned)
        weakref.finalize(pinned, freed).atexit = False
        return pinned

    return make


# -- streams, events and graphs -------------------------------------------------------------------------------------


class Stream:
    """A stream: all share one line."""

    gpu: Gpu

    def __init__(self, device: Any = None) -> None:
        self.gpu.check()
        self.device = device

    def __enter__(self) -> Stream:
        HERE.streams = [*getattr(HERE, "streams", []), self]
        return self

    def __exit__(self, *error: object) -> None:
        HERE.streams = HERE.streams[:-1]

    def synchronize(self) -> None:
        self.gpu.wait(self.gpu.mark())

    def wait_stream(self, other: Stream) -> None:
        self.gpu.check()

    def wait_event(self, event: Event) -> None:
        self.gpu.check()

    def query(self) -> bool:
        self.gpu.check()
        return True


class Event:
    """An event; one that was never recorded is waited for at once."""

    gpu: Gpu

    def __init__(self, **options: Any) -> None:
        self._mark = 0

    def record(self, stream: Stream | None = None) -> None:
        self.gpu.check()
        self._mark = self.gpu.mark()

    def synchronize(self) -> None:
        self.gpu.wait(self._mark)

    def query(self) -> bool:
        self.gpu.check()
        return True

    def elapsed_time(self, end: Event) -> float:
        if not self.gpu.has_happened(end._mark):
            self.gpu.fault("a time is asked for before it is known")
        return 0.0


class Recorder(TorchDispatchMode):
    """Turns what a thread does into a list of operations that can be done again in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item"):
            raise RuntimeError(f"{name} is not permitted while a graph is captured")
        if func._schema.is_mutable:
            self.operations.append(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0] if args else None)
        made = func(*args, **kwargs)
        if not name.startswith("aten::empty") and memory_of(made).isdisjoint(memory_of([args, kwargs])):
            self.operations.append(lambda: self._again(func, args, kwargs, made))
        return made

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, made: Any) -> None:
        found = func(*args, **kwargs)
        for old, new in zip(*([each] if isinstance(each, Tensor) else each for each in (made, found)), strict=True):
            old.copy_(new)


def memory_of(values: Any) -> set[int]:
    """Where the tensors among `values` are: a schema says of `to` that its result may be a view, not whether it is."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


class Graph:
    """A graph."""

    gpu: Gpu

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.gpu.check()
        self.gpu.captured_in.append(threading.current_thread().name)
        self._recorder = HERE.recorder = Recorder()
        self._recorder.__enter__()

    def capture_end(self) -> None:
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)
        HERE.recorder = None

    def pool(self) -> object:
        return "pool"

    def replay(self) -> None:
        self.gpu.check()
        assert self._recorder is not None, "a graph is replayed that holds nothing"
        self.gpu.replays.append(len(self._recorder.operations))
        with torch.inference_mode():  # torch knows nothing of what a graph does
            for operation in self._recorder.operations:
                operation()

    def reset(self) -> None:
        self.gpu.check()
        self._recorder = None


# -- addresses ------------------------------------------------------------------------------------------------------

MAP_NORESERVE = 0x4000


class Addresses:
    """What memory/addresses.py asks of CUDA's driver. Memory that is new, or not there any more, reads as NaN."""

    GRAIN = 1 << 14

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._ranges: dict[int, NDArray[np.uint8]] = {}
        self._parts: dict[int, NDArray[np.uint8]] = {}

    @property
    def backed(self) -> int:
        """Bytes of memory behind all ranges."""
        return sum(len(part) for part in list(self._parts.values()))

    def grain(self, device: torch.device) -> int:
        return self.GRAIN

    def reserve(self, size: int) -> int:
        self._gpu.check()
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        whole = np.frombuffer(mmap.mmap(-1, size + self.GRAIN, flags=kind), np.uint8)
        whole = whole[-whole.ctypes.data % self.GRAIN :][:size]
        self._ranges[whole.ctypes.data] = whole
        return whole.ctypes.data

    def back(self, address: int, size: int, device: torch.device) -> None:
        self._gpu.check()
        assert address % self.GRAIN == 0 == size % self.GRAIN and size > 0
        parts = list(self._parts.items())  # which other threads may change meanwhile
        assert not any(start < address + size and address < start + len(part) for start, part in parts)
        if self.backed + size > 2 * self._gpu.free_bytes:
            raise torch.OutOfMemoryError("cuMemCreate: the device has not so much memory left")
        start, whole = next((at, each) for at, each in list(self._ranges.items()) if at <= address < at + len(each))
        part = self._parts[address] = whole[address - start : address - start + size]
        assert len(part) == size
        part[:] = 0xFF

    def unback(self, address: int, size: int) -> None:
        self._gpu.check()
        part = self._parts.pop(address)
        assert len(part) == size
        part[:] = 0xFF

    def free(self, address: int, size: int) -> None:
        whole = self._ranges.pop(address)
        assert len(whole) == size and not any(address <= start < address + size for start in self._parts)

    def tensor(self, owner: Any, device: torch.device) -> Tensor:
        assert owner.address in self._parts, "torch asks whose memory the first byte is"
        owner.__array_interface__ = owner.__cuda_array_interface__
        return torch.from_numpy(np.asarray(owner))

    def settle(self, device: torch.device) -> None:
        self._gpu.wait(self._gpu.mark())


# -- triton ---------------------------------------------------------------------------------------------------------


class Kernel:
    """What `triton.jit` makes of a kernel."""

    gpu: Gpu

    def __init__(self, kernel: Callable[..., None]) -> None:
        self._name, parameters = kernel.__name__, inspect.signature(kernel).parameters
        self._names = tuple(parameters)
        self._needed = {name for name, each in parameters.items() if each.default is each.empty}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **meta: Any) -> None:
            if 0 in grid:  # Triton launches nothing then
                return
            if meta.get("launch_pdl") and self.gpu.capability < (9, 0):
                raise Misuse(f"{self._name}: launched dependently on a GPU that cannot")
            meta = {name: value for name, value in meta.items() if name in self._names}
            given = dict(zip(self._names, values, strict=False)) | meta
            if len(given) < len(values) + len(meta) or not self._needed <= given.keys():
                raise TypeError(f"{self._name}{self._names} was launched with {len(values)} values and {[*meta]}")
            at = SimpleNamespace(**given)
            self.gpu.launch(self._name, lambda: EVERY_KERNEL[self._name](at))

        return launch


def jit(kernel: Any = None, **options: Any) -> Any:
    return Kernel(kernel) if kernel is not None else Kernel


# -- flashinfer -----------------------------------------------------------------------------------------------------


def send_plan(pinned: Tensor, workspace: Tensor, numbers: Sequence[int]) -> None:
    """Write a plan to pinned memory and start it on its way to the integer workspace."""
    count = 4 * (1 + len(numbers))
    if count > len(pinned) or count > len(workspace):
        raise Misuse("a plan larger than its workspace")
    pinned.numpy()[:count].view("int32")[:] = [len(numbers), *numbers]
    workspace[:count].copy_(pinned[:count], non_blocking=True)


def read_plan(workspace: Tensor) -> list[int]:
    """The plan that the device finds there now."""
    count = int(workspace[:4].view(torch.int32))
    return workspace[4 : 4 + 4 * count].view(torch.int32).tolist() if 0 <= 4 * count < len(workspace) else []


class DecodeModule:
    """FlashInfer's module behind a decode wrapper: rows and their pages are the plan."""

    @staticmethod
    def plan(_floats: Tensor, workspace: Tensor, pinned: Tensor, _queries: Tensor, indptr: Tensor, *rest: Any) -> None:
        Kernel.gpu.check()
        send_plan(pinned, workspace, indptr.diff().tolist())


class DecodeWrapper:
    """As `flashinfer.BatchDecodeWithPagedKVCacheWrapper` for graphs."""

    def __init__(
        self, workspace: Tensor, layout: str, *, paged_kv_indptr_buffer: Tensor, paged_kv_indices_buffer: Tensor,
        paged_kv_last_page_len_buffer: Tensor, **options: Any,
    ) -> None:  # fmt: skip
        self._float_workspace_buffer = workspace
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._indices, self._tails = paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True)

    def plan(
        self, indptr: Tensor, indices: Tensor, tails: Tensor, heads: int, kv_heads: int, head_dim: int, page_size: int,
        *, window_left: int, sm_scale: float, logits_soft_cap: float | None, **dtypes: Any,
    ) -> None:  # fmt: skip
        self._cap = logits_soft_cap
        self._paged_kv_indptr_buf.copy_(indptr)
        self._indices[: len(indices)].copy_(indices)
        self._tails.copy_(tails)
        self._size, self._scale, self._window = page_size, sm_scale, window_left + 1 or None
        self._cached_module = DecodeModule()
        self._cached_module.plan(
            self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer, indptr,
            indptr,
        )  # fmt: skip

    def run(self, q: Tensor, kv: Tensor, *, out: Tensor, k_scale: float, v_scale: float) -> None:
        def work() -> None:
            planned = read_plan(self._int_workspace_buffer)
            if len(planned) != len(q):
                raise Misuse(f"a batch of {len(q)} rows under a plan of {len(planned)}")
            starts = self._paged_kv_indptr_buf.tolist()
            pages = [self._indices[start:end] for start, end in pairwise(starts)]
            lengths = ((self._paged_kv_indptr_buf.diff() - 1) * self._size + self._tails).tolist()
            for length, most in zip(lengths, planned, strict=True):
                if -(-length // self._size) > most:
                    raise Misuse(f"a row of {length} tokens under a plan for {most} pages")
            out.copy_(attend_rows(
                q, kv, pages, lengths,
                scale=self._scale * k_scale, window=self._window, v_scale=v_scale, cap=self._cap,
            ))  # fmt: skip

        Kernel.gpu.launch("decode: fa2", work)


class PrefillWrapper:
    """As `flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, workspace: Tensor, layout: str, *, backend: str) -> None:
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True)

    def plan(
        self, starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, heads: int, kv_heads: int, head_dim: int,
        page_size: int, *, causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None,
        **dtypes: Any,
    ) -> None:  # fmt: skip
        Kernel.gpu.check()
        self._cap = logits_soft_cap
        assert causal
        used = indptr.diff()
        lengths = ((used - 1) * page_size + last).tolist()
        self._plan = [*starts.diff().tolist(), *lengths]
        self._pages = [part.tolist() for part in indices.split(used.tolist())]
        self._scale, self._window = sm_scale, window_left + 1 or None
        send_plan(self._pin_memory_int_workspace_buffer, self._int_workspace_buffer, self._plan)

    def run(self, q: Tensor, kv: Tensor, *, out: Tensor, k_scale: float, v_scale: float) -> None:
        def work() -> None:
            plan = read_plan(self._int_workspace_buffer)
            rows = len(plan) // 2
            if plan != self._plan or sum(plan[:rows]) != len(q):
                raise Misuse(f"a prefill of {len(q)} tokens under another plan")
            start = 0
            for count, length, pages in zip(plan[:rows], plan[rows:], self._pages, strict=True):
                here = slice(start, start + count)
                out[here] = attend(
                    q[here], kv, torch.tensor(pages), length,
                    scale=self._scale * k_scale, window=self._window, v_scale=v_scale, cap=self._cap,
                )  # fmt: skip
                start += count

        Kernel.gpu.launch("prefill: FlashInfer", work)


def xqa(*values: Any, **named: Any) -> None:
    """As `flashinfer.xqa.xqa`, which emulated_attention.py stands in front of."""
    raise Misuse("XQA is launched past its declaration")


def gen_jit_spec(name: str, sources: list[Any], extra_cuda_cflags: list[str]) -> SimpleNamespace:
    """As `flashinfer.jit.core.gen_jit_spec`, for the sources of ours."""
    major = Kernel.gpu.capability[0]
    if major < 9 or (major > 9 and sources[0].name != "even_decode.cu"):
        raise Misuse(f"{sources[0].name} cannot be compiled for a GPU of {Kernel.gpu.capability}")
    return SimpleNamespace(build_and_load=lambda: None)


class CompilationContext:
    """As FlashInfer's: the GPUs that it compiles for."""

    TARGET_CUDA_ARCHS = frozenset({(9, "0a")})


# -- putting it in place --------------------------------------------------------------------------------------------


def modules() -> dict[str, ModuleType]:
    """Stand-ins for `triton` and `flashinfer`, as far as `ops` imports them."""
    contents: dict[str, dict[str, Any]] = {
        "triton": {
            "jit": jit,
            "cdiv": lambda a, b: -(-a // b),
            "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
            "knobs": SimpleNamespace(
                cache=SimpleNamespace(manager_class=None), build=SimpleNamespace(impl=None, backend_dirs=set())
            ),
            "__version__": "3.6.0",
        },
        "triton.runtime": {},
        "triton.runtime.build": {"platform_key": None},
        "triton.runtime.cache": {"FileCacheManager": object},
        "triton.language": {},
        "triton.language.extra": {},
        "triton.language.extra.cuda": {"gdc_launch_dependents": None, "gdc_wait": None},
        "flashinfer": {
            "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
            "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper,
            "__version__": "0.6.16",
        },
        "flashinfer.compilation_context": {"CompilationContext": CompilationContext},
        "flashinfer.xqa": {"xqa": xqa},
        "flashinfer.jit": {
            "env": SimpleNamespace(FLASHINFER_GEN_SRC_DIR=None, has_flashinfer_jit_cache=lambda: False),
            "cpp_ext": SimpleNamespace(get_cuda_version=cache(lambda: None)),
        },
        "flashinfer.jit.core": {
            "gen_jit_spec": gen_jit_spec,
            "JitSpecNvcc": type("JitSpecNvcc", (), {"build_and_load": None}),
            "current_compilation_context": CompilationContext(),
        },
        "tvm_ffi": {"__version__": "0.1.9"},
    }
    made = {}
    for name, values in contents.items():
        module = made[name] = ModuleType(name)
        module.__dict__.update(values, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(made[parent], last):
            setattr(made[parent], last, module)
    return made


def kernels_on(gpu: Gpu) -> Any:
    """The kernels of products, experts and attention, as an engine is handed them."""
    real = importlib.import_module("headrace.ops.cuda.kernels").KERNELS
    products = tuple(EmulatedProduct(gpu, kernel) for kernel in real.products)

    def coded(kind: Any) -> tuple[EmulatedProduct, ...]:
        return tuple(EmulatedProduct(gpu, kernel) for kernel in real.coded(kind))

    experts = tuple(EmulatedExperts(gpu, kernel) for kernel in real.experts)
    attentions = emulated_decodes(gpu, real.decodes), emulated_prefills(gpu, real.prefills)
    return type(real)(products, coded, experts, *attentions)


def replace_torch(patch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Put the emulation into the places of torch's."""
    for kind in (Pinned, Stream, Event, Graph, Kernel):
        patch.setattr(kind, "gpu", gpu, raising=False)
    patch.setattr(torch, "zeros", emulated_empty(gpu, torch.zeros))
    patch.setattr(torch, "empty", emulated_empty(gpu, torch.empty))
    default = Stream()
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: [default, *getattr(HERE, "streams", [])][-1],
        "device": lambda device: contextlib.nullcontext(),
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: CHIPS[gpu.capability][0],
        "get_device_properties": lambda device=None: SimpleNamespace(
            major=gpu.capability[0],
            minor=gpu.capability[1],
            multi_processor_count=PROCESSORS,
            shared_memory_per_block_optin=CHIPS[gpu.capability][1],
        ),
        "mem_get_info": lambda device=None: (gpu.free_bytes, 2 * gpu.free_bytes),
        "memory_allocated": lambda device=None: gpu.allocated,
        "max_memory_allocated": lambda device=None: gpu.allocated,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": gpu.check,
    }
    for name, value in replaced.items():
        patch.setattr(torch.cuda, name, value)


@contextlib.contextmanager
def built_anew() -> Iterator[None]:
    """While it lasts, import the modules above `triton` and `flashinfer` anew; then bring back those of before."""
    before = _take_modules()
    try:
        yield
    finally:
        _take_modules()
        for name, module in before.items():
            sys.modules[name] = module
            package, _, last = name.rpartition(".")
            setattr(sys.modules[package], last, module)


def _take_modules() -> dict[str, ModuleType]:
    """Remove the modules from where imports look for them, also those by `from package import module`."""
    taken = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(BUILT_ON)}
    for name in taken:
        package, _, last = name.rpartition(".")
        vars(taken.get(package) or sys.modules[package]).pop(last, None)
    return taken


@contextlib.contextmanager
def emulated(capability: tuple[int, int] = (9, 0)) -> Iterator[Gpu]:
    """While it lasts, `Engine(folder, device="cuda")` runs on the emulated device, whose tensors are the CPU's.

    Args:
        capability: What it can run: a key of `CHIPS`.

    Raises:
        AssertionError: At its end: something happened that a GPU might not survive.
    """
    gpu = Gpu(capability)
    with Recorder():  # torch imports more of itself at the first one, and must not find this triton then
        torch.ones(1).add(1)
    with torch.device("meta"):  # torch lists what makes tensors at the first one, and must not find what stands in
        torch.empty(0)
    replaced = ("flashinfer", "triton", "tvm_ffi")
    ours = [name for name in sys.modules if name.split(".")[0] in replaced]
    with built_anew(), pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("XDG_CACHE_HOME", folder)
        for name in ours:
            patch.delitem(sys.modules, name)
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        replace_torch(patch, gpu)
        patch.setattr(importlib.import_module("headrace.ops.cuda.memory.addresses"), "_driver", lambda: gpu.addresses)

        class Staging(weight_files._Staging):
            def __init__(self, device: torch.device) -> None:
                super().__init__(SimpleNamespace(type="cuda"))  # type: ignore[arg-type] # pinned, as on a GPU
                self._device = device

        patch.setattr("headrace.engine.life.build.find_gpu", lambda name: torch.device("cpu"))
        open_cuda = importlib.import_module("headrace.engine.model.cuda.opening")
        patch.setattr(open_cuda, "check_compilers", lambda: None)  # nothing is compiled here
        patch.setattr(open_cuda, "open_cuda", partial(open_cuda.open_cuda, kernels=kernels_on(gpu)))
        patch.setattr(weight_files, "_Staging", Staging)
        yield gpu
        assert gpu.lost or not gpu.addresses.backed, "pages outlive their engine"
    assert not gpu.faults, gpu.faults
