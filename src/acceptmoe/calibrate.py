"""Make a commitment table: run natural speculation over prompts, count, fit a monotone curve.

Axes: N draft nodes of all blocks together (roots left out), B blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

from acceptmoe.decoding.emission import TokenEmitter
from acceptmoe.decoding.loop import decode
from acceptmoe.decoding.session import Session
from acceptmoe.decoding.turns import turns_of
from acceptmoe.decoding.verify import Prefix
from acceptmoe.drafting import Drafter, load_drafter
from acceptmoe.errors import InvalidArgumentError, TreeError, WrapStateError
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.kv import make_cache
from acceptmoe.policies import NaturalPolicy
from acceptmoe.table import (
    CalibrationCurve,
    CommitmentTable,
    DepthStatistics,
    HeldOutError,
    Provenance,
    config_fingerprint,
)
from acceptmoe.tree import MAX_NODES, DraftTree

Floats = NDArray[np.float64]

NUM_BINS = 15
MAX_KNOTS = 32
# A knot less than this from the line between its neighbours is left out. A thirtieth of the
# calibration error that a table may have.
KNOT_TOLERANCE = 1e-3

Progress = Callable[[int, int], None]


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    drafter: Drafter | PreTrainedModel | str | os.PathLike[str],
    prompts: Sequence[Tensor],
    *,
    num_nodes: int = 32,
    max_depth: int = 5,
    max_new_tokens: int = 128,
    held_out_fraction: float = 0.25,
    seed: int = 0,
    target: str | None = None,
    dataset: str = "unnamed prompts",
    command: str | None = None,
    progress: Progress | None = None,
) -> CommitmentTable:
    """The commitment table of `model` and `drafter`, from natural speculation over `prompts`.

    Every prompt is continued greedily, with natural routing, by at most `max_new_tokens`. The
    model is not wrapped and comes out as it went in. Nothing is written or resumed: save the
    result, whose `held_out_error.warnings` say when it should not be trusted.

    Args:
        model: A supported mixture-of-experts causal language model, not wrapped.
        drafter: What `acceptmoe.wrap` takes as `drafter`.
        prompts: Token ids, one int tensor [P] or [1, P] for each prompt, all different. Take them
            from data that the table will never be judged on.
        num_nodes: Largest number of nodes of a tree, the root included.
        max_depth: Largest number of drafted tokens on one path.
        max_new_tokens: Largest number of tokens to continue each prompt by.
        held_out_fraction: Share of the prompts on which only the calibration error is measured.
        seed: Chooses the prompts that are held out.
        target: Name of the target for people; by default that of its checkpoint folder.
        dataset: Where the prompts come from.
        command: What makes this table again; by default this call's settings.
        progress: Called with the numbers of finished and of all prompts.

    Raises:
        InvalidArgumentError: A number, a prompt or their number is out of range, or the drafter
            proposed nothing.
        UnsupportedModelError: The model cannot be verified as a tree.
        DrafterError: The drafter does not fit the model.
        WrapStateError: The model is wrapped.
    """
    if hasattr(model, "acceptmoe"):
        raise WrapStateError(
            "the model is wrapped and calibration runs it naturally; call "
            "acceptmoe.unwrap(model) first"
        )
    adapter = MoEAdapter(model)
    _check_numbers(num_nodes, max_depth, max_new_tokens, held_out_fraction, seed)
    rows = _check_prompts(prompts, model, max_new_tokens)
    chosen_drafter = load_drafter(drafter)
    with turns_of(chosen_drafter).taken("calibrate"):  # another model may be drafting with it
        chosen_drafter.check_target(model)
    if command is None:
        command = (
            f"acceptmoe.calibrate.calibrate(model, {chosen_drafter.name!r}, prompts, "
            f"{num_nodes=}, {max_depth=}, {max_new_tokens=}, {held_out_fraction=}, {seed=})"
        )
    session = Session.attach(
        model, adapter, NaturalPolicy(), None, chosen_drafter, num_nodes, max_depth
    )
    recorders = []
    try:
        for done, prompt in enumerate(rows):
            if progress is not None:
                progress(done, len(rows))
            with session.drafting(model, "calibrate"):
                recorders.append(_record(model, session, prompt, max_new_tokens))
    finally:
        session.detach()
    if progress is not None:
        progress(len(rows), len(rows))
    name = Path(str(getattr(model.config, "_name_or_path", "") or "")).name
    return fit_table(
        recorders,
        target=target or name or str(model.config.model_type),
        target_fingerprint=config_fingerprint(model.config),
        drafter=chosen_drafter.name,
        num_nodes=num_nodes,
        max_depth=max_depth,
        held_out_fraction=held_out_fraction,
        seed=seed,
        provenance=Provenance(
            dataset=dataset,
            seeds=(seed,),
            num_prompts=len(rows),
            acceptmoe_version=_package_version(),
            command=command,
        ),
    )


def _record(
    model: PreTrainedModel, session: Session, prompt: Tensor, max_new_tokens: int
) -> BlockRecorder:
    """Continue one prompt ([1, P]) and record its verification blocks."""
    length = prompt.shape[1]
    cache = make_cache(None, model.config, length + max_new_tokens + session.num_nodes)
    inputs = {"input_ids": prompt, session.adapter.cache_keyword: cache, "use_cache": True}
    with session.tap.recording():
        prefill = model(**inputs, logits_to_keep=1, return_dict=True)
    eos = model.generation_config.eos_token_id if model.generation_config else None
    criteria = StoppingCriteriaList([MaxLengthCriteria(length + max_new_tokens)])
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    emitter = TokenEmitter(
        prompt, LogitsProcessorList(), criteria, None, keeps_scores=False, keeps_logits=False
    )
    observer = _LoopObserver(session.max_depth, max_new_tokens)
    session.observers[:] = [observer.observe]
    is_valid = torch.ones(length, dtype=torch.bool, device=prompt.device)
    decode(
        model,
        session,
        emitter,
        cache,
        Prefix(is_valid, length),
        prefill.logits[:, -1],
        session.tap.features,
        length + max_new_tokens,
    )
    return observer.finish(int(emitter.input_ids[0, -1]))


class _LoopObserver:
    """Hands the loop's blocks to a recorder, without those that the end of the text distorts.

    Near `max_new_tokens` the loop drafts shallower trees; such blocks are left out. And the loop
    does not commit the row of the last token, which nothing follows; a drafted last token was
    accepted nonetheless.
    """

    def __init__(self, max_depth: int, max_new_tokens: int) -> None:
        self._max_depth = max_depth
        self._num_wanted = max_new_tokens - 1  # the first token comes from the prefill
        self._recorder = BlockRecorder()
        self._last_block: tuple[DraftTree, tuple[int, ...]] | None = None

    def observe(self, tree: DraftTree, nodes: tuple[int, ...]) -> None:
        self._record_last()
        if self._num_wanted > self._max_depth:  # else the tree could not have its full depth
            self._last_block = (tree, nodes)
        self._num_wanted -= len(nodes)  # a block emits one token for each committed node

    def finish(self, last_token: int) -> BlockRecorder:
        """What was recorded, the text having ended with `last_token`."""
        if self._last_block is not None:
            tree, nodes = self._last_block
            children = tree.shape.children[nodes[-1]]
            drafted = [child for child in children if tree.tokens[child] == last_token]
            self._last_block = (tree, (*nodes, *drafted[:1]))
        self._record_last()
        return self._recorder

    def _record_last(self) -> None:
        if self._last_block is not None:
            self._recorder.observe(*self._last_block)
        self._last_block = None


def _check_numbers(
    num_nodes: int, max_depth: int, max_new_tokens: int, held_out_fraction: float, seed: int
) -> None:
    for name, value, least in (
        ("num_nodes", num_nodes, 2),
        ("max_depth", max_depth, 1),
        ("max_new_tokens", max_new_tokens, 1),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgumentError(
                f"{name} is {value!r}; it must be a whole number, {least} or larger"
            )
    for name, value in (("num_nodes", num_nodes), ("max_depth", max_depth)):
        if value > MAX_NODES:
            raise InvalidArgumentError(f"{name} is {value}; it must be {MAX_NODES} or smaller")
    if max_new_tokens < max_depth + 2:
        raise InvalidArgumentError(
            f"max_new_tokens is {max_new_tokens} and max_depth {max_depth}; no tree of that depth "
            f"fits into the text, max_new_tokens must be {max_depth + 2} or larger, better 100"
        )
    is_number = isinstance(held_out_fraction, (int, float))
    if not is_number or not 0.0 < held_out_fraction < 1.0:
        raise InvalidArgumentError(
            f"held_out_fraction is {held_out_fraction!r}; it must lie between 0 and 1 (0.25 holds "
            "out a quarter of the prompts)"
        )


def _check_prompts(
    prompts: Sequence[Tensor], model: PreTrainedModel, max_new_tokens: int
) -> list[Tensor]:
    """The prompts as [1, P] on the model's device, or `InvalidArgumentError`."""
    if len(prompts) < 2:
        raise InvalidArgumentError(
            f"there are {len(prompts)} prompts; calibration needs at least 2, one to fit and one "
            "held out, better 50"
        )
    vocab_size = model.get_input_embeddings().num_embeddings
    num_positions = getattr(model.config, "max_position_embeddings", None)
    seen: dict[tuple[int, ...], int] = {}
    rows = []
    for index, prompt in enumerate(prompts):
        name = f"prompts[{index}]"
        is_ids = isinstance(prompt, Tensor) and prompt.dtype in (torch.int64, torch.int32)
        if not is_ids or prompt.dim() not in (1, 2) or (prompt.dim() == 2 and len(prompt) != 1):
            raise InvalidArgumentError(
                f"{name} is {_kind(prompt)}; it must be a tensor of token ids, int64 of the shape "
                "[length]"
            )
        row = prompt.reshape(1, -1).to(device=model.device, dtype=torch.int64)
        if row.shape[1] == 0:
            raise InvalidArgumentError(f"{name} is empty; give at least one token, or leave it out")
        smallest, largest = int(row.min()), int(row.max())
        if smallest < 0 or largest >= vocab_size:
            raise InvalidArgumentError(
                f"{name} holds the token {smallest if smallest < 0 else largest}; this model's "
                f"token ids are 0 to {vocab_size - 1}. Was it made with another tokenizer?"
            )
        if num_positions is not None and row.shape[1] + max_new_tokens > num_positions:
            raise InvalidArgumentError(
                f"{name} has {row.shape[1]} tokens and max_new_tokens is {max_new_tokens}; this "
                f"model has {num_positions} positions. Shorten or leave out the prompt, or lower "
                "max_new_tokens"
            )
        first = seen.setdefault(tuple(row[0].tolist()), index)
        if first != index:
            raise InvalidArgumentError(
                f"{name} repeats prompts[{first}]; one copy could be fitted and the other held "
                "out, leave it out"
            )
        rows.append(row)
    return rows


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _package_version() -> str:
    try:
        return metadata.version("acceptmoe")
    except metadata.PackageNotFoundError:
        return "not installed"  # run from a checkout by its path


