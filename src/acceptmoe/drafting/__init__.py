"""Drafters, found by `load_drafter`."""

from acceptmoe.drafting.drafter import Drafter
from acceptmoe.drafting.ngram import NgramDrafter


def load_drafter(spec):
    return NgramDrafter() if spec == "ngram" else spec
