"""Targets with their drafters and tables, at both widths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acceptmoe.bench.chains import chain_drafter
from acceptmoe.bench.policy_grid import rival_policies, speed_policies
from acceptmoe.bench.setups import check_policies, load_setup, num_experts
from acceptmoe.drafting import Eagle3Drafter
from acceptmoe.errors import InvalidArgumentError, TableError


def test_a_widened_setup_is_wide_throughout(bundled: str, table_file: Path) -> None:
    setup = load_setup(bundled, "assistant", dtype=torch.bfloat16, factor=2, table=str(table_file))
    assert setup.model.config.hidden_size == setup.drafter.model.config.hidden_size == 64
    assert setup.model.dtype == torch.bfloat16
    assert num_experts(bundled) == setup.model.config.num_experts == 8


def test_a_bundled_head_can_be_widened() -> None:
    setup = load_setup("tiny-qwen3-moe", "eagle3", factor=2)
    assert isinstance(setup.drafter, Eagle3Drafter)
    assert setup.drafter.head.config.hidden_size == setup.model.config.hidden_size
    setup.drafter.check_target(setup.model)
    chain = chain_drafter(setup.drafter)
    assert isinstance(chain, Eagle3Drafter)
    assert (chain.name, chain.topk) == ("eagle3", 1)


@pytest.mark.parametrize("target", ["tiny-qwen3-moe", "tiny-olmoe", "tiny-gpt-oss"])
def test_the_grids_mean_something_for_every_bundled_target(target: str) -> None:
    experts = num_experts(target)
    check_policies({*rival_policies(experts), *speed_policies(experts)}, [target])


def test_a_policy_that_means_nothing_for_a_target_is_refused(bundled: str) -> None:
    with pytest.raises(InvalidArgumentError, match="oea:top=3 on random-moe: top is 3; this"):
        check_policies(["oea:top=2", "oea:top=3"], [bundled])


def test_what_is_unknown_is_refused_by_name(bundled: str) -> None:
    with pytest.raises(InvalidArgumentError, match="target is 'big'; it must be one of random-moe"):
        load_setup("big", "ngram")
    with pytest.raises(InvalidArgumentError, match="drafter is 'oracle'; it must be one of assis"):
        load_setup(bundled, "oracle")
    with pytest.raises(TableError, match="random-moe__ngram"):
        load_setup(bundled, "ngram")
