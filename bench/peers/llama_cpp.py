"""Trees on few experts against llama.cpp, on the same weights and the same test prompts.

    PYTHONPATH=src python -m bench.peers.llama_cpp [--quick] [--out bench/results/peers.json]

Needs the extra `peers` (llama-cpp-python builds llama.cpp with a C++ compiler and CMake). As a
module and from the root of the repository: a script's own folder would hide the package that has
this file's name.

The widened Qwen3-MoE target (hidden 2048, bfloat16) and its dense drafter are written as GGUF files
into a temporary folder. llama.cpp decodes plainly, with flash attention and without, and with
chains of the drafter as its own speculative decoding does. With `--draft-weights int8` our arms
draft with weights of 8 bits, and llama.cpp has a second drafter, with weights in its Q8_0.

First every engine decodes every prompt untimed, and the texts are compared: llama.cpp and natural
trees must emit the tokens of Transformers' plain `generate`, but where two tokens are as likely as
bfloat16 can tell. Then they are timed in turn, prompt by prompt, each prompt beginning with another
one. Tokens per second are those of decoding, without the prompt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from acceptmoe import wrap
from acceptmoe.bench.chains import chain_drafter
from acceptmoe.bench.demo import twin_of
from acceptmoe.bench.results import save_results
from acceptmoe.bench.setups import DRAFTERS, Setup, load_bundled_drafter, load_setup
from acceptmoe.bench.token_clock import generate_timed
from acceptmoe.bench.workloads import (
    TEST_SPLIT,
    Tree,
    encode,
    end_token_ids,
    mixed_problems,
    parse_tree,
)
from acceptmoe.drafting import AssistantDrafter
from acceptmoe.drafting.draft_weights import DRAFT_WEIGHTS
from acceptmoe.policies import DEFAULT_POLICY, load_policy

from .engines import (
    LLAMA,
    OURS,
    PLAIN,
    TRANSFORMERS,
    Engine,
    OtherModelError,
    Row,
    check_texts,
    rows_of,
)
from .gguf_file import write_gguf
from .llama_decoding import Context, Draft, generate_drafted, generate_plain, time_pass

TARGET = "tiny-qwen3-moe"
SEED = 0
MAX_LENGTH = 448  # prompt and text; texts end by themselves long before
NUM_SLOTS = 512
PASS_ROWS = (8, 16, 32)
PASS_REPEATS = 3
# llama.cpp's own default, and longer chains that end where the drafter is unsure.
DRAFTS = ("3", "7:0.8", "15:0.8")
# By the name of the mode; which is faster depends on the number of rows.
FLASH_ATTENTION = {"flash": True, "no-flash": False}


COLUMNS = {
    "rows": "num_nodes",
    "tokens/s": "tokens_per_s",
    "plain": "over_llama_plain",
    "best": "over_llama_best",
    "same": "same_text",
    "tied": "tied_text",
    "of": "num_texts",
    "length": "accepted_length",
    "draft": "draft_ms",
    "pass": "pass_ms",
}


def transformers_engine(setup: Setup, settings: dict[str, Any]) -> Engine:
    """Plain `generate` of the model as it was loaded."""

    def decode(prompt: Tensor) -> tuple[list[int], float]:
        text = generate_timed(setup.model, prompt, max_new_tokens=num_new(prompt), **settings)
        return text.token_ids, text.decode_s

    return Engine(TRANSFORMERS, PLAIN, decode)


def plain_engine(name: str, context: Context, end_ids: list[int]) -> Engine:
    """llama.cpp's plain decoding."""

    def decode(prompt: Tensor) -> tuple[list[int], float]:
        return generate_plain(context, prompt[0].tolist(), num_new(prompt), end_ids)

    return Engine(LLAMA, f"{PLAIN} {name}", decode)


def drafted_engine(
    target: Context, name: str, drafter: Context, draft: Draft, end_ids: list[int]
) -> Engine:
    """llama.cpp's decoding with chains of the drafter `name`, which it verifies in one pass."""

    def decode(prompt: Tensor) -> tuple[list[int], float]:
        tokens = prompt[0].tolist()
        return generate_drafted(target, drafter, draft, tokens, num_new(prompt), end_ids)

    return Engine(LLAMA, f"{name}:{draft}", decode, num_nodes=draft.num_tokens + 1)


def tree_engine(
    setup: Setup, policy: str, tree: Tree, settings: dict[str, Any], options: dict[str, Any]
) -> Engine:
    """A policy with a tree; `options` are keywords of `wrap`."""
    model = wrap(
        twin_of(setup.model),
        setup.table,
        drafter=chain_drafter(setup.drafter) if tree.is_chain else setup.drafter,
        policy=load_policy(policy),
        num_nodes=tree.num_nodes,
        max_depth=tree.max_depth,
        allow_table_mismatch=True,
        **options,
    )

    def decode(prompt: Tensor) -> tuple[list[int], float]:
        text = generate_timed(model, prompt, max_new_tokens=num_new(prompt), **settings)
        return text.token_ids, text.decode_s

    return Engine(
        OURS,
        f"{policy} {tree}",
        decode,
        num_nodes=tree.num_nodes,
        is_lossless=policy == "natural",
        wrapped=model,
    )


