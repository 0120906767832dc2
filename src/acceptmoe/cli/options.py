"""Options that several commands take, described once."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from acceptmoe.drafting.draft_weights import DRAFT_WEIGHTS, check_draft_weights
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies import DEFAULT_POLICY, POLICIES
from acceptmoe.tree import MAX_NODES

MAX_NEW_TOKENS = 1_000_000  # far above any context; an absurd number is a slip


def parse_draft_weights(text: str | None) -> str | None:
    """The precision that an option's value names; a wrong one is a usage error."""
    try:
        check_draft_weights(text)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    return text


Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="'ngram' (prompt lookup, no weights), 'assistant' or 'eagle3' (those of a bundled "
        "target), or a checkpoint's folder. Default: assistant for a bundled target, else ngram.",
        show_default=False,
    ),
]
DraftWeights = Annotated[
    str | None,
    typer.Option(
        "--draft-weights",
        help=f"{', '.join(DRAFT_WEIGHTS)}: the drafter's weights rounded to that, on a CPU. "
        "Default: its own precision.",
        callback=parse_draft_weights,
        show_default=False,
    ),
]
Table = Annotated[
    str | None,
    typer.Option(
        "--table",
        help="A commitment table: a file, or a shipped table's name. Default: the shipped one for "
        "this target and drafter.",
        show_default=False,
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help=f"One of {', '.join(POLICIES)}, with settings as in accept:exponent=1.0. "
        f"Default: {DEFAULT_POLICY}.",
        show_default=False,
    ),
]
NumNodes = Annotated[
    int, typer.Option(min=1, max=MAX_NODES, help="Nodes of a draft tree, the root included.")
]
MaxDepth = Annotated[
    int, typer.Option(min=1, max=MAX_NODES, help="Drafted tokens on one path of a tree.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, max=MAX_NEW_TOKENS, help="Tokens to decode.")]
Guard = Annotated[
    bool,
    typer.Option("--guard", help="Draft only while it pays; the remark at the end says whether."),
]
Seed = Annotated[int, typer.Option(min=0, help="Chooses the prompts.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


class Dtype(str, Enum):
    """The number format of the weights; auto is float32 for a bundled target, else as stored."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, Enum):
    """Where the target runs; auto is the GPU where torch sees one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Number format of the weights.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where the target runs.")]
