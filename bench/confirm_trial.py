"""Whether a confirming verifier beats the best natural tree: measured, with a verdict.

`confirm_decoding.py` has the method. Plain `generate`, natural trees, and confirmation of
constrained trees decode the same tuning prompts on a widened target, taking turns prompt by prompt.
Before anything is timed, the confirmed text must equal plain `generate`'s at the target's own size
in fp32.

    python bench/confirm_trial.py --drafter eagle3 --experts acceptmoe --threads 2
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.api import wrap
from acceptmoe.bench.chains import chain_drafter
from acceptmoe.bench.demo import twin_of
from acceptmoe.bench.intervals import interval_text, median_ratio_interval, quartiles
from acceptmoe.bench.results import save_results
from acceptmoe.bench.setups import Setup, load_setup, num_experts
from acceptmoe.bench.speed import DTYPES, WARM_UP_TOKENS, MeasurementError
from acceptmoe.bench.token_clock import TimedText, generate_timed
from acceptmoe.bench.workloads import (
    TUNING_SPLIT,
    Tree,
    chain,
    encode,
    end_token_ids,
    mixed_problems,
)
from acceptmoe.drafting.draft_weights import DRAFT_WEIGHTS
from confirm_decoding import ConfirmCounts, generate_confirming

NATURAL_TREES = (chain(6), Tree(8, 5), Tree(16, 5), Tree(32, 5))
CONFIRM_TREES = (Tree(16, 5), Tree(32, 5))
# The package's own policy on whole trees, all rows trusted: the natural pass finds what is wrong,
# and natural trees are not pruned either. The second one reads fewer experts and is wrong oftener.
CONSTRAINTS = (
    "accept:max_lost=1,max_lost_unsure=1,min_commitment=0",
    "accept:exponent=2,top=0,size=0.4,max_lost=1,max_lost_unsure=1,min_commitment=0",
)
CHECK_PROMPTS, CHECK_TOKENS = 2, 48
PLAIN, NATURAL, CONFIRM = "plain", "natural", "confirm"

Row = dict[str, Any]


@dataclass(frozen=True)
class ArmName:
    """A way of decoding; plain `generate` has no tree, and only confirmation has a constraint."""

    mode: str
    tree: Tree | None = None
    constraint: str | None = None


@dataclass
class Sums:
    """What one arm did on all prompts after their prefills; seconds are wall-clock ones.

    `*_experts` are experts used, means over passes of that kind and sparse layers. Shares are those
    of the guessed and the drafted tokens of confirmed chains that came true.
    """

    texts: list[TimedText] = field(default_factory=list)
    num_blocks: int = 0
    num_tokens: int = 0
    num_constrained_passes: int = 0
    draft_s: float = 0.0
    constrained_s: float = 0.0
    natural_s: float = 0.0
    constrained_experts: float | None = None
    natural_experts: float | None = None
    share_guessed_true: float | None = None
    share_drafted_true: float | None = None


class PlainArm:
    """Transformers' own `generate` on the unwrapped model."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._ends = setup, end_token_ids(setup.model, setup.tokenizer)
        self.reset()

    def reset(self) -> None:
        self._sums = Sums()

    def decode(self, prompt: Tensor, max_new_tokens: int) -> None:
        self._sums.texts.append(self._generate(self._setup.model, prompt, max_new_tokens))

    def sums(self) -> Sums:
        """Every token after the first is a pass of its own."""
        texts = self._sums.texts
        num_passes = sum(len(text.token_ids) - 1 for text in texts)
        seconds = sum(text.decode_s for text in texts)
        return Sums(texts, num_blocks=num_passes, num_tokens=num_passes, natural_s=seconds)

    def _generate(self, model: PreTrainedModel, prompt: Tensor, max_new_tokens: int) -> TimedText:
        return generate_timed(
            model,
            prompt,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
        )


class NaturalArm(PlainArm):
    """The package's lossless decoding."""

    def __init__(self, setup: Setup, name: ArmName, experts: str | None) -> None:
        self._model = wrap_twin(setup, name, NATURAL, experts)
        super().__init__(setup)

    def reset(self) -> None:
        super().reset()
        self._model.acceptmoe.reset_statistics()

    def decode(self, prompt: Tensor, max_new_tokens: int) -> None:
        self._sums.texts.append(self._generate(self._model, prompt, max_new_tokens))

    def sums(self) -> Sums:
        report = self._model.acceptmoe.report()
        return Sums(
            texts=self._sums.texts,
            num_blocks=report["num_verifications"] + report["num_plain_steps"],
            num_tokens=report["num_tokens"] - report["num_prompts"],
            draft_s=report["draft_s"],
            natural_s=report["verify_s"] + report["commit_s"],
            natural_experts=report["experts_used"],
        )


