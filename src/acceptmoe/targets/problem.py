"""The one type that every task generator returns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One hidden call of a generated function: both sides are Python literals or calls of it."""

    call: str
    expected: str


@dataclass(frozen=True)
class Problem:
    """A prompt, its reference completion, and what a completion is checked against.

    Number tasks have `answer`; code tasks have `cases`, and `preamble` is the text that must stand
    before the completion to make a program.
    """

    task: str
    prompt: str
    solution: str
    answer: int | None = None
    preamble: str = ""
    cases: tuple[Case, ...] = ()
