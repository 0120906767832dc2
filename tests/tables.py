"""Commitment tables with plausible numbers, made for a model at hand."""

from __future__ import annotations

from transformers import PreTrainedModel

from acceptmoe.table import (
    CalibrationCurve,
    CommitmentTable,
    DepthStatistics,
    HeldOutError,
    Provenance,
    config_fingerprint,
)


def make_table_for(
    model: PreTrainedModel, *, num_nodes: int, max_depth: int, drafter: str
) -> CommitmentTable:
    """A table that fits `model` and this tree: commitment 0.4 to the power of the depth."""
    num_trials = 10**6
    successes = tuple(round(num_trials * 0.4**depth) for depth in range(max_depth + 1))
    return CommitmentTable(
        target=type(model).__name__,
        target_fingerprint=config_fingerprint(model.config),
        drafter=drafter,
        num_nodes=num_nodes,
        max_depth=max_depth,
        depths=DepthStatistics((num_trials,) * (max_depth + 1), successes),
        curve=CalibrationCurve((0.0, 0.1, 0.5, 1.0), (0.001, 0.05, 0.4, 0.9)),
        held_out_error=HeldOutError(curve=0.01, raw=0.1, num_prompts=4, num_nodes=100),
        provenance=Provenance(
            dataset="none",
            seeds=(0,),
            num_prompts=4,
            acceptmoe_version="0",
            command="made by hand",
        ),
    )
