"""Whether there is a CUDA device that the kernels can use."""

from __future__ import annotations

import torch

from acceptmoe.errors import KernelBuildError
from acceptmoe.ops.cuda_kernels import import_cupy


def missing_gpu() -> str | None:
    """Why no CUDA kernel of ours can run here, or None when they can."""
    try:
        cupy = import_cupy()
    except KernelBuildError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if cupy.cuda.runtime.getDeviceCount() < 1:
        return "cupy sees no CUDA device"
    return None
