"""Runs `cuda/*.cu` on the CPU, built by g++ behind `host/cuda_on_host.hpp`: a program a kernel."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from acceptmoe.assets import asset_dir
from acceptmoe.ops.cuda_kernels import Argument

HOST_DIR = Path(__file__).parent / "host"
SANITIZERS = {
    "none": ["-O1"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
# What a sanitizer found ends the program with its own code, so that a test can tell who spoke.
SANITIZER_EXIT_CODE = 66
SANITIZER_ENVIRONMENT = {
    "ASAN_OPTIONS": f"exitcode={SANITIZER_EXIT_CODE}:detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"exitcode={SANITIZER_EXIT_CODE}",
}


class HostKernelError(RuntimeError):
    """A kernel did not build or run to its end on the host; the text is the tool's output."""

    def __init__(self, returncode: int, output: str) -> None:
        super().__init__(f"exit code {returncode}\n{output}")
        self.returncode = returncode


@dataclass
class HostKernels:
    """Launches kernels on CPU tensors, with the interface of `acceptmoe.ops.cuda_kernels`.

    `num_threads`, where given, replaces the block size of every launch: small blocks are fast here
    and reach the loops that a large block would finish in one turn. `edits` rewrite the source
    first, for tests that break a kernel. `sources` is the folder of the `.cu` files.
    """

    folder: Path
    sanitizer: str = "none"
    num_threads: int | None = None
    edits: Mapping[str, str] = field(default_factory=dict)
    sources: Path = field(default_factory=lambda: asset_dir("cuda"))
    _programs: dict[tuple[str, tuple[str, ...]], Path] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def launch(
        self,
        kernel: str,
        defines: Mapping[str, str],
        grid: int,
        block: int,
        arguments: Sequence[Argument],
    ) -> None:
        program = self._program(kernel, defines)
        call, result = self.folder / "call.bin", self.folder / "result.bin"
        call.write_bytes(_call_file(grid, self.num_threads or block, arguments))
        self._run([str(program), str(call), str(result)])
        _write_back(result.read_bytes(), arguments)

    def _program(self, kernel: str, defines: Mapping[str, str]) -> Path:
        key = (kernel, tuple(sorted(defines.items())))
        if key not in self._programs:
            source = (self.sources / f"{kernel}.cu").read_text(encoding="utf-8")
            for old, new in self.edits.items():
                source = source.replace(old, new, 1)
            self._programs[key] = self._build(kernel, source, defines)
        return self._programs[key]

    def _build(self, kernel: str, source: str, defines: Mapping[str, str]) -> Path:
        stem = self.folder / f"{kernel}_{next(self._numbers)}"
        unit = stem.with_suffix(".cpp")
        unit.write_text(
            f'#include "cuda_on_host.hpp"\n#line 1 "{kernel}.cu"\n{source}\n'
            f"int main(int, char** argv) {{\n"
            f"  return host::run_call_file({kernel}, argv[1], argv[2]);\n}}\n",
            encoding="utf-8",
        )
        flags = ["-std=c++17", "-g1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
        flags += ["-Wno-unknown-pragmas"]  # how far to unroll is said to NVRTC alone
        flags += [f"-I{HOST_DIR}", f"-I{asset_dir('cuda') / 'include'}"]
        flags += [f"-D{name}={value}" for name, value in defines.items()]
        self._run(["g++", *flags, *SANITIZERS[self.sanitizer], str(unit), "-o", str(stem)])
        return stem

    def _run(self, command: list[str]) -> None:
        done = _run_watched(command)
        if "unexpected memory mapping" in done.stderr:
            # ThreadSanitizer knows only some of the places where a newer Linux may load a program.
            done = _run_watched(["setarch", "--addr-no-randomize", *command])
        if done.returncode != 0:
            raise HostKernelError(done.returncode, done.stderr[-6000:])


def _run_watched(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **SANITIZER_ENVIRONMENT}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _call_file(grid: int, block: int, arguments: Sequence[Argument]) -> bytes:
    parts = [struct.pack("<III", grid, block, len(arguments))]
    for argument in arguments:
        if argument is None:
            parts.append(struct.pack("<IQ", 2, 0))
        elif isinstance(argument, Tensor):
            assert argument.is_contiguous()
            content = argument.reshape(-1).view(torch.uint8).numpy().tobytes()
            parts += [struct.pack("<IQ", 1, len(content)), content]
        else:
            parts += [struct.pack("<IQ", 0, argument.nbytes), argument.tobytes()]
    return b"".join(parts)


def _write_back(content: bytes, arguments: Sequence[Argument]) -> None:
    offset = 0
    for argument in arguments:
        if isinstance(argument, Tensor):
            size = argument.numel() * argument.element_size()
            part = bytearray(content[offset : offset + size])
            if size:
                flat = torch.frombuffer(part, dtype=torch.uint8).view(argument.dtype)
                argument.copy_(flat.view(argument.shape))
            offset += size
    assert offset == len(content)
