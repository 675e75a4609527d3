"""`find_gpu`: finds the GPU that a name stands for, or says what would help if there is none; needs torch alone.

`means_cpu` says whether the name of a device stands for the CPU.
"""

from __future__ import annotations

import torch

from headrace.engine.errors import DeviceUnavailable

__all__ = ["find_gpu", "means_cpu"]


def means_cpu(name: str) -> bool:
    """Return whether the device called `name` is the CPU, as "auto" is where torch sees no GPU."""
    return name == "cpu" or (name == "auto" and not torch.cuda.is_available())


def find_gpu(name: str) -> torch.device:
    """Return the GPU called `name`: "cuda" and "auto" are the first, "cuda:1" is the second.

    Raises:
        DeviceUnavailable: There is no such GPU; the message says what would help.
    """
    if not torch.cuda.is_available():
        raise _unavailable(name, _missing())
    device = torch.device("cuda" if name == "auto" else name)
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise _unavailable(name, f"torch finds {count} GPU{'s' * (count != 1)}, counted from cuda:0")
    return torch.device("cuda", index)


def _missing() -> str:
    """Return why torch sees no GPU at all."""
    if torch.version.cuda is None:
        return (
            f"this build of torch ({torch.__version__}) has no CUDA; install one that has (the selector on pytorch.org "
            "gives the command), and then headrace[cuda], or choose device='cpu'"
        )
    try:
        torch.cuda.init()
        reason = "it does not say why"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
    return (
        f"torch sees no GPU ({reason}); see that `nvidia-smi` lists one, that its driver is new enough for CUDA "
        f"{torch.version.cuda}, and that CUDA_VISIBLE_DEVICES does not hide it, or choose device='cpu'"
    )


def _unavailable(name: str, problem: str) -> DeviceUnavailable:
    return DeviceUnavailable(f"device: {name} is not there: {problem}", field="device", value=name)
