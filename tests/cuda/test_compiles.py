"""Every kernel compiles for every architecture that we name, without a GPU or a driver."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from cuda.bindings import nvrtc
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from acceptmoe.assets import asset_dir
from acceptmoe.ops import expert_mlp_triton
from acceptmoe.ops.cuda_kernels import CUDA_TYPES, compile_options

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# For each kernel, the types it is compiled for; all of them on one architecture, the first on all.
TYPES = {
    "select_experts": [{"LOGIT": "float", "WEIGHT": "float"}, {"LOGIT": "bf16", "WEIGHT": "fp16"}],
    "route_rows": [{}],
    "gather_rows": [{}],
    "combine_rows": [{"VALUE": name, "WEIGHT": name} for name in CUDA_TYPES.values()],
}
BUILDS = [
    (kernel, defines, architecture)
    for kernel, variants in TYPES.items()
    for index, defines in enumerate(variants)
    for architecture in (ARCHITECTURES if index == 0 else (90,))
]


def compile_cubin(kernel: str, defines: dict[str, str], architecture: int) -> bytes:
    source = (asset_dir("cuda") / f"{kernel}.cu").read_bytes()
    error, program = nvrtc.nvrtcCreateProgram(source, f"{kernel}.cu".encode(), 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [*compile_options(defines), f"--gpu-architecture=sm_{architecture}"]
    encoded = [option.encode() for option in options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    _, log_size = nvrtc.nvrtcGetProgramLogSize(program)
    log = written_to(log_size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = written_to(size)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def written_to(size: int) -> bytes:
    """Bytes that a C function may write `size` of.

    At least two: Python has but one object for each single byte, and all of the process would see
    what is written to it.
    """
    return bytes(max(size, 2))


def test_every_source_is_in_the_table() -> None:
    assert sorted(TYPES) == sorted(path.stem for path in asset_dir("cuda").glob("*.cu"))


@pytest.mark.parametrize(("kernel", "defines", "architecture"), BUILDS, ids=str)
def test_nvrtc_compiles_the_kernel(kernel: str, defines: dict[str, str], architecture: int) -> None:
    cubin = compile_cubin(kernel, defines, architecture)
    assert cubin.startswith(b"\x7fELF")
    assert kernel.encode() in cubin


def signature(kernel: Any, dtype: str) -> dict[str, str]:
    """Triton's type of each parameter of a product."""
    pointers = {"rows": dtype, "weight": dtype, "bias": dtype, "inner": dtype, "results": "fp32"}
    pointers |= dict.fromkeys(("union_experts", "union_offsets", "num_union"), "i32")
    types = {}
    for name in (parameter.name for parameter in kernel.params):
        if name.isupper() or name == "input_stride":
            types[name] = "constexpr"
        elif name in pointers:
            types[name] = f"*{pointers[name]}"
        else:
            types[name] = "fp32" if name in ("limit", "alpha") else "i32"
    return types


def compile_product(name: str, dtype: str, architecture: int, constants: dict[str, Any]) -> Any:
    kernel = getattr(expert_mlp_triton, name)
    names = [parameter.name for parameter in kernel.params]
    constants = {key: value for key, value in constants.items() if key in names}
    aligned = [
        index
        for index, parameter in enumerate(names)
        if parameter not in constants and parameter not in ("limit", "alpha", "num_row_tiles")
    ]
    source = ASTSource(
        kernel,
        signature(kernel, dtype),
        {(names.index(key),): value for key, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


STANDARD = {"ACTIVATION": "silu", "HAS_BIAS": False, "IS_INTERLEAVED": False}
GPT_OSS = {"ACTIVATION": "clamped_swiglu", "HAS_BIAS": True, "IS_INTERLEAVED": True}
PRODUCTS = [
    *(("gate_up_kernel", "bf16", 32, architecture, STANDARD) for architecture in ARCHITECTURES),
    *(("down_kernel", "bf16", 16, architecture, STANDARD) for architecture in (80, 90, 100)),
    ("gate_up_kernel", "fp16", 64, 90, GPT_OSS),
    ("down_kernel", "fp32", 64, 86, GPT_OSS),
]


@pytest.mark.parametrize(("name", "dtype", "rows", "architecture", "layout"), PRODUCTS, ids=str)
def test_triton_compiles_the_product_for_tensor_cores(
    name: str,
    dtype: str,
    rows: int,
    architecture: int,
    layout: dict[str, Any],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    inputs = 32 if dtype == "fp32" else 64
    sizes = {"ROWS": rows, "OUTPUTS": 64, "INPUTS": inputs, "input_stride": 1}
    compiled = compile_product(name, dtype, architecture, {**layout, **sizes})
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    assert compiled.metadata.shared <= 64 * 1024  # what `default_tiles` promises
    if dtype != "fp32":  # Triton multiplies fp32 exactly only outside the tensor cores
        assert "mma" in compiled.asm["ptx"]
    assert "cp.async" in compiled.asm["ptx"]  # weights are on their way while others are multiplied
