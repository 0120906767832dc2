"""The commitment table: how likely an output is to commit a draft node, measured beforehand.

A table is made by `acceptmoe calibrate` for one target, drafter and tree size, and is stored as
JSON. Loading checks everything and names what is wrong; nothing in it is ever executed.

Axes: T rows of the verification block (row 0 is the root), D depths (the root has depth 0).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from acceptmoe.assets import asset_dir
from acceptmoe.errors import InvalidArgumentError, TableError
from acceptmoe.tree import MAX_NODES

SCHEMA_VERSION = 1
MAX_HELD_OUT_ERROR = 0.03  # expected calibration error above which a table warns
MIN_COMMITMENT = 1e-4  # a node that was never seen committed still has some demand


@dataclass(frozen=True)
class DepthStatistics:
    """How often a block committed a node at each depth, for depths 0 to D.

    `trials[d]` is the number of blocks looked at, `successes[d]` how many of them committed a node
    at depth d. The quotient is a *marginal* probability: it is not conditional on depth d - 1, nor
    on the tree having a node at that depth. The root is always committed.
    """

    trials: tuple[int, ...]
    successes: tuple[int, ...]

    def __post_init__(self) -> None:
        trials, successes = tuple(self.trials), tuple(self.successes)
        object.__setattr__(self, "trials", trials)
        object.__setattr__(self, "successes", successes)
        if not trials or len(trials) != len(successes):
            raise TableError(
                f"depths has {len(trials)} trials and {len(successes)} successes; "
                "it must have one of each for every depth, the root included"
            )
        if len(trials) > MAX_NODES:
            raise TableError(
                f"depths covers depths 0 to {len(trials) - 1}; the largest allowed is "
                f"{MAX_NODES - 1}"
            )
        for depth, (num_trials, num_successes) in enumerate(zip(trials, successes, strict=True)):
            _check_int(f"depths.trials[{depth}]", num_trials, minimum=1)
            _check_int(f"depths.successes[{depth}]", num_successes, minimum=0)
            if num_successes > num_trials:
                raise TableError(
                    f"depths.successes[{depth}] is {num_successes}, more than the "
                    f"{num_trials} trials; a block commits at most one node at a depth"
                )
        if successes[0] != trials[0]:
            raise TableError(
                f"depths.successes[0] is {successes[0]} of {trials[0]} trials, so the root would "
                f"have commitment {successes[0] / trials[0]}; the root is always committed, it "
                "must be 1"
            )
        commitment = self.commitment
        for depth in range(1, len(commitment)):
            if commitment[depth] > commitment[depth - 1]:
                raise TableError(
                    f"depths has commitment {commitment[depth]} at depth {depth}, more than "
                    f"{commitment[depth - 1]} at depth {depth - 1}; a node is committed only "
                    "with its parent"
                )

    @property
    def max_depth(self) -> int:
        return len(self.trials) - 1

    @property
    def commitment(self) -> tuple[float, ...]:
        """The marginal probability p̂(d) of committing a node at depth d, for d = 0 to D."""
        return tuple(s / n for s, n in zip(self.successes, self.trials, strict=True))


@dataclass(frozen=True)
class CalibrationCurve:
    """Path probability -> probability of commitment, as the knots of a monotone line.

    `path_probabilities` ascend strictly (also in fp32, in which the line is evaluated),
    `commitments` never descend; both lie in [0, 1]. Outside the knots the end values hold.
    """

    path_probabilities: tuple[float, ...]
    commitments: tuple[float, ...]

    def __post_init__(self) -> None:
        knots, commitments = tuple(self.path_probabilities), tuple(self.commitments)
        object.__setattr__(self, "path_probabilities", knots)
        object.__setattr__(self, "commitments", commitments)
        if len(knots) < 2 or len(knots) != len(commitments):
            raise TableError(
                f"curve has {len(knots)} path_probabilities and {len(commitments)} commitments; "
                "it must have the same number of both, at least 2"
            )
        for name, values in (("path_probabilities", knots), ("commitments", commitments)):
            for index, value in enumerate(values):
                _check_probability(f"curve.{name}[{index}]", value)
        steps = torch.tensor(knots, dtype=torch.float32).diff().tolist()
        for index, step in enumerate(steps, start=1):
            if step <= 0:
                raise TableError(
                    f"curve.path_probabilities[{index}] is {knots[index]} after "
                    f"{knots[index - 1]}; the knots must ascend, by more than fp32 rounding"
                )
            if commitments[index] < commitments[index - 1]:
                raise TableError(
                    f"curve.commitments[{index}] is {commitments[index]} after "
                    f"{commitments[index - 1]}; the curve must never descend"
                )

    def commitment(self, path_probabilities: Tensor) -> Tensor:
        """[N] path probabilities of nodes other than the root -> [N] fp32, in [1e-4, 1]."""
        device = path_probabilities.device
        knots = _fp32(self.path_probabilities, device), _fp32(self.commitments, device)
        return _interpolate(*knots, path_probabilities)


@dataclass(frozen=True)
class HeldOutError:
    """Expected calibration error on prompts that the fit did not see.

    `curve` is that of the calibrated commitment, `raw` that of the drafter's own path
    probabilities.
    """

    curve: float
    raw: float
    num_prompts: int
    num_nodes: int

    def __post_init__(self) -> None:
        _check_probability("held_out_error.curve", self.curve)
        _check_probability("held_out_error.raw", self.raw)
        _check_int("held_out_error.num_prompts", self.num_prompts, minimum=1)
        _check_int("held_out_error.num_nodes", self.num_nodes, minimum=1)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before trusting the curve; empty when it is good enough."""
        texts = []
        if self.curve > MAX_HELD_OUT_ERROR:
            texts.append(
                f"the held-out calibration error is {self.curve:.4f}; it should be at most "
                f"{MAX_HELD_OUT_ERROR}. Calibrate on more prompts"
            )
        if self.curve >= self.raw:
            texts.append(
                f"the held-out calibration error is {self.curve:.4f} with the curve and "
                f"{self.raw:.4f} without; the curve should improve on the drafter's own "
                "probabilities. Calibrate on more prompts, like those that will be decoded"
            )
        return tuple(texts)


