"""The pool finds, bounds and drops passes; a fake stands for compiled ones and CUDA graphs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from acceptmoe.decoding.graph_pool import GraphPool, PassKey
from acceptmoe.decoding.graph_shapes import GraphShape, load_graph_shapes, sizes_for
from acceptmoe.errors import InvalidArgumentError, TreeError


@dataclass
class FakePass:
    key: PassKey
    num_bytes: int = 7
    is_released: bool = False

    def release(self) -> None:
        assert not self.is_released
        self.is_released = True


@dataclass
class Maker:
    """Makes fakes and remembers them in order."""

    made: list[FakePass] = field(default_factory=list)

    def __call__(self, key: PassKey) -> FakePass:
        self.made.append(FakePass(key))
        return self.made[-1]


def key(num_rows: int, num_slots: int = 256, policy: str = "natural") -> PassKey:
    return PassKey(num_rows, 1, num_slots, torch.float32, policy)


def make_pool(max_passes: int = 8) -> tuple[GraphPool[FakePass], Maker]:
    return GraphPool[FakePass]((16, 1, 8), max_passes=max_passes), Maker()


class TestAPool:
    @pytest.mark.parametrize(
        ("num_nodes", "size"), [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16), (17, None)]
    )
    def test_pads_a_tree_up_to_the_next_size(self, num_nodes: int, size: int | None) -> None:
        assert make_pool()[0].find_size(num_nodes) == size

    def test_makes_a_pass_once(self) -> None:
        pool, make = make_pool()
        assert pool.get(key(8), make) is pool.get(key(8), make)
        assert len(make.made) == pool.num_made == 1

    @pytest.mark.parametrize(
        "other",
        [
            key(16),
            key(8, num_slots=512),
            key(8, policy="accept"),
            PassKey(8, 2, 256, torch.float32, "natural"),
            PassKey(8, 1, 256, torch.bfloat16, "natural"),
        ],
    )
    def test_makes_another_pass_for_another_key(self, other: PassKey) -> None:
        pool, make = make_pool()
        assert pool.get(key(8), make) is not pool.get(other, make)

    def test_drops_the_least_recently_used(self) -> None:
        pool, make = make_pool(max_passes=3)
        for slots in (1, 2, 3, 1, 4):
            pool.get(key(8, slots), make)
        assert [made.key.num_slots for made in make.made if made.is_released] == [2]
        assert key(8, 1) in pool
        assert len(pool) == 3
        assert pool.report()["num_passes_evicted"] == 1

    def test_prepares_from_large_to_small(self) -> None:
        pool, make = make_pool()
        pool.get(key(8), make)
        pool.prepare([key(1), key(16), key(8)], make)
        assert [made.key.num_rows for made in make.made] == [8, 16, 1]

    def test_invalidation_releases_and_says_why(self) -> None:
        pool, make = make_pool()
        for slots in (1, 2):
            pool.get(key(8, slots), make)
        pool.invalidate("the cache moved", only=lambda found: found.num_slots == 2)
        assert [made.is_released for made in make.made] == [False, True]
        assert pool.report() == {
            "num_passes": 1,
            "num_passes_made": 2,
            "num_passes_evicted": 0,
            "num_passes_invalidated": 1,
            "last_invalidation": "the cache moved",
            "pass_bytes": 7,
        }
        pool.invalidate("nothing is left of it", only=lambda found: found.num_slots == 2)
        assert pool.last_invalidation == "the cache moved"
        pool.get(key(8, 2), make)
        assert len(make.made) == 3

    def test_is_as_before_when_making_fails(self) -> None:
        pool, make = make_pool()

        def fail(_: PassKey) -> FakePass:
            raise MemoryError("no room for the graph")

        with pytest.raises(MemoryError, match="no room"):
            pool.get(key(8), fail)
        assert len(pool) == pool.num_made == 0
        assert pool.get(key(8), make) is make.made[0]

    def test_refuses_a_number_of_rows_that_is_no_size(self) -> None:
        pool, make = make_pool()
        with pytest.raises(InvalidArgumentError, match=r"over 9 rows was asked for.*1, 8, 16 rows"):
            pool.get(key(9), make)

    def test_refuses_a_bound_below_its_sizes(self) -> None:
        with pytest.raises(InvalidArgumentError, match="max_passes is 2; it must be at least 3"):
            make_pool(max_passes=2)


class TestShapes:
    def test_of_the_package_begin_with_the_root_alone(self) -> None:
        shapes = load_graph_shapes()
        assert [shape.padded_nodes for shape in shapes] == [1, 4, 8, 12, 16, 24, 32, 48, 64]

    @pytest.mark.parametrize(
        ("num_nodes", "sizes"),
        [(1, (1,)), (2, (1, 4)), (4, (1, 4)), (5, (1, 4, 9)), (99, (1, 4, 9))],
    )
    def test_a_session_uses_those_up_to_its_largest_tree(
        self, num_nodes: int, sizes: tuple[int, ...]
    ) -> None:
        shapes = tuple(GraphShape(f"nodes-{rows}", rows) for rows in (1, 4, 9))
        assert sizes_for(num_nodes, shapes) == sizes

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ("{", "is no graph shape"),
            ("[]", "holds list; it must hold name and padded_nodes"),
            ('{"name": "a"}', r"holds \['name'\]"),
            ('{"name": "b", "padded_nodes": 2}', "has the name 'b'; it must be 'a'"),
            ('{"name": "a", "padded_nodes": 0}', "padded_nodes of the graph shape 'a' is 0"),
            ('{"name": "a", "padded_nodes": true}', "is True; it must be a whole number"),
            ('{"name": "a", "padded_nodes": 2, "parents": [-1, 0]}', "'parents'"),
        ],
    )
    def test_of_a_bad_file_are_refused(self, tmp_path: Path, content: str, text: str) -> None:
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(TreeError, match=text):
            load_graph_shapes(tmp_path)

    def test_of_equal_size_are_refused(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "padded_nodes": 3}))
        with pytest.raises(TreeError, match="'a' and 'b' both have 3 padded_nodes; remove one"):
            load_graph_shapes(tmp_path)
