"""Trees on few experts against llama.cpp, on the same weights and the same test prompts.

    PYTHONPATH=src python -m bench.peers.llama_cpp [--quick] [--out bench/results/peers.json]

Needs the extra `peers` (llama-cpp-python builds llama.cpp with a C++ compiler and CMake). As a
module and from the root of the repository: a script's own folder would hide the package that has
this file's name.

The widened Qwen3-MoE target (hidden 2048, bfloat16) is written as a GGUF file into a temporary
folder. First every engine decodes every prompt untimed, and the texts are compared: llama.cpp must
emit the tokens of Transformers' plain `generate` for most prompts (in bfloat16 two tokens can be as
close as the rounding). Then they are timed in turn, prompt by prompt, each prompt beginning with
another one. Tokens per second are those of decoding, without the prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from acceptmoe import wrap
from acceptmoe.bench.chains import chain_drafter
from acceptmoe.bench.demo import twin_of
from acceptmoe.bench.results import save_results
from acceptmoe.bench.setups import DRAFTERS, Setup, load_setup
from acceptmoe.bench.token_clock import generate_timed
from acceptmoe.bench.workloads import (
    TEST_SPLIT,
    Tree,
    encode,
    end_token_ids,
    mixed_problems,
    parse_tree,
)
from acceptmoe.policies import DEFAULT_POLICY, load_policy

from .gguf_file import write_gguf
from .llama_engine import LlamaEngine

TARGET = "tiny-qwen3-moe"
SEED = 0
MAX_LENGTH = 448  # prompt and text; texts end by themselves long before
NUM_SLOTS = 512
PASS_ROWS = (8, 16, 32)
PASS_REPEATS = 5

Decode = Callable[[Tensor], tuple[list[int], float]]  # a prompt [1, P]: new tokens and seconds


@dataclass
class Engine:
    """One way to decode a prompt, and what came out, prompt by prompt."""

    engine: str
    mode: str
    num_nodes: int
    decode: Decode
    texts: list[list[int]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def row(self, expected: list[list[int]]) -> dict[str, Any]:
        q1, median, q3 = statistics.quantiles(self.speeds, n=4, method="inclusive")
        same = sum(a == b for a, b in zip(self.texts, expected, strict=True))
        return {
            "target": TARGET,
            "engine": self.engine,
            "mode": self.mode,
            "num_nodes": self.num_nodes,
            "tokens_per_s": median,
            "q1": q1,
            "q3": q3,
            "same_text": same,
            "num_texts": len(expected),
        }


def transformers_engine(setup: Setup, settings: dict[str, Any]) -> Engine:
    """Plain `generate` of the model as it was loaded."""

    def decode(prompt: Tensor) -> tuple[list[int], float]:
        text = generate_timed(setup.model, prompt, max_new_tokens=num_new(prompt), **settings)
        return text.token_ids, text.decode_s

    return Engine("transformers", "plain", 1, decode)


def llama_engine(llama: LlamaEngine, settings: dict[str, Any]) -> Engine:
    """llama.cpp's plain decoding."""

    def decode(prompt: Tensor) -> tuple[list[int], float]:
        return llama.generate(prompt[0].tolist(), num_new(prompt), settings["eos_token_id"])

    return Engine("llama.cpp", "plain", 1, decode)


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

    return Engine("acceptmoe", f"{policy} {tree}", tree.num_nodes, decode)


def num_new(prompt: Tensor) -> int:
    return MAX_LENGTH - prompt.shape[1]


def check_texts(engines: list[Engine], prompts: list[Tensor]) -> list[list[int]]:
    """Decode everything once, untimed; the texts of plain `generate`.

    Exits when llama.cpp emits other tokens for most prompts: it would not compute the same model.
    """
    for prompt in prompts:
        for engine in engines:
            engine.texts.append(engine.decode(prompt)[0])
    expected = next(e.texts for e in engines if e.engine == "transformers")
    ours = next(e.texts for e in engines if e.engine == "llama.cpp")
    num_same = sum(a == b for a, b in zip(ours, expected, strict=True))
    if 2 * num_same <= len(prompts):
        sys.exit(
            f"llama.cpp emits the tokens of Transformers for {num_same} prompts of {len(prompts)}; "
            "its speed would mean nothing"
        )
    return expected


def time_in_turn(engines: list[Engine], prompts: list[Tensor], rounds: int) -> None:
    """Tokens per second of every engine on every prompt; a text of one token has none."""
    for number in range(rounds * len(prompts)):
        first = number % len(engines)
        for engine in [*engines[first:], *engines[:first]]:
            tokens, seconds = engine.decode(prompts[number % len(prompts)])
            if len(tokens) > 1:
                engine.speeds.append((len(tokens) - 1) / seconds)


