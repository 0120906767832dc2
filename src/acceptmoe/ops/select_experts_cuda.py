"""`acceptmoe::select_experts` on CUDA: one launch of one block, `cuda/select_experts.cu`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops.cuda_kernels import CUPY_KERNELS, Kernels, cuda_type
from acceptmoe.routing import SCORINGS, ScoringName
from acceptmoe.selection import COMBINES, SIZINGS, Combine, Sizing

# Sizes of the kernel's arrays in shared memory.
MAX_ROWS, MAX_EXPERTS, MAX_EXPERTS_PER_ROW, MAX_GROUPS = 256, 512, 16, 32
NUM_THREADS = 512
NUM_COUNTS = 5


def select_experts_cuda(
    logits: Tensor,
    natural_weights: Tensor,
    natural_ids: Tensor,
    row_weights: Tensor,
    num_anchored: Tensor,
    path_commitment: Tensor,
    is_real: Tensor,
    correction_bias: Tensor | None,
    resident: Tensor | None,
    is_enabled: Tensor,
    scoring: ScoringName,
    renormalize: bool,
    scale: float,
    num_groups: int,
    groups_per_row: int,
    sizing: Sizing,
    size_parameter: float,
    combine: Combine,
    *,
    kernels: Kernels = CUPY_KERNELS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op's CUDA kernel: weights [T, K], ids [T, K], eligible [E] and counts [5].

    Everything the device decides stays there: nothing is read back, `is_enabled` included.
    Raises `InvalidArgumentError` for more rows, experts or groups than the kernel has room for.
    """
    _check_sizes(logits, natural_ids, num_groups)
    if scoring == "sigmoid_bias_group" and correction_bias is None:
        correction_bias = logits.new_zeros(logits.shape[1], dtype=torch.float32)
    weights = natural_weights.new_empty(natural_weights.shape)
    ids = natural_ids.new_empty(natural_ids.shape)
    eligible = torch.empty(logits.shape[1], dtype=torch.bool, device=logits.device)
    counts = torch.empty(NUM_COUNTS, dtype=torch.float32, device=logits.device)
    kernels.launch(
        "select_experts",
        {
            "LOGIT": cuda_type("logits", logits),
            "WEIGHT": cuda_type("natural_weights", natural_weights),
        },
        grid=1,
        block=NUM_THREADS,
        arguments=(
            logits.contiguous(),
            natural_weights.contiguous(),
            natural_ids.contiguous(),
            row_weights.float().contiguous(),
            num_anchored.contiguous(),
            path_commitment.float().contiguous(),
            is_real.contiguous(),
            None if correction_bias is None else correction_bias.float().contiguous(),
            None if resident is None else resident.contiguous(),
            is_enabled,
            np.int32(logits.shape[0]),
            np.int32(logits.shape[1]),
            np.int32(natural_ids.shape[1]),
            np.int32(SCORINGS.index(scoring)),
            np.int32(renormalize),
            np.float32(scale),
            np.int32(num_groups),
            np.int32(groups_per_row),
            np.int32(SIZINGS.index(sizing)),
            np.float32(size_parameter),
            np.int32(COMBINES.index(combine)),
            weights,
            ids,
            eligible,
            counts,
        ),
    )
    return weights, ids, eligible, counts


def _check_sizes(logits: Tensor, natural_ids: Tensor, num_groups: int) -> None:
    for what, got, most in (
        ("rows in a verification block", logits.shape[0], MAX_ROWS),
        ("experts", logits.shape[1], MAX_EXPERTS),
        ("experts per row", natural_ids.shape[1], MAX_EXPERTS_PER_ROW),
        ("groups of experts", num_groups, MAX_GROUPS),
    ):
        if not 1 <= got <= most:
            raise InvalidArgumentError(
                f"{got} {what}; the CUDA kernel of select_experts takes 1 to {most}. "
                "Use fewer nodes, or leave experts='acceptmoe' off"
            )