@dataclass(frozen=True)
class Provenance:
    """What the table was made from, and the command that makes it again."""

    dataset: str
    seeds: tuple[int, ...]
    num_prompts: int
    acceptmoe_version: str
    command: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        _check_text("provenance.dataset", self.dataset)
        for index, seed in enumerate(self.seeds):
            _check_int(f"provenance.seeds[{index}]", seed)
        _check_int("provenance.num_prompts", self.num_prompts, minimum=1)
        _check_text("provenance.acceptmoe_version", self.acceptmoe_version)
        _check_text("provenance.command", self.command)


@dataclass(frozen=True)
class CommitmentTable:
    """How likely a target and drafter are to commit a draft node, by depth and by path.

    `num_nodes` (root included) and `max_depth` are the tree that the table was measured with.
    `source` says where the table came from in error texts; it is not stored.

    Raises `TableError` when a part is impossible.
    """

    target: str
    target_fingerprint: str
    drafter: str
    num_nodes: int
    max_depth: int
    depths: DepthStatistics
    curve: CalibrationCurve
    held_out_error: HeldOutError
    provenance: Provenance
    source: str = field(default="the commitment table", compare=False)
    _on_device: dict[torch.device, _DeviceTable] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _check_text("target", self.target)
        _check_text("target_fingerprint", self.target_fingerprint)
        _check_text("drafter", self.drafter)
        _check_int("num_nodes", self.num_nodes, minimum=2, maximum=MAX_NODES)
        _check_int("max_depth", self.max_depth, minimum=1, maximum=MAX_NODES - 1)
        if self.depths.max_depth != self.max_depth:
            raise TableError(
                f"depths covers depths 0 to {self.depths.max_depth} and max_depth is "
                f"{self.max_depth}; it must cover exactly 0 to max_depth"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CommitmentTable:
        """The table in the file `path`, or the shipped table of that name.

        Raises `TableError` when there is none, or when anything in it is wrong.
        """
        file = _find_table(path)
        if file is None:
            raise TableError(
                f"no table {os.fspath(path)!r}; it is neither a file nor a shipped table "
                f"({', '.join(shipped_tables()) or 'none is shipped'}). "
                "Make one with: acceptmoe calibrate"
            )
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise TableError(
                f"{file} is not text in UTF-8; a commitment table is a JSON file"
            ) from None
        except OSError as error:
            raise TableError(f"{file} cannot be read: {error.strerror}") from error
        return cls.from_json(text, source=os.fspath(file))

    @classmethod
    def from_json(cls, text: str, *, source: str = "the commitment table") -> CommitmentTable:
        """The table that `to_json` wrote; `source` names it in error texts.

        Raises `TableError` for text that is cut off or not JSON, a NaN, a missing, unknown or
        repeated field, a wrong type, an impossible value, and a later schema.
        """
        try:
            fields = _Fields(_parse_json(text), "")
            _check_schema(fields.take("schema", int))
            depths = _Fields(fields.take("depths", dict), "depths.")
            curve = _Fields(fields.take("curve", dict), "curve.")
            held_out = _Fields(fields.take("held_out_error", dict), "held_out_error.")
            provenance = _Fields(fields.take("provenance", dict), "provenance.")
            table = cls(
                target=fields.take("target", str),
                target_fingerprint=fields.take("target_fingerprint", str),
                drafter=fields.take("drafter", str),
                num_nodes=fields.take("num_nodes", int),
                max_depth=fields.take("max_depth", int),
                depths=DepthStatistics(
                    trials=depths.take_all("trials", int),
                    successes=depths.take_all("successes", int),
                ),
                curve=CalibrationCurve(
                    path_probabilities=curve.take_all("path_probabilities", float),
                    commitments=curve.take_all("commitments", float),
                ),
                held_out_error=HeldOutError(
                    curve=held_out.take("curve", float),
                    raw=held_out.take("raw", float),
                    num_prompts=held_out.take("num_prompts", int),
                    num_nodes=held_out.take("num_nodes", int),
                ),
                provenance=Provenance(
                    dataset=provenance.take("dataset", str),
                    seeds=provenance.take_all("seeds", int),
                    num_prompts=provenance.take("num_prompts", int),
                    acceptmoe_version=provenance.take("acceptmoe_version", str),
                    command=provenance.take("command", str),
                ),
                source=source,
            )
            for part in (fields, depths, curve, held_out, provenance):
                part.check_nothing_left()
        except TableError as error:
            raise TableError(f"{source}: {error}") from None
        return table

    def to_json(self) -> str:
        """The table as JSON text that `from_json` reads back exactly."""
        content = {
            "schema": SCHEMA_VERSION,
            "target": self.target,
            "target_fingerprint": self.target_fingerprint,
            "drafter": self.drafter,
            "num_nodes": self.num_nodes,
            "max_depth": self.max_depth,
            "depths": asdict(self.depths),
            "curve": asdict(self.curve),
            "held_out_error": asdict(self.held_out_error),
            "provenance": asdict(self.provenance),
        }
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to `path`, wholly or not at all: a table there is replaced at the end.

        Raises `TableError` when the folder does not exist or cannot be written.
        """
        # Through a link, so that replacing keeps the link and changes what it names.
        file = Path(os.path.realpath(path))
        try:
            _write_atomically(file, self.to_json())
        except OSError as error:
            raise TableError(
                f"the table cannot be written to {os.fspath(path)}: {error.strerror}; "
                "give a file in a folder that exists and can be written"
            ) from error

    def depth_commitment(self, depths: Tensor) -> Tensor:
        """[T] integer depths -> [T] fp32: the marginal commitment p̂(d) of each row's depth.

        A depth beyond the table (allowed only by `allow_mismatch`) counts as the last one.
        """
        by_depth = self._device_table(depths.device).depth_commitment
        return by_depth[depths.clamp(0, self.max_depth)]

    def path_commitment(self, path_probabilities: Tensor) -> Tensor:
        """[T] path probabilities -> [T] fp32: each row's calibrated commitment, in [1e-4, 1].

        Row 0 is the root and gets exactly 1. The curve is linear between its knots.
        """
        knots = self._device_table(path_probabilities.device)
        commitment = _interpolate(knots.path_probabilities, knots.commitments, path_probabilities)
        return torch.cat([torch.ones_like(commitment[:1]), commitment[1:]])

    def min_path_probability(self, commitment: float) -> float:
        """A path probability below which every node's calibrated commitment is smaller still.

        At most 2^-12 below the smallest one that reaches `commitment`.
        """
        grid = torch.linspace(0, 1, 2**12 + 1)
        is_less = self.path_commitment(grid)[1:] < commitment  # of row 0, the root, always 1
        return float(grid[int(is_less.sum())])

    def check(
        self,
        *,
        target_fingerprint: str,
        drafter: str,
        num_nodes: int,
        max_depth: int,
        needs_depths: bool,
        target: str = "this model",
        allow_mismatch: bool = False,
    ) -> None:
        """Raise `TableError` when this table does not fit what is about to run.

        Target and drafter must always be those of the table. A policy that reads the commitment by
        depth (`needs_depths`) depends on the tree as well: it refuses a deeper one and another
        number of nodes, unless `allow_mismatch`. `target` names the model in the error text.
        """
        if target_fingerprint != self.target_fingerprint:
            raise TableError(
                f"{self.source} was made for the target {self.target} (configuration "
                f"{self.target_fingerprint}) and {target} has configuration {target_fingerprint}; "
                "a table serves one target only. Make one for it with: acceptmoe calibrate"
            )
        if drafter != self.drafter:
            raise TableError(
                f"{self.source} was made with the drafter {self.drafter!r} and this one is "
                f"{drafter!r}; use that drafter, or run: acceptmoe calibrate --drafter {drafter}"
            )
        if not needs_depths or allow_mismatch:
            return
        if max_depth > self.max_depth:
            raise TableError(
                f"{self.source} covers depths 0 to {self.max_depth} and this tree has depth "
                f"{max_depth}; run: acceptmoe calibrate --max-depth {max_depth}"
            )
        if num_nodes != self.num_nodes:
            raise TableError(
                f"{self.source} was made with trees of {self.num_nodes} nodes and this one has "
                f"{num_nodes}; the commitment by depth is that of its own tree. Use num_nodes="
                f"{self.num_nodes}, pass allow_table_mismatch=True, or run: acceptmoe calibrate "
                f"--num-nodes {num_nodes}"
            )

    def place_on(self, device: torch.device) -> None:
        """Copy the table to `device`, where it stays: later calls there copy nothing.

        The first call with a tensor of that device does it too, but while a CUDA graph is being
        captured nothing may be copied from the host.
        """
        if device in self._on_device:
            return
        with torch.inference_mode(False):  # the tensors outlive the generate that asked first
            table = _DeviceTable(
                depth_commitment=_fp32(self.depths.commitment, device),
                path_probabilities=_fp32(self.curve.path_probabilities, device),
                commitments=_fp32(self.curve.commitments, device),
            )
        self._on_device[table.commitments.device] = table  # "cuda" is "cuda:0" by then

    def _device_table(self, device: torch.device) -> _DeviceTable:
        self.place_on(device)
        return self._on_device[device]


@dataclass(frozen=True)
class _DeviceTable:
    depth_commitment: Tensor  # [D + 1] fp32
    path_probabilities: Tensor  # [knots] fp32
    commitments: Tensor  # [knots] fp32


def check_can_save(path: str | os.PathLike[str]) -> None:
    """Raise `TableError` when no table could be saved to `path`: before the work, not after it."""
    file = Path(os.path.realpath(path))
    reason = None
    if file.is_dir():
        reason = "it is a folder"
    elif not file.parent.is_dir():
        reason = f"there is no folder {file.parent}"
    elif not os.access(file.parent, os.W_OK | os.X_OK):
        reason = f"the folder {file.parent} is not writable"
    if reason:
        raise TableError(
            f"the table cannot be written to {os.fspath(path)}: {reason}; "
            "give a file in a folder that exists and can be written"
        )


def shipped_tables() -> list[str]:
    """Names of the tables that come with the package."""
    return sorted(file.stem for file in asset_dir("tables").glob("*.json"))


@runtime_checkable
class HasToDict(Protocol):
    """A configuration object such as those of transformers."""

    def to_dict(self) -> dict[str, Any]: ...


# The fields that make a target what it is, under every name that transformers versions and
# families use for them. Everything else (dtype, paths, version, token ids) may differ freely.
_FINGERPRINT_FIELDS: dict[str, tuple[str, ...]] = {
    "model_type": ("model_type",),
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts"),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    "norm_topk_prob": ("norm_topk_prob",),
    "num_groups": ("n_group", "num_expert_groups"),
    "topk_group": ("topk_group",),
    "first_dense_layers": ("first_k_dense_replace",),
    "sparse_step": ("decoder_sparse_step",),
    "dense_layers": ("mlp_only_layers",),
    "ties_embeddings": ("tie_word_embeddings",),
    "sliding_window": ("sliding_window",),
    "rope_theta": ("rope_theta",),
}
# Written into the configuration by a widening that preserves the function: it has the original's
# tokens, routes and acceptance, hence also its table.
PRESERVED_FINGERPRINT = "acceptmoe_preserved_fingerprint"


def config_fingerprint(config: HasToDict | Mapping[str, Any]) -> str:
    """Sixteen hex digits that tell one target configuration from another.

    Covers what defines the target (family, sizes, experts, layers, vocabulary); the same whatever
    the transformers version, dtype or path. Two models of one configuration but different weights
    have the same fingerprint.

    >>> config_fingerprint({"model_type": "olmoe", "num_experts": 64, "dtype": "bfloat16"})
    'b64138cf6ee7849f'
    """
    fields = dict(config.to_dict() if isinstance(config, HasToDict) else config)
    if isinstance(fields.get("text_config"), Mapping):
        fields = dict(fields["text_config"])  # the language model inside a multimodal one
    preserved = fields.get(PRESERVED_FINGERPRINT)
    if isinstance(preserved, str) and preserved:
        return preserved
    rope = fields.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        fields.setdefault("rope_theta", rope["rope_theta"])  # it lay outside before transformers 5
    found: dict[str, Any] = {}
    for name, aliases in _FINGERPRINT_FIELDS.items():
        # None, False, 0 and [] are what a version that does not know the field means by leaving it.
        values = [fields[alias] for alias in aliases if fields.get(alias)]
        if values:
            found[name] = values[0]
    if "model_type" not in found:
        raise InvalidArgumentError(
            "the configuration has no model_type; give a model's config, or its to_dict()"
        )
    if "num_heads" in found and "hidden_size" in found:  # defaults that some versions write out
        found.setdefault("head_dim", found["hidden_size"] // found["num_heads"])
        found.setdefault("num_key_value_heads", found["num_heads"])
    found = {name: _plain_number(value) for name, value in found.items()}
    canonical = json.dumps(found, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _plain_number(value: Any) -> Any:
    # 10000 and 10000.0 are one rope_theta, however a version wrote it.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        _refuse_type(name, value, "a text")
    if not value.strip():
        raise TableError(f"{name} is empty; it must be a text")


def _check_int(
    name: str, value: object, *, minimum: int | None = None, maximum: int | None = None
) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse_type(name, value, "an integer")
    if minimum is not None and value < minimum:
        raise TableError(f"{name} is {_short(value)}; it must be {minimum} or larger")
    if maximum is not None and value > maximum:
        raise TableError(f"{name} is {_short(value)}; it must be {maximum} or smaller")


def _check_probability(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse_type(name, value, "a number")
    if not 0.0 <= value <= 1.0:  # false for a NaN as well
        raise TableError(f"{name} is {_short(value)}; it must lie in [0, 1]")


def _refuse_type(name: str, value: object, allowed: str) -> NoReturn:
    raise TableError(f"{name} is {_short(value)}; it must be {allowed}")


def _check_schema(schema: int) -> None:
    if schema > SCHEMA_VERSION:
        raise TableError(
            f"schema is {_short(schema)} and this version of acceptmoe reads up to "
            f"{SCHEMA_VERSION}; update acceptmoe: pip install --upgrade acceptmoe"
        )
    if schema < 1:
        raise TableError(f"schema is {_short(schema)}; it must be {SCHEMA_VERSION}")


def _short(value: object) -> str:
    """`value` for an error text; a damaged file can hold megabytes in one field."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4300 digits
        return "a huge integer"
    return text if len(text) <= 60 else text[:57] + "..."


_TYPE_NAMES = {int: "an integer", float: "a number", str: "a text", dict: "an object"}


class _Fields:
    """One JSON object, read field by field; what is missing, left over or mistyped is an error."""

    def __init__(self, values: object, prefix: str) -> None:
        if not isinstance(values, dict):
            raise TableError(f"it holds {_short(values)}; a commitment table is a JSON object")
        self._values = dict(values)
        self._prefix = prefix

    def take(self, name: str, kind: type[Any]) -> Any:
        if name not in self._values:
            raise TableError(
                f"the field {self._prefix}{name} is missing; make the table again with: "
                "acceptmoe calibrate"
            )
        return self._typed(self._prefix + name, self._values.pop(name), kind)

    def take_all(self, name: str, kind: type[Any]) -> tuple[Any, ...]:
        values = self.take(name, object)
        if not isinstance(values, list):
            _refuse_type(self._prefix + name, values, "a list")
        return tuple(
            self._typed(f"{self._prefix}{name}[{index}]", value, kind)
            for index, value in enumerate(values)
        )

    def check_nothing_left(self) -> None:
        if self._values:
            names = ", ".join(self._prefix + _short(name)[1:-1] for name in sorted(self._values))
            raise TableError(
                f"unknown field {names}; a table of schema {SCHEMA_VERSION} does not have it"
            )

    @staticmethod
    def _typed(name: str, value: object, kind: type[Any]) -> Any:
        allowed = (int, float) if kind is float else (kind,)
        # JSON's true and false are integers to Python.
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not object):
            _refuse_type(name, value, _TYPE_NAMES[kind])
        return value


