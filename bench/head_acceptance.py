"""Accepted length of a drafter, from texts that the target has already written.

Greedy verification accepts exactly what the target would have written, so a drafter can be judged
on a finished greedy continuation: one pass of the target gives all states, and no decoding loop is
needed. The result equals that of speculation with natural routing.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.drafting.drafter import Drafter
from head_data import Sample, padded
from head_loss import view_target


def accepted_lengths(
    model: PreTrainedModel,
    drafter: Drafter,
    samples: Iterable[Sample],
    num_nodes: int,
    max_depth: int,
) -> tuple[int, int]:
    """Tokens emitted by verification passes, and their number, over greedy `samples`.

    The first token of a completion comes from the prompt's pass and counts for neither.
    """
    num_tokens = num_passes = 0
    for sample in samples:
        features = None
        if drafter.feature_boundaries:
            view = view_target(model, drafter.feature_boundaries, padded([sample], pad_id=0))
            features = view.features[0]
        tokens, passes = _speculate(drafter, sample, features, num_nodes, max_depth)
        num_tokens += tokens
        num_passes += passes
    return num_tokens, num_passes


def _speculate(
    drafter: Drafter, sample: Sample, features: Tensor | None, num_nodes: int, max_depth: int
) -> tuple[int, int]:
    text, start = sample.prompt + sample.completion, len(sample.prompt)

    def states(first: int, last: int) -> Tensor | None:
        return None if features is None else features[first:last]

    drafter.start(torch.tensor(sample.prompt), text[start], states(0, start))
    done, passes = start + 1, 0  # tokens committed, the root included
    while done < len(text):
        tree = drafter.propose(num_nodes, max_depth)
        edges = zip(tree.parents, tree.tokens, strict=True)
        children = {edge: node for node, edge in enumerate(edges)}
        node, accepted = 0, 0
        while done + accepted < len(text) and (node, text[done + accepted]) in children:
            node = children[node, text[done + accepted]]
            accepted += 1
        emitted = min(accepted + 1, len(text) - done)
        drafter.extend(text[done : done + emitted], states(done - 1, done - 1 + emitted))
        done += emitted
        passes += 1
    return len(text) - start - 1, passes
