"""AcceptMoE: faster small-batch decoding of mixture-of-experts models by speculative trees.

model = acceptmoe.wrap(model, table)
model.generate(**inputs)
"""

from __future__ import annotations

from acceptmoe.api import unwrap, wrap
from acceptmoe.decoding.audit import KLLimitWarning
from acceptmoe.errors import (
    AcceptMoEError,
    DrafterError,
    InvalidArgumentError,
    KernelBuildError,
    SelfCheckError,
    TableError,
    TargetError,
    TreeError,
    UnsupportedGenerateError,
    UnsupportedModelError,
    WrapStateError,
)
from acceptmoe.table import CommitmentTable
from acceptmoe.targets import load_target
from acceptmoe.tree import DraftTree, TreeShape

__version__ = "0.1.0"

__all__ = [
    "AcceptMoEError",
    "CommitmentTable",
    "DraftTree",
    "DrafterError",
    "InvalidArgumentError",
    "KLLimitWarning",
    "KernelBuildError",
    "SelfCheckError",
    "TableError",
    "TargetError",
    "TreeError",
    "TreeShape",
    "UnsupportedGenerateError",
    "UnsupportedModelError",
    "WrapStateError",
    "__version__",
    "load_target",
    "unwrap",
    "wrap",
]
