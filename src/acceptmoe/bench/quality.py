"""What every policy does to the output: each decodes the same test prompts with the same trees.

The text of natural routing is Transformers' own batched `generate`, which natural trees equal token
for token; some prompts are decoded by natural trees as well, to count their experts and to prove
the equality in the very run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from acceptmoe.bench.policy_grid import NATURAL, PAPER, rival_policies
from acceptmoe.bench.provenance import git_commit
from acceptmoe.bench.quality_decoding import PLAIN, DecodingSettings, QualityWorker, Work
from acceptmoe.bench.setups import check_names, check_policies, num_experts
from acceptmoe.bench.work_file import Record, WorkFile
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies import DEFAULT_POLICY
from acceptmoe.targets.tasks import TASKS

PLAIN_BATCH = 50
PAIRED_PROMPTS = 5  # a few seconds of work: what an interruption costs, and how often a bar moves

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class QualitySettings:
    """What to measure, and on how many prompts of every target and task."""

    targets: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS
    num_prompts: int = 500  # natural, the paper's rule and the default
    num_rival_prompts: int = 100  # each rival, and natural trees: the first of these prompts
    rivals: tuple[str, ...] | None = None  # None: those of `rival_policies`
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    jobs: int = 1  # processes, each with one thread

    def check(self) -> None:
        """Raise `InvalidArgumentError` for what cannot be measured; nothing is loaded."""
        check_names(self.targets, self.tasks, self.decoding.drafter)
        if not self.targets or not self.tasks:
            raise InvalidArgumentError(
                "there is no target or no task to measure; give at least one"
            )
        if self.decoding.table is not None and len(self.targets) > 1:
            raise InvalidArgumentError(
                f"table is {self.decoding.table!r} and there are {len(self.targets)} targets; a "
                "table belongs to one target, measure one at a time"
            )
        for name, lowest in (("num_prompts", 1), ("num_rival_prompts", 0), ("jobs", 1)):
            if getattr(self, name) < lowest:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)}; it must be {lowest} or larger"
                )
        check_policies(self.rivals or (), self.targets)

    def policies(self, target: str) -> dict[str, int]:
        """Every policy of a target, and on how many prompts it is measured."""
        few = min(self.num_rival_prompts, self.num_prompts)
        rivals = rival_policies(num_experts(target)) if self.rivals is None else self.rivals
        return {
            PLAIN: self.num_prompts,
            PAPER: self.num_prompts,
            DEFAULT_POLICY: self.num_prompts,
            NATURAL: max(few, 1),
        } | (dict.fromkeys(rivals, few) if few else {})


def measure_quality(
    settings: QualitySettings,
    work_path: Path,
    *,
    is_fresh: bool = False,
    progress: Progress | None = None,
) -> list[Record]:
    """The records of every policy and prompt; those already in `work_path` are not made again.

    Raises `InvalidArgumentError` for bad settings, and when `work_path` holds work of other ones.
    """
    settings.check()
    work_file = WorkFile(work_path, fingerprint(settings.decoding), is_fresh=is_fresh)
    pending = plan(settings, work_file.records)
    num_pending = sum(len(work.policies) * len(work.indices) for work in pending)
    num_done = (
        sum(sum(settings.policies(target).values()) for target in settings.targets)
        * len(settings.tasks)
        - num_pending
    )
    num_all = num_done + num_pending
    for records in decode_all(pending, settings):
        work_file.append(records)
        num_done += len(records)
        if progress is not None:
            progress(num_done, num_all)
    return work_file.records


def fingerprint(decoding: DecodingSettings) -> dict[str, Any]:
    """What two records must have in common to be averaged."""
    return {
        "benchmark": "quality",
        "git_commit": git_commit(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        **asdict(decoding),
    }


def plan(settings: QualitySettings, done: list[Record]) -> list[Work]:
    """The pieces of work that are left, target by target so that workers seldom load another.

    All policies that a prompt still needs go into one piece: they share its reference.
    """
    have = {(r["target"], r["task"], r["policy"], r["index"]) for r in done}
    works: list[Work] = []
    for target in settings.targets:
        counts = settings.policies(target)
        for task in settings.tasks:
            needs: dict[tuple[str, ...], list[int]] = {}
            for index in range(settings.num_prompts):
                missing = [
                    spec
                    for spec, count in counts.items()
                    if index < count and (target, task, spec, index) not in have
                ]
                for specs in ((PLAIN,), tuple(spec for spec in missing if spec != PLAIN)):
                    if specs and set(specs) <= set(missing):
                        needs.setdefault(specs, []).append(index)
            for specs, indices in needs.items():
                size = PLAIN_BATCH if specs == (PLAIN,) else PAIRED_PROMPTS
                works += [
                    Work(target, task, specs, tuple(indices[at : at + size]), settings.num_prompts)
                    for at in range(0, len(indices), size)
                ]
    return works


def decode_all(works: list[Work], settings: QualitySettings) -> Iterator[list[Record]]:
    """The records of each piece of work as it finishes, from one process or several."""
    if settings.jobs == 1 or len(works) <= 1:
        worker = QualityWorker(settings.decoding)
        yield from map(worker.decode, works)
        return
    # Read by OpenMP when a process starts: threads that wait must not take the others' cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    pool = ProcessPoolExecutor(
        min(settings.jobs, len(works)),
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy torch's locks
        initializer=_begin_worker,
        initargs=(settings.decoding,),
    )
    try:
        for future in as_completed([pool.submit(_decode, work) for work in works]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_worker: QualityWorker | None = None  # of this process, when it is one of the pool's


def _begin_worker(settings: DecodingSettings) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    torch.set_num_threads(1)
    _worker = QualityWorker(settings)


def _decode(work: Work) -> list[Record]:
    assert _worker is not None
    return _worker.decode(work)
