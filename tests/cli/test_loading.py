"""What the names on the command line become."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from acceptmoe.cli.loading import Target, open_drafter, open_target, widened_drafter
from acceptmoe.cli.options import Device, Dtype
from acceptmoe.drafting import AssistantDrafter
from acceptmoe.errors import DrafterError
from acceptmoe.models.rounded import Int8Linear
from acceptmoe.targets.widen import widen
from random_target import ASSISTANT


@pytest.fixture
def target(bundled: str) -> Target:
    return open_target(bundled, Dtype.auto, Device.cpu)


def rounded_layers(drafter: AssistantDrafter) -> list[Int8Linear]:
    return [module for module in drafter._computed.modules() if isinstance(module, Int8Linear)]


def test_weights_reach_a_bundled_drafter_and_one_of_a_folder(
    target: Target, checkpoints: Path
) -> None:
    for spec in (None, "assistant", str(checkpoints / ASSISTANT)):
        drafter = open_drafter(spec, target, "int8")
        assert isinstance(drafter, AssistantDrafter)
        assert drafter.weights == "int8"
        assert rounded_layers(drafter)


def test_a_widened_drafter_is_rounded_from_exact_weights(target: Target) -> None:
    drafter = open_drafter(None, target, "int8")
    assert isinstance(drafter, AssistantDrafter)
    widened = widened_drafter(drafter, 2)
    assert isinstance(widened, AssistantDrafter)
    assert widened.weights == "int8"
    expected = AssistantDrafter(widen(drafter.model, 2, 2), weights="int8")
    layers = zip(rounded_layers(widened), rounded_layers(expected), strict=True)
    for ours, theirs in layers:
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.scales, theirs.scales)
        assert torch.equal(ours.weight, theirs.weight)  # the exact one


def test_a_widened_drafter_stays_exact_without_weights(target: Target) -> None:
    widened = widened_drafter(open_drafter(None, target), 2)
    assert isinstance(widened, AssistantDrafter)
    assert widened.weights is None
    assert widened._computed is widened.model


def test_weights_beside_a_target_elsewhere_are_refused_before_anything_is_loaded(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acceptmoe.cli.loading.load_drafter", None)
    elsewhere = replace(target, model=target.model.to("meta"))
    with pytest.raises(DrafterError, match="weights='int8' and would run on meta"):
        open_drafter(None, elsewhere, "int8")


def test_weights_of_a_drafter_without_any_are_wrong_usage(target: Target) -> None:
    with pytest.raises(typer.BadParameter, match="the drafter 'ngram' has no weights"):
        open_drafter("ngram", target, "int8")
