"""`Arch`: the abilities of a GPU; the only module that asks a device for them, and never chooses a kernel.

Kernels say which features and how much shared memory they need (their `refuses`), and are tested against every `Arch`
of `NAMES` without its hardware: `Arch.named("sm_89")` is what the engine sees on such a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

from headrace.ops.cuda.tuning.chips import tuning_for
from headrace.ops.cuda.tuning.table import Tuning

__all__ = ["NAMES", "Arch", "Feature"]

Feature = Literal["bf16", "fp8", "dependent_launch", "bulk_copy", "wgmma", "xqa"]

_KIB = 1 << 10
_SHARED_BYTES: Final = {
    (7, 0): 96 * _KIB,
    (7, 5): 64 * _KIB,
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 7): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
    (12, 0): 99 * _KIB,
    (12, 1): 99 * _KIB,
}
"""Most dynamic shared memory of a block, in bytes, by compute capability (CUDA C++ Programming Guide, table of
technical specifications)."""
_PROCESSORS: Final = 132
"""Multiprocessors of a GPU that is known only by name."""
NAMES: Final = tuple(f"sm_{major}{minor}" for major, minor in _SHARED_BYTES)
_XQA_MAJORS = (9, 10, 12)
_OVERRIDE = "HEADRACE_ARCH"


@dataclass(frozen=True, slots=True)
class Arch:
    """The abilities of one GPU."""

    capability: tuple[int, int]
    """Compute capability, major and minor."""
    processors: int
    """Number of multiprocessors."""
    shared_bytes: int
    """Most dynamic shared memory that one block may have, in bytes."""
    features: frozenset[Feature]
    """Features that its instructions and the kernels of libraries allow."""

    @classmethod
    def of(cls, device: torch.device | str) -> Arch:
        """Ask a device; the environment variable HEADRACE_ARCH (`sm_80`) restricts the answer to another GPU's.

        Raises:
            ValueError: HEADRACE_ARCH names no known GPU.
        """
        found = torch.cuda.get_device_properties(device)
        capability = (found.major, found.minor)
        shared_bytes: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined] # which torch's types lack
        arch = cls(capability, found.multi_processor_count, shared_bytes, _features(capability))
        pretended = os.environ.get(_OVERRIDE)
        if not pretended:
            return arch
        try:
            return arch.restricted_to(cls.named(pretended))
        except ValueError as error:
            raise ValueError(f"{_OVERRIDE}: {error}") from None

    @classmethod
    def named(cls, name: str) -> Arch:
        """Return the GPU of a name such as `sm_89`, with as many multiprocessors as an H200.

        Raises:
            ValueError: The name is none of `NAMES`.
        """
        if name not in NAMES:
            raise ValueError(f"must be one of {', '.join(NAMES)}, got {name!r}")
        capability = list(_SHARED_BYTES)[NAMES.index(name)]
        return cls(capability, _PROCESSORS, _SHARED_BYTES[capability], _features(capability))

    @property
    def name(self) -> str:
        """Name of the target for compilers, such as `sm_89`."""
        major, minor = self.capability
        return f"sm_{major}{minor}"

    @property
    def tuning(self) -> Tuning:
        """Numbers that choose between kernels on this GPU."""
        return tuning_for(self.capability, self.processors)

    def has(self, feature: Feature) -> bool:
        """Return whether kernels may use `feature`."""
        return feature in self.features

    def lacks(self, *features: Feature) -> str | None:
        """Return a sentence about which of `features` are missing; None if all are there."""
        missing = [_WORDS[feature] for feature in features if feature not in self.features]
        return f"{self.name} lacks {' and '.join(missing)}" if missing else None

    def restricted_to(self, other: Arch) -> Arch:
        """Return the GPU that has only what both have, with the name of `other`."""
        return replace(
            other,
            processors=self.processors,
            shared_bytes=min(self.shared_bytes, other.shared_bytes),
            features=self.features & other.features,
        )


_WORDS: Final[dict[Feature, str]] = {
    "bf16": "arithmetic in bfloat16 (compute capability 8.0 and newer)",
    "fp8": "conversions of 8-bit floats (compute capability 8.9 and newer)",
    "dependent_launch": "programmatic dependent launch (Hopper and newer)",
    "bulk_copy": "bulk copies to shared memory (Hopper and newer)",
    "wgmma": "warpgroup matrix products (Hopper)",
    "xqa": "FlashInfer's XQA kernels (Hopper and Blackwell)",
}


def _features(capability: tuple[int, int]) -> frozenset[Feature]:
    found: dict[Feature, bool] = {
        "bf16": capability >= (8, 0),
        "fp8": capability >= (8, 9),
        "dependent_launch": capability >= (9, 0),
        "bulk_copy": capability >= (9, 0),
        "wgmma": capability[0] == 9,  # Blackwell has other instructions instead
        "xqa": capability[0] in _XQA_MAJORS,
    }
    return frozenset(feature for feature, there in found.items() if there)