@dataclass
class BlockRecorder:
    """Labels the draft nodes of one prompt's verification blocks as committed or not.

    Blocks in which the drafter proposed nothing are left out: no node of theirs needs a weight.
    """

    path_probabilities: list[float] = field(default_factory=list)  # [N], roots left out
    is_committed: list[bool] = field(default_factory=list)  # [N]
    committed_depths: list[int] = field(default_factory=list)  # [B], the deepest committed node

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Count one block: `accepted` are the node ids of the accepted path, the root first.

        Every other node counts as not committed, the descendants of a rejected node included.
        Raises `TreeError` when `accepted` is not a path from the root.
        """
        _check_path(tree, accepted)
        if tree.num_nodes == 1:
            return
        committed = set(accepted)
        self.path_probabilities.extend(tree.path_probabilities[1:])
        self.is_committed.extend(node in committed for node in range(1, tree.num_nodes))
        self.committed_depths.append(len(accepted) - 1)


def _check_path(tree: DraftTree, accepted: Sequence[int]) -> None:
    is_path = len(accepted) > 0 and accepted[0] == 0
    for parent, node in pairwise(accepted):
        is_path = is_path and 0 < node < tree.num_nodes and tree.parents[node] == parent
    if not is_path:
        raise TreeError(
            f"accepted is {list(accepted)}; it must be node ids of the tree from the root down"
        )


def depth_statistics(recorders: Sequence[BlockRecorder], max_depth: int) -> DepthStatistics:
    """Over all blocks, how many committed a node at each depth from 0 to `max_depth`."""
    depths = np.concatenate([np.asarray(r.committed_depths, dtype=np.int64) for r in recorders])
    successes = tuple(int((depths >= depth).sum()) for depth in range(max_depth + 1))
    return DepthStatistics(trials=(len(depths),) * (max_depth + 1), successes=successes)


def isotonic_regression(values: ArrayLike, weights: ArrayLike) -> Floats:
    """[N] values, [N] positive weights -> [N]: the closest sequence that never descends.

    Closest in weighted squares; pool adjacent violators (Barlow and others, 1972): neighbours out
    of order are merged into their mean until none is.
    """
    means: list[float] = []
    masses: list[float] = []
    lengths: list[int] = []
    for value, weight in zip(_floats(values), _floats(weights), strict=True):
        mean, mass, length = float(value), float(weight), 1
        while means and means[-1] >= mean:
            merged = masses[-1] + mass
            mean = (means.pop() * masses[-1] + mean * mass) / merged
            masses.pop()
            mass, length = merged, length + lengths.pop()
        means.append(mean)
        masses.append(mass)
        lengths.append(length)
    return np.repeat(_floats(means), lengths)


def fit_curve(
    path_probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    max_knots: int = MAX_KNOTS,
    tolerance: float = KNOT_TOLERANCE,
) -> CalibrationCurve:
    """The monotone curve from path probability to the share of committed nodes, in few knots.

    `path_probabilities` [N] lie in [0, 1], `labels` [N] are 1 for a committed node. The isotonic
    fit is thinned to at most `max_knots`, none of them within `tolerance` of the line through its
    neighbours.

    >>> fit_curve([0.1, 0.1, 0.2, 0.8], [0, 1, 0, 1]).commitments
    (0.3333333333333333, 0.3333333333333333, 1.0)
    """
    # Rounded to fp32, in which the curve is evaluated: two knots closer than that cannot be told
    # apart there. Equal ones are pooled, or their order in the list would matter.
    probabilities = _floats(np.asarray(path_probabilities, dtype=np.float32))
    if probabilities.size == 0:
        raise InvalidArgumentError("there are no draft nodes to fit a curve to")
    knots, index, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
    shares = np.bincount(index, weights=_floats(labels)) / counts
    fitted = isotonic_regression(shares, counts).clip(0.0, 1.0)
    if len(knots) == 1:  # one drafter probability only, as a drafter without any would give
        knots, fitted = _floats([0.0, 1.0]), np.repeat(fitted, 2)
    chosen = _thin_knots(knots, fitted, max_knots, tolerance)
    return CalibrationCurve(tuple(knots[chosen].tolist()), tuple(fitted[chosen].tolist()))


def _thin_knots(x: Floats, y: Floats, max_knots: int, tolerance: float) -> list[int]:
    """Indices of the knots to keep: the ends, then always the one furthest from the line so far.

    The line through some points of a monotone sequence is monotone too.
    """
    chosen = [0, len(x) - 1]
    while len(chosen) < max_knots:
        distance = np.abs(np.interp(x, x[chosen], y[chosen]) - y)
        furthest = int(distance.argmax())
        if distance[furthest] <= tolerance:
            break
        chosen = sorted([*chosen, furthest])
    return chosen


def expected_calibration_error(
    predictions: ArrayLike, labels: ArrayLike, *, num_bins: int = NUM_BINS
) -> float:
    """Mean distance between predicted and observed share, over bins of equal numbers of nodes.

    `predictions` [N] in [0, 1], `labels` [N] of 0 and 1. Nodes are ranked by prediction; equal
    predictions stay in one bin, because calibration is a claim about all of them together, so
    with many equal ones some bins are larger and some empty.
    """
    predicted, observed = _floats(predictions), _floats(labels)
    if predicted.size == 0:
        raise InvalidArgumentError("there are no draft nodes to measure a calibration error on")
    order = np.argsort(predicted, kind="stable")
    predicted, observed = predicted[order], observed[order]
    first_of_equals = np.searchsorted(predicted, predicted)
    bins = first_of_equals * num_bins // len(predicted)
    gaps = np.bincount(bins, weights=predicted - observed)
    return float(np.abs(gaps).sum() / len(predicted))


def fit_table(
    recorders: Sequence[BlockRecorder],
    *,
    target: str,
    target_fingerprint: str,
    drafter: str,
    num_nodes: int,
    max_depth: int,
    held_out_fraction: float,
    seed: int,
    provenance: Provenance,
) -> CommitmentTable:
    """The table for what was recorded, one recorder for each prompt.

    Some *prompts*, chosen by `seed`, are held out: the curve never sees them, and its calibration
    error is measured on them. (Nodes of one prompt are alike; holding out nodes would flatter.)
    The commitment by depth, which is only a count, uses all prompts.

    Raises `InvalidArgumentError` when the drafter proposed nothing on either side.
    """
    held_out_ids = set(_held_out_prompts(len(recorders), held_out_fraction, seed))
    fitted = [r for i, r in enumerate(recorders) if i not in held_out_ids]
    held_out = [r for i, r in enumerate(recorders) if i in held_out_ids]
    for name, part in (("fitted", fitted), ("held-out", held_out)):
        if not any(recorder.path_probabilities for recorder in part):
            raise InvalidArgumentError(
                f"the drafter {drafter!r} proposed no token on the {len(part)} {name} prompts; "
                "there is nothing to count. Give more or longer prompts, or more new tokens"
            )
    curve = fit_curve(*_nodes(fitted))
    return CommitmentTable(
        target=target,
        target_fingerprint=target_fingerprint,
        drafter=drafter,
        num_nodes=num_nodes,
        max_depth=max_depth,
        depths=depth_statistics(recorders, max_depth),
        curve=curve,
        held_out_error=_held_out_error(curve, held_out),
        provenance=provenance,
    )


def _held_out_prompts(num_prompts: int, fraction: float, seed: int) -> list[int]:
    num_held_out = min(max(round(fraction * num_prompts), 1), num_prompts - 1)
    order = np.random.default_rng(seed).permutation(num_prompts)
    return [int(prompt) for prompt in order[:num_held_out]]


def _held_out_error(curve: CalibrationCurve, held_out: Sequence[BlockRecorder]) -> HeldOutError:
    probabilities, labels = _nodes(held_out)
    return HeldOutError(
        curve=expected_calibration_error(
            curve.commitment(torch.from_numpy(probabilities)).numpy(), labels
        ),
        raw=expected_calibration_error(probabilities, labels),
        num_prompts=len(held_out),
        num_nodes=len(labels),
    )


def _nodes(recorders: Sequence[BlockRecorder]) -> tuple[Floats, Floats]:
    probabilities = [p for recorder in recorders for p in recorder.path_probabilities]
    labels = [label for recorder in recorders for label in recorder.is_committed]
    return _floats(probabilities), _floats(labels)


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)