def natural_passes(
    llama: LlamaEngine, prompts: list[Tensor], texts: list[list[int]]
) -> list[dict[str, Any]]:
    """What passes of many rows cost llama.cpp, with the tokens that really follow the prompts."""
    rows = []
    for num_rows in PASS_ROWS:
        times = [
            seconds
            for prompt, text in zip(prompts, texts, strict=True)
            if len(text) >= num_rows
            for seconds in llama.time_pass(prompt[0].tolist(), text[:num_rows], PASS_REPEATS)
        ]
        if times:
            rows.append(
                {
                    "target": TARGET,
                    "engine": "llama.cpp",
                    "mode": "natural-pass",
                    "num_nodes": num_rows,
                    "tokens_per_s": None,
                    "pass_ms": 1e3 * statistics.median(times),
                    "num_passes": len(times),
                }
            )
    return rows


def ratios(engines: list[Engine]) -> dict[str, float]:
    """Of each engine over llama.cpp's plain decoding: the median over texts."""
    plain = next(engine for engine in engines if engine.engine == "llama.cpp")
    return {
        f"{engine.engine} {engine.mode}": statistics.median(
            a / b for a, b in zip(engine.speeds, plain.speeds, strict=False)
        )
        for engine in engines
    }


def print_table(rows: list[dict[str, Any]], over_llama: dict[str, float]) -> None:
    print(f"{'engine':<13} {'mode':<28} {'tokens/s':>9} {'over llama.cpp':>15} {'same text':>10}")
    for row in rows:
        name = f"{row['engine']} {row['mode']}"
        if row["tokens_per_s"] is None:
            print(f"{name}, {row['num_nodes']} rows: {row['pass_ms']:.1f} ms")
            continue
        print(
            f"{row['engine']:<13} {row['mode']:<28} {row['tokens_per_s']:9.1f}"
            f" {over_llama[name]:15.2f} {row['same_text']:>7}/{row['num_texts']}"
        )


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All rows, and the ratios over llama.cpp's plain decoding."""
    setup = load_setup(TARGET, options.drafter, dtype=torch.bfloat16, factor=options.factor)
    drawn = mixed_problems(TEST_SPLIT, options.prompts, SEED)
    prompts = [encode(setup.tokenizer, problem.prompt, setup.model.device) for problem in drawn]
    end_ids = end_token_ids(setup.model, setup.tokenizer)
    settings = {"do_sample": False, "eos_token_id": end_ids, "pad_token_id": end_ids[0]}
    keywords = {"experts": options.experts, "compile": options.compile}
    with TemporaryDirectory(prefix="acceptmoe-gguf-") as folder:
        path = Path(folder, f"{TARGET}.gguf")
        write_gguf(path, setup.model.config, setup.model.state_dict())
        with LlamaEngine(path, options.threads, NUM_SLOTS) as llama:
            engines = [transformers_engine(setup, settings), llama_engine(llama, settings)]
            engines += [
                tree_engine(setup, policy, tree, settings, keywords) for policy, tree in options.arm
            ]
            expected = check_texts(engines, prompts)
            time_in_turn(engines, prompts, options.rounds)
            rows = [engine.row(expected) for engine in engines]
            rows += natural_passes(llama, prompts, expected)
    return rows, ratios(engines)


def parse_arm(text: str) -> tuple[str, Tree]:
    """A policy and a tree, as "accept@16" or "natural@chain:6"."""
    policy, at, tree = text.rpartition("@")
    if not at:
        raise argparse.ArgumentTypeError(f"{text!r} must be POLICY@TREE, as 'accept@16'")
    load_policy(policy)
    return policy, parse_tree(tree)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", action="append", type=parse_arm, metavar="POLICY@TREE")
    parser.add_argument("--drafter", default="assistant", choices=DRAFTERS)
    parser.add_argument("--experts", default="acceptmoe", choices=("acceptmoe", "none"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--factor", type=int, default=16, help="hidden 128 becomes 2048")
    parser.add_argument("--prompts", type=int, default=8, help="at least 2, for quartiles")
    parser.add_argument("--rounds", type=int, default=2, help="timed texts of each prompt")
    parser.add_argument("--quick", action="store_true", help="two prompts, one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write JSON (default: nowhere)")
    options = parser.parse_args(arguments)
    options.arm = options.arm or [parse_arm(f"{DEFAULT_POLICY}@16")]
    if options.prompts < 2 or options.rounds < 1:
        parser.error("--prompts must be 2 or larger and --rounds 1 or larger")
    options.experts = None if options.experts == "none" else options.experts
    if options.quick:
        options.prompts, options.rounds = 2, 1
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    rows, over_llama = measure(options)
    print_table(rows, over_llama)
    if options.out is not None:
        settings = {
            name: getattr(options, name)
            for name in ("drafter", "experts", "compile", "factor", "rounds", "threads")
        }
        settings["llama_cpp_python"] = version("llama-cpp-python")
        save_results(
            options.out, "peers", rows, seed=SEED, settings=settings, over_llama_cpp=over_llama
        )


if __name__ == "__main__":
    main()
