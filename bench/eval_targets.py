"""What the bundled targets can do: accuracy on four tasks, use of experts, and a damage probe.

    PYTHONPATH=src python bench/eval_targets.py --count 200

Greedy, at most 256 tokens, EOS required. Some prompts of each task are decoded again by draft
trees, for accepted length and natural union, and once more with a quarter of the experts
(`moe-spec`), which must hurt: a target that bears it would hide a bad selection rule. Targets that
were not measured keep their rows in the results file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from acceptmoe.bench.provenance import provenance
from acceptmoe.policies import MoeSpecPolicy
from acceptmoe.targets import assistant_folder, eagle3_folder, target_folder, target_names
from acceptmoe.targets.problem import Problem
from acceptmoe.targets.tasks import MAX_NEW_TOKENS, TASKS, check_all, problems

Completion = tuple[list[int], bool]  # the tokens without EOS, and whether EOS came

_BATCH = 200
_FOLDERS = {"eagle3": eagle3_folder, "assistant": assistant_folder}
_RESULTS = Path(__file__).parent / "results" / "targets.json"


@torch.no_grad()
def greedy_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    asked: list[Problem],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Completion]:
    """Return the greedy completion of each problem, decoded in batches of similar prompts."""
    found: list[Completion] = []
    for start in range(0, len(asked), _BATCH):
        part = asked[start : start + _BATCH]
        inputs = tokenizer(
            [p.prompt for p in part], return_tensors="pt", padding=True, padding_side="left"
        )
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        prompt_length = inputs["input_ids"].shape[1]
        found += [
            _until_end(row, tokenizer.eos_token_id) for row in out[:, prompt_length:].tolist()
        ]
    return found


def _until_end(tokens: list[int], eos: int) -> Completion:
    return (tokens[: tokens.index(eos)], True) if eos in tokens else (tokens, False)


def num_right(
    tokenizer: PreTrainedTokenizerFast, asked: list[Problem], done: list[Completion]
) -> int:
    """Return how many of the completions solve their problem."""
    texts = [tokenizer.decode(tokens) for tokens, _ in done]
    return sum(check_all(asked, texts, [ended for _, ended in done]))


def quick_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    split: str,
    count: int,
    max_new_tokens: int = 160,
) -> dict[str, float]:
    """Return the share of solved problems of each task, for a look during training."""
    shares = {}
    for task in TASKS:
        asked = problems(task, split, count)
        done = greedy_completions(model, tokenizer, asked, max_new_tokens)
        shares[task] = num_right(tokenizer, asked, done) / count
    return shares


@torch.no_grad()
def router_use(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    asked: list[Problem],
    done: list[Completion],
) -> list[dict[str, float]]:
    """Return for each layer the largest share and the 10th percentile of shares, times E.

    Shares of all assignments over the prompts and their completions; 1 is an even share.
    """
    counts: list[torch.Tensor] = []
    handles = []
    for i, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "gate", None) or layer.mlp.router
        counts.append(torch.zeros(router.num_experts, dtype=torch.long))

        def count(module: Any, inputs: Any, output: Any, i: int = i) -> None:
            counts[i] += torch.bincount(output[2].reshape(-1), minlength=counts[i].numel())

        handles.append(router.register_forward_hook(count))
    for problem, (tokens, _) in zip(asked, done, strict=True):
        ids = tokenizer(problem.prompt)["input_ids"] + tokens
        model.model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    uses = []
    for count_of in counts:
        share = count_of / count_of.sum() * count_of.numel()
        uses.append(
            {
                "largest": round(share.max().item(), 3),
                "tenth_percentile": round(share.sort().values[count_of.numel() // 10].item(), 3),
            }
        )
    return uses


def speculate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    asked: list[Problem],
    drafter: Any,
    policy: Any,
) -> tuple[int, dict[str, Any]]:
    """Decode with trees of 32 nodes and depth 5; return how many are right, and the report."""
    import acceptmoe

    acceptmoe.wrap(model, policy=policy, drafter=drafter, num_nodes=32, max_depth=5)
    done = []
    for problem in track(
        asked, f"{asked[0].task} {getattr(policy, 'name', policy)}", transient=True
    ):
        ids = tokenizer(problem.prompt, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        done.append(_until_end(out[0, ids.shape[1] :].tolist(), tokenizer.eos_token_id))
    report = model.acceptmoe.report()
    acceptmoe.unwrap(model)
    return num_right(tokenizer, asked, done), report


def evaluate(
    name: str, folder: Path, drafters: dict[str, str], arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of one target, and its router use; the first drafter does the probe too."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, all_asked, all_done = [], [], []
    for task in TASKS:
        asked = problems(task, arguments.split, arguments.count)
        done = greedy_completions(model, tokenizer, asked)
        all_asked += asked
        all_done += done
        row: dict[str, Any] = {
            "target": name,
            "task": task,
            "accuracy": num_right(tokenizer, asked, done) / len(asked),
            "num_prompts": len(asked),
            "accepted_length": None,
            "natural_union": None,
            "num_experts": getattr(model.config, "num_local_experts", None)
            or model.config.num_experts,
            "mean_completion_tokens": round(sum(len(t) for t, _ in done) / len(done), 1),
            "accepted_lengths": {},
        }
        few = asked[: arguments.speculated]
        for drafter, source in drafters.items():
            num_natural, report = speculate(model, tokenizer, few, source, "natural")
            row["accepted_lengths"][drafter] = report["accepted_length"]
            if row["accepted_length"] is not None:
                continue
            row["accepted_length"] = report["accepted_length"]
            row["natural_union"] = report["natural_union"]
            quarter = MoeSpecPolicy(row["num_experts"] // 4)
            num_probed, _ = speculate(model, tokenizer, few, source, quarter)
            row["probe"] = {
                "policy": "moe-spec, a quarter of the experts",
                "num_prompts": len(few),
                "natural_accuracy": num_natural / len(few),
                "accuracy": num_probed / len(few),
            }
        rows.append(row)
    return rows, {name: router_use(model, tokenizer, all_asked, all_done)}


def show(rows: list[dict[str, Any]], uses: dict[str, Any]) -> None:
    """Print the table of accuracies and the use of experts."""
    table = Table("target", "task", "accuracy", "prompts", "tokens", "accepted", "union", "probe")
    for row in rows:
        probe = row.get("probe")
        table.add_row(
            row["target"],
            row["task"],
            f"{100 * row['accuracy']:.1f} %",
            str(row["num_prompts"]),
            str(row["mean_completion_tokens"]),
            ", ".join(f"{d} {length:.2f}" for d, length in row["accepted_lengths"].items()),
            "-" if row["natural_union"] is None else f"{row['natural_union']:.1f}",
            f"{probe['natural_accuracy']:.2f} -> {probe['accuracy']:.2f}" if probe else "-",
        )
    Console().print(table)
    use_table = Table(
        "target", "layer", "largest share x E (max 3)", "tenth percentile x E (min 0.2)"
    )
    for name, layers in uses.items():
        for i, use in enumerate(layers):
            use_table.add_row(name, str(i), str(use["largest"]), str(use["tenth_percentile"]))
    Console().print(use_table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", help="a bundled name; default: all")
    parser.add_argument("--folder", type=Path, help="a checkpoint folder instead of a bundled name")
    parser.add_argument("--split", default="test")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument(
        "--drafters",
        default="eagle3,ngram",
        help="of eagle3, assistant and ngram; the first gives accepted_length and the probe",
    )
    parser.add_argument(
        "--speculated", type=int, default=50, help="prompts of each task decoded by draft trees"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS)
    arguments = parser.parse_args()

    wanted = [arguments.folder.name] if arguments.folder else arguments.target or target_names()
    rows: list[dict[str, Any]] = []
    uses: dict[str, Any] = {}
    for name in wanted:
        folder = arguments.folder or target_folder(name)
        drafters = {
            drafter: str(_FOLDERS[drafter](name)) if drafter in _FOLDERS else drafter
            for drafter in filter(None, arguments.drafters.split(","))
        }
        target_rows, use = evaluate(name, folder, drafters, arguments)
        rows += target_rows
        uses.update(use)
    show(rows, uses)
    if not arguments.folder:
        store(arguments.out, rows, uses)


def store(path: Path, rows: list[dict[str, Any]], uses: dict[str, Any]) -> None:
    """Replace the measured targets in the results file; rows of the others stay."""
    old = json.loads(path.read_text()) if path.exists() else {}
    kept = [row for row in old.get("rows", []) if row["target"] not in uses]
    names = list(target_names())
    content = {
        "rows": sorted(kept + rows, key=lambda row: names.index(row["target"])),
        "router_use": {**old.get("router_use", {}), **uses},
        "provenance": {
            **old.get("provenance", {}),
            **{name: provenance(seed=0) for name in uses},
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