def num_new(prompt: Tensor) -> int:
    return MAX_LENGTH - prompt.shape[1]


def decode_untimed(engines: list[Engine], prompts: list[Tensor], console: Console) -> None:
    """Every text once: it warms up, compiles, and is what will be compared."""
    for prompt in track(prompts, "Comparing", console=console):
        for engine in engines:
            engine.texts.append(engine.decode(prompt)[0])
    for engine in engines:
        if engine.wrapped is not None:
            engine.wrapped.acceptmoe.reset_statistics()


def decode_timed(
    engines: list[Engine], prompts: list[Tensor], rounds: int, console: Console
) -> None:
    """Tokens per second of every engine on every prompt."""
    for number in track(range(rounds * len(prompts)), "Measuring", console=console):
        first = number % len(engines)
        for engine in [*engines[first:], *engines[:first]]:
            tokens, seconds = engine.decode(prompts[number % len(prompts)])
            engine.speeds.append((len(tokens) - 1) / seconds if len(tokens) > 1 else None)


def natural_passes(
    name: str, context: Context, prompts: list[Tensor], texts: list[list[int]]
) -> list[Row]:
    """What passes of many rows cost llama.cpp, with the tokens that really follow the prompts."""
    rows = []
    for num_rows in PASS_ROWS:
        times = [
            seconds
            for prompt, text in zip(prompts, texts, strict=True)
            if len(text) >= num_rows
            for seconds in time_pass(context, prompt[0].tolist(), text[:num_rows], PASS_REPEATS)
        ]
        if times:
            rows.append(
                {
                    "engine": LLAMA,
                    "mode": f"natural-pass {name}",
                    "num_nodes": num_rows,
                    "tokens_per_s": None,
                    "pass_ms": 1e3 * statistics.median(times),
                    "num_passes": len(times),
                }
            )
    return rows


def load_llama(
    setup: Setup, options: argparse.Namespace, opened: ExitStack
) -> tuple[dict[str, Context], dict[str, Context]]:
    """The target's contexts, by the name of their attention, and the drafters', by name."""
    from .llama_engine import LlamaContext, LlamaModel  # here: all else runs without llama.cpp

    folder = Path(opened.enter_context(TemporaryDirectory(prefix="acceptmoe-gguf-")))
    drafter = load_bundled_drafter("assistant", TARGET, torch.bfloat16, options.factor)
    assert isinstance(drafter, AssistantDrafter)

    def load(name: str, model: Any, *, is_rounded: bool = False) -> LlamaModel:
        path = folder / f"{name}.gguf"
        write_gguf(path, model.config, model.state_dict(), is_rounded=is_rounded)
        return opened.enter_context(closing(LlamaModel(path)))

    def context(model: LlamaModel, flash_attention: bool) -> Context:
        made = LlamaContext(
            model,
            num_threads=options.threads,
            num_slots=NUM_SLOTS,
            flash_attention=flash_attention,
        )
        return opened.enter_context(closing(made))

    target = load("target", setup.model)
    contexts = {name: context(target, is_flash) for name, is_flash in FLASH_ATTENTION.items()}
    drafters = {
        name: context(load(name, drafter.model, is_rounded=is_rounded), flash_attention=True)
        for name, is_rounded in drafters_of(options.draft_weights).items()
    }
    return contexts, drafters


def drafters_of(draft_weights: str | None) -> dict[str, bool]:
    """Names of llama.cpp's drafters, and whether their weights are rounded.

    >>> drafters_of(None)
    {'draft': False}
    >>> drafters_of("int8")
    {'draft': False, 'draft-q8': True}
    """
    return {"draft": False} if draft_weights is None else {"draft": False, "draft-q8": True}


def measure(options: argparse.Namespace, console: Console) -> list[Row]:
    """All rows. Raises `OtherModelError` when an engine computes another model."""
    setup = load_setup(
        TARGET,
        options.drafter,
        dtype=torch.bfloat16,
        factor=options.factor,
        draft_weights=options.draft_weights,
    )
    drawn = mixed_problems(TEST_SPLIT, options.prompts, SEED)
    prompts = [encode(setup.tokenizer, problem.prompt, setup.model.device) for problem in drawn]
    end_ids = end_token_ids(setup.model, setup.tokenizer)
    settings = {"do_sample": False, "eos_token_id": end_ids, "pad_token_id": end_ids[0]}
    keywords = {"experts": options.experts, "compile": options.compile}
    with ExitStack() as opened:
        contexts, drafters = load_llama(setup, options, opened)
        engines = [transformers_engine(setup, settings)]
        engines += [plain_engine(name, context, end_ids) for name, context in contexts.items()]
        engines += [
            drafted_engine(contexts["flash"], name, drafter, draft, end_ids)
            for draft in options.draft
            for name, drafter in drafters.items()
        ]
        engines += [
            tree_engine(setup, policy, tree, settings, keywords) for policy, tree in options.arm
        ]
        decode_untimed(engines, prompts, console)
        compared = check_texts(engines, setup.model, prompts)
        decode_timed(engines, prompts, options.rounds, console)
        rows = [
            row | compared[str(engine)]
            for row, engine in zip(rows_of(engines), engines, strict=True)
        ]
        for name, context in contexts.items():
            rows += natural_passes(name, context, prompts, engines[0].texts)
    return [{"target": TARGET, **row} for row in rows]


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table(title=f"{TARGET}, tokens/s over llama.cpp's")
    for title in ("engine", "mode"):
        table.add_column(title, no_wrap=True)
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["engine"], row["mode"], *(cell(row, name) for name in COLUMNS.values()))
    console.print(table)
    console.print(
        "plain, best: over llama.cpp's faster plain decoding and over its best mode; same, tied: "
        "texts; length: tokens a pass; draft, pass: milliseconds a block",
        soft_wrap=True,
    )


