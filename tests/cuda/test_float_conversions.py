"""The 16-bit floats of `cuda/include/acceptmoe.cuh` against torch's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from host_kernels import HostKernels


def every_kind_of_float() -> torch.Tensor:
    """All 16-bit values of both types, what lies between them, and a spread of all of fp32."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = [patterns.view(dtype).float() for dtype in (torch.bfloat16, torch.float16)]
    values.append(values[1].nextafter(torch.tensor(torch.inf)))
    values.append((values[1][:-1] + values[1][1:]) / 2)  # ties
    values.append(torch.arange(0, 2**32, 65521).to(torch.int32).view(torch.float32))
    return torch.cat(values)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_conversions_round_as_torch_does(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kernels = HostKernels(tmp_path, sources=Path(__file__).parent)
    values = every_kind_of_float()
    narrow, wide = torch.zeros_like(values, dtype=dtype), torch.zeros_like(values)
    arguments = (values, np.int32(values.numel()), narrow, wide)
    kernels.launch("float_bits", {"TYPE": name}, grid=1, block=32, arguments=arguments)
    expected = values.to(dtype)
    is_number = ~values.isnan()
    assert torch.equal(narrow[is_number], expected[is_number])
    assert narrow[~is_number].isnan().all()
    assert torch.equal(wide[is_number], expected[is_number].float())
    # Zeros keep their sign.
    assert torch.equal(narrow[is_number].signbit(), expected[is_number].signbit())