class ConfirmArm(PlainArm):
    """Constrained trees, confirmed by natural chains."""

    def __init__(self, setup: Setup, name: ArmName, experts: str | None) -> None:
        assert name.constraint is not None
        self._model = wrap_twin(setup, name, name.constraint, experts)
        super().__init__(setup)

    def reset(self) -> None:
        super().reset()
        self._counts = ConfirmCounts()

    def decode(self, prompt: Tensor, max_new_tokens: int) -> None:
        text = generate_confirming(
            self._model, prompt, self._counts, max_new_tokens=max_new_tokens, end_ids=self._ends
        )
        self._sums.texts.append(text)

    def sums(self) -> Sums:
        counts = self._counts
        constrained, natural = counts.constrained.read(), counts.natural.read()
        return Sums(
            texts=self._sums.texts,
            num_blocks=counts.num_blocks,
            num_tokens=counts.num_tokens,
            num_constrained_passes=counts.num_constrained_passes,
            draft_s=counts.draft_s,
            constrained_s=counts.constrained_s,
            natural_s=counts.natural_s,
            constrained_experts=None if constrained is None else constrained.experts_used,
            natural_experts=None if natural is None else natural.experts_used,
            share_guessed_true=share(counts.num_guessed_true, counts.num_guessed),
            share_drafted_true=share(counts.num_drafted_true, counts.num_drafted),
        )


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def wrap_twin(setup: Setup, name: ArmName, policy: str, experts: str | None) -> PreTrainedModel:
    """The setup's weights, wrapped for one arm."""
    assert name.tree is not None
    return wrap(
        twin_of(setup.model),
        setup.table,
        drafter=chain_drafter(setup.drafter) if name.tree.is_chain else setup.drafter,
        policy=policy,
        num_nodes=name.tree.num_nodes,
        max_depth=name.tree.max_depth,
        experts=experts,
        allow_table_mismatch=True,  # shipped tables are made with one tree
    )


def make_arm(setup: Setup, name: ArmName, experts: str | None) -> PlainArm:
    if name.mode == PLAIN:
        return PlainArm(setup)
    return (NaturalArm if name.mode == NATURAL else ConfirmArm)(setup, name, experts)


def check_exact(arguments: argparse.Namespace) -> None:
    """Raise `MeasurementError` unless confirmed texts are plain `generate`'s in fp32."""
    target, constraints, experts = arguments.target, arguments.constraint, arguments.experts
    setup = load_setup(target, arguments.drafter, draft_weights=arguments.draft_weights)
    arms = [PlainArm(setup)]
    arms += [
        ConfirmArm(setup, ArmName(CONFIRM, CONFIRM_TREES[0], constraint), experts)
        for constraint in constraints
    ]
    for problem in mixed_problems(TUNING_SPLIT, CHECK_PROMPTS):
        prompt = encode(setup.tokenizer, problem.prompt, setup.model.device)
        for arm in arms:
            arm.decode(prompt, CHECK_TOKENS)
    plain, *confirmed = ([text.token_ids for text in arm.sums().texts] for arm in arms)
    for constraint, texts in zip(constraints, confirmed, strict=True):
        if texts != plain:
            raise MeasurementError(
                f"confirming {constraint} on {target} emitted other text than plain generate in "
                "fp32; its speed would mean nothing. Please report a bug"
            )


def measure(arguments: argparse.Namespace, console: Console) -> list[Row]:
    """One row for every arm; arms take turns prompt by prompt, each prompt begins with another."""
    setup = load_setup(
        arguments.target,
        arguments.drafter,
        dtype=DTYPES[arguments.dtype],
        factor=arguments.widen,
        draft_weights=arguments.draft_weights,
    )
    names = [ArmName(PLAIN), *(ArmName(NATURAL, tree) for tree in NATURAL_TREES)]
    names += [
        ArmName(CONFIRM, tree, constraint)
        for constraint in arguments.constraint
        for tree in CONFIRM_TREES
    ]
    arms = [make_arm(setup, name, arguments.experts) for name in names]
    drawn = mixed_problems(TUNING_SPLIT, arguments.prompts, arguments.seed)
    prompts = [encode(setup.tokenizer, problem.prompt, setup.model.device) for problem in drawn]
    for arm in track(arms, "Warming up", console=console, auto_refresh=False):
        arm.decode(prompts[0], WARM_UP_TOKENS)
        arm.reset()
    turns = [
        (prompt, arm)
        for index, prompt in enumerate(prompts)
        for arm in arms[index % len(arms) :] + arms[: index % len(arms)]
    ]
    for prompt, arm in track(turns, "Measuring", console=console, auto_refresh=False):
        arm.decode(prompt, arguments.max_new_tokens)
    plain = arms[0].sums()
    return [make_row(arguments, *pair, plain) for pair in zip(names, arms, strict=True)]