def _parse_json(text: str) -> object:
    if not text.strip():
        raise TableError("the file is empty; a commitment table is a JSON object")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_fields)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        what = "the file ends in the middle, it is truncated" if is_cut else "it is not JSON"
        raise TableError(
            f"{what} (line {error.lineno}, column {error.colno}: {error.msg}); restore the file, "
            "or make it again with: acceptmoe calibrate"
        ) from None
    except RecursionError:
        raise TableError("it is not a commitment table: nested too deeply") from None
    except TableError:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise TableError(f"it holds an impossible number: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise TableError(
        f"it holds {name}, which is no JSON number; every number in a table must be finite"
    )


def _unique_fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise TableError(f"the field {_short(name)[1:-1]} appears twice")
        fields[name] = value
    return fields


def _find_table(path: str | os.PathLike[str]) -> Path | None:
    file = Path(path)
    if file.exists():
        return file
    name = os.fspath(path)
    is_name = isinstance(path, str) and name == file.name and name in shipped_tables()
    return asset_dir("tables") / f"{name}.json" if is_name else None


def _write_atomically(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    # Not tempfile: its files can be read by their owner only, and a table is there to be shared.
    with open(temporary, "x", encoding="utf-8") as stream:
        try:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(temporary, file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    # The new name itself must survive a crash, not only the bytes.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _interpolate(x: Tensor, y: Tensor, values: Tensor) -> Tensor:
    """[knots], [knots], [N] -> [N] fp32: the line through the knots, flat outside, clamped."""
    values = values.to(torch.float32).clamp(x[0], x[-1]).contiguous()
    right = torch.searchsorted(x, values).clamp(1, len(x) - 1)
    share = (values - x[right - 1]) / (x[right] - x[right - 1])
    return torch.lerp(y[right - 1], y[right], share).clamp(MIN_COMMITMENT, 1.0)


def _fp32(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
