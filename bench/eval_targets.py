"""Greedy accuracy of a target on the four tasks."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from acceptmoe.targets.problem import Problem
from acceptmoe.targets.tasks import MAX_NEW_TOKENS, TASKS, check_all, problems


@torch.no_grad()
def greedy_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    asked: list[Problem],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[tuple[list[int], bool]]:
    """Return for each problem the greedy tokens without EOS, and whether EOS came."""
    inputs = tokenizer(
        [p.prompt for p in asked], return_tensors="pt", padding=True, padding_side="left"
    )
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )[:, inputs["input_ids"].shape[1] :]
    found = []
    for row in out.tolist():
        ended = tokenizer.eos_token_id in row
        found.append((row[: row.index(tokenizer.eos_token_id)] if ended else row, ended))
    return found


def quick_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    split: str,
    count: int,
    max_new_tokens: int = 160,
) -> dict[str, float]:
    """Return the share of solved problems of each task, for a look during training."""
    asked = [p for task in TASKS for p in problems(task, split, count)]
    done = greedy_completions(model, tokenizer, asked, max_new_tokens)
    texts = [tokenizer.decode(tokens, skip_special_tokens=False) for tokens, _ in done]
    right = check_all(asked, texts, [ended for _, ended in done])
    return {
        task: sum(right[i * count : (i + 1) * count]) / count for i, task in enumerate(TASKS)
    }