def make_row(arguments: argparse.Namespace, name: ArmName, arm: PlainArm, plain: Sums) -> Row:
    """Speed, and mean costs of a block: milliseconds of drafting and of either kind of pass."""
    sums = arm.sums()
    speeds = [text.tokens_per_s for text in sums.texts]
    known = [speed for speed in speeds if speed is not None]
    first, median, third = quartiles(known) if known else (None, None, None)
    blocks = max(1, sums.num_blocks)
    row = {
        "target": arguments.target,
        "mode": name.mode,
        "constraint": name.constraint,
        "constraint_number": constraint_number(arguments, name),
        "num_nodes": None if name.tree is None else name.tree.num_nodes,
        "max_depth": None if name.tree is None else name.tree.max_depth,
        "is_chain": None if name.tree is None else name.tree.is_chain,
        "tokens_per_s": median,
        "q1": first,
        "q3": third,
        "accepted_length": sums.num_tokens / blocks,
        "passes_per_token": share(sums.num_blocks + sums.num_constrained_passes, sums.num_tokens),
        "experts_natural": sums.natural_experts,
        "experts_constrained": sums.constrained_experts,
        "num_experts": num_experts(arguments.target),
        "share_guessed_true": sums.share_guessed_true,
        "share_drafted_true": sums.share_drafted_true,
        "draft_ms": 1000 * sums.draft_s / blocks,
        "constrained_ms": 1000 * sums.constrained_s / blocks,
        "natural_ms": 1000 * sums.natural_s / blocks,
        "same_text": statistics.fmean(
            text.token_ids == other.token_ids
            for text, other in zip(sums.texts, plain.texts, strict=True)
        ),
        "num_prompts": len(sums.texts),
        "num_tokens": sums.num_tokens,
        "tokens_per_s_by_prompt": speeds,
    }
    return row | token_costs(row)


def constraint_number(arguments: argparse.Namespace, name: ArmName) -> int | None:
    """From 1, in the order in which they were given."""
    if name.constraint is None:
        return None
    return 1 + int(arguments.constraint.index(name.constraint))


def token_costs(row: Row) -> Row:
    """Expected milliseconds for an emitted token, and the same if constrained passes were free.

    (draft + constrained pass + natural pass) / accepted length, each the mean over blocks. The
    second is a bound: no routing makes confirmation of this chain cheaper.
    """
    free = row["draft_ms"] + row["natural_ms"]
    return {
        "token_ms": (free + row["constrained_ms"]) / row["accepted_length"],
        "token_ms_if_constrained_were_free": free / row["accepted_length"],
    }


def decide(rows: Sequence[Row]) -> Row:
    """The best confirming arm against the best natural tree, prompt by prompt."""
    by_mode = {mode: [row for row in rows if row["mode"] == mode] for mode in (NATURAL, CONFIRM)}
    natural, confirm = (max(by_mode[mode], key=speed_of) for mode in (NATURAL, CONFIRM))
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(
            confirm["tokens_per_s_by_prompt"], natural["tokens_per_s_by_prompt"], strict=True
        )
        if ours is not None and theirs is not None
    ]
    if not pairs:
        raise MeasurementError(
            "no prompt has a speed under both ways; give more --prompts or --max-new-tokens"
        )
    low, high = median_ratio_interval(*zip(*pairs, strict=True))
    cost = confirm["draft_ms"] + confirm["constrained_ms"] + confirm["natural_ms"]
    return {
        "natural": label(natural),
        "confirm": label(confirm),
        "constraint": confirm["constraint"],
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "low": low,
        "high": high,
        "is_kept": low is not None and low > 1.0,
        # What a block of this cost must emit to be as cheap for a token as the natural tree is.
        "break_even_accepted_length": cost / natural["token_ms"],
        "accepted_length": confirm["accepted_length"],
        "ratio_if_constrained_were_free": natural["token_ms"]
        / min(row["token_ms_if_constrained_were_free"] for row in by_mode[CONFIRM]),
    }


