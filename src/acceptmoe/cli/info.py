"""`acceptmoe info`: what is installed, what this machine has, what is supported."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch
from rich.table import Table as RichTable

from acceptmoe import __version__
from acceptmoe.bench.provenance import cpu_flags, cpu_name, git_commit, usable_cpus
from acceptmoe.cli.console import output, print_json, reports_errors
from acceptmoe.cli.options import AsJson
from acceptmoe.drafting import NAMED_DRAFTERS
from acceptmoe.models.adapter import FAMILIES
from acceptmoe.policies import DEFAULT_POLICY, POLICIES
from acceptmoe.table import shipped_tables
from acceptmoe.targets import target_names

# What matters to the speed of matrix products, in the kernel's spelling.
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "triton")
CUPY_BUILDS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


@reports_errors
def info(as_json: AsJson = False) -> None:
    """Show versions, processor, GPU, supported model families, policies, targets and tables."""
    facts = collect()
    if as_json:
        print_json(facts)
        return
    table = RichTable(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), as_text(value))
    output.print(table)


def collect() -> dict[str, Any]:
    """Everything that `info` shows, as JSON values."""
    return {
        "acceptmoe": __version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        **{name: find_version(name) for name in LIBRARIES},
        "cupy": find_cupy(),
        "cpu": cpu_name(),
        "cpu_features": [name for name in CPU_FEATURES if name in cpu_flags()],
        "num_cpus": usable_cpus(),
        "num_threads": torch.get_num_threads(),
        "gpus": [
            torch.cuda.get_device_name(index)
            for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ],
        "torch_cuda": torch.version.cuda,
        "model_families": list(FAMILIES),
        "policies": list(POLICIES),
        "default_policy": DEFAULT_POLICY,
        "drafters": [*NAMED_DRAFTERS, "a checkpoint folder"],
        "bundled_targets": list(target_names()),
        "tables": shipped_tables(),
    }


def find_version(distribution: str) -> str | None:
    """The installed version, read without importing; None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def find_cupy() -> str | None:
    """Build and version of the CuPy that is installed, or None."""
    for build in CUPY_BUILDS:
        version = find_version(build)
        if version is not None:
            return f"{build} {version}"
    return None


def as_text(value: Any) -> str:
    """A value as `info` shows it to people."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