def cell(row: Row, name: str) -> str:
    value = row.get(name)
    if isinstance(value, dict):
        value = value["ratio"]
        return f"{value:.2f}"
    if isinstance(value, float):
        return f"{value:.1f}"
    return "-" if value is None else str(value)


def parse_arm(text: str) -> tuple[str, Tree]:
    """A policy and a tree, as "accept@16" or "natural@chain:6"."""
    policy, at, tree = text.rpartition("@")
    if not at:
        raise argparse.ArgumentTypeError(f"{text!r} must be POLICY@TREE, as 'accept@16'")
    load_policy(policy)
    return policy, parse_tree(tree)


def threads_sleep(environment: Mapping[str, str]) -> bool:
    """Whether OpenMP's threads sleep as soon as they wait for another."""
    is_passive = environment.get("OMP_WAIT_POLICY", "").lower() == "passive"
    return is_passive and "GOMP_SPINCOUNT" not in environment


def parse_draft(text: str) -> Draft:
    """Lengths of chains and when they end before that, as "3" or "7:0.5"."""
    num_tokens, _, probability = text.partition(":")
    draft = Draft(int(num_tokens), float(probability or 0.0))
    if not 1 <= draft.num_tokens < NUM_SLOTS - MAX_LENGTH or not 0 <= draft.min_probability < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a length, as '3', or '3:0.5'")
    return draft


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--arm", action="append", type=parse_arm, metavar="POLICY@TREE", help="ours; repeatable"
    )
    parser.add_argument(
        "--draft",
        action="append",
        type=parse_draft,
        metavar="LENGTH[:PROBABILITY]",
        help="chains of llama.cpp, and how likely their tokens must be; repeatable",
    )
    parser.add_argument("--drafter", default="assistant", choices=DRAFTERS, help="of our arms")
    parser.add_argument(
        "--draft-weights",
        choices=DRAFT_WEIGHTS,
        help="of our arms' drafter; llama.cpp gets a rounded one, too (default: not rounded)",
    )
    parser.add_argument("--experts", default="acceptmoe", choices=("acceptmoe", "none"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--factor", type=int, default=16, help="hidden 128 becomes 2048")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1, help="timed texts of each prompt")
    parser.add_argument("--quick", action="store_true", help="two prompts, one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write JSON (default: nowhere)")
    options = parser.parse_args(arguments)
    # As defaults argparse would append to them.
    options.arm = options.arm or [parse_arm(f"{DEFAULT_POLICY}@16")]
    options.draft = options.draft or [parse_draft(text) for text in DRAFTS]
    if threads_sleep(os.environ):
        parser.error(
            "OMP_WAIT_POLICY is passive, which slows llama.cpp down by a quarter; unset it, or set "
            "GOMP_SPINCOUNT=10000 besides on a shared machine"
        )
    if options.prompts < 1 or options.rounds < 1:
        parser.error("--prompts and --rounds must be 1 or larger")
    options.experts = None if options.experts == "none" else options.experts
    if options.quick:
        options.prompts, options.rounds = 2, 1
    return options


def main() -> None:
    options, console = parse(), Console()
    console.width = max(120, console.width)  # into a file it would be 80
    torch.set_num_threads(options.threads)
    try:
        rows = measure(options, console)
    except OtherModelError as error:
        sys.exit(str(error))
    show(rows, console)
    if options.out is not None:
        save_results(options.out, "peers", rows, seed=SEED, settings=recorded_settings(options))


def recorded_settings(options: argparse.Namespace) -> dict[str, Any]:
    from .llama_engine import system_features

    names = (
        "drafter",
        "draft_weights",
        "experts",
        "compile",
        "factor",
        "prompts",
        "rounds",
        "threads",
    )
    return {
        **{name: getattr(options, name) for name in names},
        **{name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")},
        "llama_cpp_python": version("llama-cpp-python"),
        "llama_cpp_features": system_features(),
    }


if __name__ == "__main__":
    main()