def speed_of(row: Row) -> float:
    return float(row["tokens_per_s"] or 0.0)


def label(row: Row) -> str:
    """An arm in a few words; the constraint by its place among those measured."""
    if row["mode"] == PLAIN:
        return PLAIN
    kind = "chain" if row["is_chain"] else "tree"
    name = f"{row['mode']} {kind} {row['num_nodes']}"
    return name if row["constraint"] is None else f"{name} [{row['constraint_number']}]"


COLUMNS = (
    ("tokens_per_s", "tok/s", 2),
    ("accepted_length", "length", 2),
    ("passes_per_token", "passes", 2),
    ("experts_natural", "natural", 1),
    ("experts_constrained", "few", 1),
    ("share_guessed_true", "true", 2),
    ("token_ms", "token ms", 0),
    ("same_text", "same", 2),
)
COST_COLUMNS = ("draft_ms", "constrained_ms", "natural_ms")


def show(rows: Sequence[Row], decision: Row, console: Console) -> None:
    """The table needs 100 columns and says below itself what its titles leave open."""
    table = Table(title=f"Confirmation on {rows[0]['target']}", padding=(0, 0, 0, 1))
    table.add_column("arm", no_wrap=True)
    for _, title, _ in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("block ms", justify="right", no_wrap=True)
    for row in rows:
        cells = [
            "-" if row[name] is None else f"{row[name]:.{places}f}" for name, _, places in COLUMNS
        ]
        costs = "+".join(f"{row[name]:.0f}" for name in COST_COLUMNS)
        table.add_row(escape(label(row)), *cells, costs)
    console.print(table)
    constraints = {row["constraint_number"]: row["constraint"] for row in rows if row["constraint"]}
    for number, constraint in constraints.items():
        console.print(f"[{number}] {constraint}", markup=False, soft_wrap=True)
    console.print(
        "length: tokens a block; passes: for each token; natural, few: experts of a natural and a "
        "constrained pass; true: guesses of the constrained pass that were confirmed; block ms: "
        "draft + constrained + natural",
        soft_wrap=True,
    )
    console.print(verdict(decision), markup=False, soft_wrap=True)


def verdict(decision: Row) -> str:
    """The decision in words."""
    interval = f"95 % interval: {interval_text(decision['low'], decision['high'], '{:.3f}')}"
    outcome = "it beats" if decision["is_kept"] else "it does not beat"
    return (
        f"Decision: {decision['confirm']} is {decision['ratio']:.3f} times as fast as "
        f"{decision['natural']} ({interval}): {outcome} the best natural tree. "
        f"It emits {decision['accepted_length']:.2f} tokens a block and would have to emit "
        f"{decision['break_even_accepted_length']:.2f} to cost the same; with constrained passes "
        f"for nothing confirmation would be {decision['ratio_if_constrained_were_free']:.3f} times "
        "as fast."
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="tiny-qwen3-moe")
    parser.add_argument("--widen", type=int, default=16, help="hidden 128 times this")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--drafter", default="eagle3", choices=("assistant", "eagle3"))
    parser.add_argument("--draft-weights", choices=DRAFT_WEIGHTS, help="default: not rounded")
    parser.add_argument("--experts", choices=("acceptmoe",))
    parser.add_argument(
        "--constraint", action="append", help="policy of the first pass; repeatable"
    )
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("bench/results/confirm.json"))
    parsed = parser.parse_args(arguments)
    # As a default argparse would append to it.
    parsed.constraint = tuple(dict.fromkeys(parsed.constraint or CONSTRAINTS))
    return parsed


def main() -> None:
    arguments, console = parse(), Console()
    console.width = max(100, console.width)  # into a file it would be 80
    torch.set_num_threads(arguments.threads)
    check_exact(arguments)
    rows = measure(arguments, console)
    decision = decide(rows)
    save_results(
        arguments.out,
        "confirm",
        rows,
        seed=arguments.seed,
        drafter=arguments.drafter,
        draft_weights=arguments.draft_weights,
        factor=arguments.widen,
        dtype=arguments.dtype,
        experts=arguments.experts,
        decision=decision,
    )
    show(rows, decision, console)


if __name__ == "__main__":
    main()
