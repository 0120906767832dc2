"""The training scripts are no package: their folder, and the heads of the drafting tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "drafting")]
