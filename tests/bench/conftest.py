"""Targets for the benchmarks, and the folder of the peers, which is no part of the package."""

import sys
from pathlib import Path

from random_target import bundled, checkpoints, table_file

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

__all__ = ["bundled", "checkpoints", "table_file"]
