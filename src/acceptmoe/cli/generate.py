"""`acceptmoe generate`: continue one prompt with a wrapped model."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from acceptmoe.api import wrap
from acceptmoe.bench.provenance import provenance
from acceptmoe.bench.workloads import encode, end_token_ids
from acceptmoe.cli.console import print_json, print_remark, reports_errors
from acceptmoe.cli.loading import (
    bundled_targets,
    open_drafter,
    open_table,
    open_target,
    parse_policy,
)
from acceptmoe.cli.options import (
    AsJson,
    Device,
    DeviceOption,
    Drafter,
    DraftWeights,
    Dtype,
    DtypeOption,
    Guard,
    MaxDepth,
    MaxNewTokens,
    NumNodes,
    Policy,
    Table,
)


@reports_errors
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="A bundled target, the folder of a checkpoint, or a name that Transformers can "
            "download. Default: the first bundled one.",
            show_default=False,
        ),
    ] = None,
    drafter: Drafter = None,
    draft_weights: DraftWeights = None,
    table: Table = None,
    policy: Policy = None,
    num_nodes: NumNodes = 32,
    max_depth: MaxDepth = 5,
    guard: Guard = False,
    max_new_tokens: MaxNewTokens = 128,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put the prompt into the tokenizer's chat template."),
    ] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = Device.auto,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt greedily, by draft trees on few experts, and print it as it comes."""
    rule = parse_policy(policy)
    text = read_prompt(prompt)
    opened = open_target(target or bundled_targets()[0], dtype, device)
    input_ids = prompt_ids(opened.tokenizer, text, chat, opened.model.device)
    chosen = open_drafter(drafter, opened, draft_weights)
    commitment = open_table(table, opened, chosen, rule)
    model = wrap(
        opened.model,
        commitment,
        drafter=chosen,
        policy=rule,
        num_nodes=num_nodes,
        max_depth=max_depth,
        guard=guard,
    )
    end_ids = end_token_ids(model, opened.tokenizer)
    streamer = (
        None
        if as_json
        else TextStreamer(opened.tokenizer, skip_prompt=True, skip_special_tokens=True)
    )
    sequence = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=end_ids or None,
        pad_token_id=end_ids[0] if end_ids else None,  # never used; unset, generate would warn
        streamer=streamer,
    )
    new_ids = sequence[0, input_ids.shape[1] :].tolist()
    report = model.acceptmoe.report()
    if not as_json:
        print_remark(summary(report))
        return
    print_json(
        {
            "target": opened.name,
            "prompt_tokens": input_ids.shape[1],
            "token_ids": new_ids,
            "text": opened.tokenizer.decode(new_ids, skip_special_tokens=True),
            "ended": bool(new_ids) and new_ids[-1] in end_ids,
            "report": report,
            "provenance": provenance(),
        }
    )


def read_prompt(prompt: str) -> str:
    """The prompt, from standard input for "-"; one that is empty or no text is a usage error."""
    try:
        text = read_standard_input() if prompt == "-" else prompt
        text.encode()  # bytes that are no UTF-8 come out of an argument as lone surrogates
    except UnicodeError as error:
        raise typer.BadParameter(
            f"it cannot be read as text in UTF-8: {error}", param_hint="PROMPT"
        ) from error
    if not text:
        raise typer.BadParameter("it is empty; give at least one character", param_hint="PROMPT")
    return text


def read_standard_input() -> str:
    """Everything on standard input; nothing where it is closed."""
    return sys.stdin.read() if sys.stdin is not None else ""


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, chat: bool, device: torch.device
) -> Tensor:
    """[1, P] token ids of the prompt, in the tokenizer's chat template if asked for."""
    if not chat:
        return encode(tokenizer, text, device)
    if tokenizer.chat_template is None:
        raise typer.BadParameter(
            "this target's tokenizer has no chat template; leave the option out",
            param_hint="--chat",
        )
    text = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    )
    # The template has written the special tokens already.
    ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return ids.to(device)


def summary(report: dict[str, Any]) -> str:
    """One line on what a generation took."""
    parts = [f"{report['num_tokens']} tokens"]
    if report["tokens_per_s"] is not None:
        parts.append(f"{report['tokens_per_s']:.1f} tokens/s after the prompt")
    if report["accepted_length"] is not None:
        parts.append(f"{report['accepted_length']:.2f} tokens per verification")
    if report["num_plain_steps"]:
        parts.append(f"{report['num_plain_steps']} steps without a draft")
    if report["experts_used"] is not None:
        parts.append(
            f"{report['experts_used']:.1f} of {report['num_experts']} experts used per layer "
            f"(natural union {report['natural_union']:.1f})"
        )
    if report["guard_reason"] is not None:
        parts.append(report["guard_reason"])
    return f"[{report['policy']}] " + ", ".join(parts)
