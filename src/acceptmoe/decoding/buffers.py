"""What changes from one verification pass to the next, in tensors that stay where they are.

Axes: T rows of the pass (padding included), M slot moves.

One host buffer holds all fields and one copy takes them to the device, so that a step costs one
transfer and a compiled or captured pass finds its inputs where it looked when it was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from torch import Tensor

from acceptmoe.selection import BlockRows
from acceptmoe.table import CommitmentTable
from acceptmoe.tree import DraftTree

WITHOUT_ROWS = ("moves", "num_prefix", "next_position")  # all axes of the others are rows
ALIGNMENT = 64  # bytes; compiled kernels copy inputs that lie on odd addresses


@dataclass(frozen=True)
class BlockInputs:
    """The rows of one pass.

    `tokens`, `depths` [T] int64, `ancestry` [T, T] bool (`TreeShape.ancestry`), `depth_commitment`
    and `path_commitment` [T] fp32, `is_real` [T] bool (see `BlockRows`), `num_prefix` and
    `next_position` [1] int64: tokens in the cache and the root's position. `moves` [2, M] int64:
    cache slots to read and to write before the pass. A padded row is a second root that sees itself
    and the prefix, and that no row sees.
    """

    tokens: Tensor
    depths: Tensor
    moves: Tensor
    num_prefix: Tensor
    next_position: Tensor
    depth_commitment: Tensor
    path_commitment: Tensor
    is_real: Tensor
    ancestry: Tensor

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    def rows(self) -> BlockRows:
        """What policies read of the rows."""
        return BlockRows(self.depths, self.depth_commitment, self.path_commitment, self.is_real)


def _layout(num_rows: int, num_moves: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "tokens": ((num_rows,), torch.int64),
        "depths": ((num_rows,), torch.int64),
        "moves": ((2, num_moves), torch.int64),
        "num_prefix": ((1,), torch.int64),
        "next_position": ((1,), torch.int64),
        "depth_commitment": ((num_rows,), torch.float32),
        "path_commitment": ((num_rows,), torch.float32),
        "is_real": ((num_rows,), torch.bool),
        "ancestry": ((num_rows, num_rows), torch.bool),
    }


class BlockBuffers:
    """The inputs of passes over `num_rows` rows, `inputs`, filled anew for every block."""

    def __init__(self, num_rows: int, num_moves: int, device: torch.device) -> None:
        layout = _layout(num_rows, num_moves)
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in layout.values()]
        num_bytes = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        # NumPy writes small lists ten times as fast as torch does.
        self._views: dict[str, Any] = {
            name: view.numpy() for name, view in _split(self._host, layout).items()
        }
        self.inputs = BlockInputs(**_split(self._device, layout))
        assert tuple(layout) == tuple(field.name for field in fields(BlockInputs))

    @property
    def num_bytes(self) -> int:
        return self._device.nbytes

    def mark_rows_dynamic(self) -> None:
        """Make `torch.compile` take the number of rows for one of many.

        Except 1, which torch always compiles for alone.
        """
        if self.inputs.num_rows == 1:
            return
        for field in fields(BlockInputs):
            tensor: Tensor = getattr(self.inputs, field.name)
            if field.name not in WITHOUT_ROWS:
                for axis in range(tensor.dim()):
                    torch._dynamo.mark_dynamic(tensor, axis)

    def fill(
        self,
        tree: DraftTree,
        num_prefix: int,
        next_position: int,
        table: CommitmentTable | None,
        moves: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> BlockInputs:
        """`inputs` with the rows of `tree`, which has at most `num_rows` nodes, and padding."""
        views, num_nodes = self._views, tree.num_nodes
        padding = slice(num_nodes, None)
        for name, values, padded in (
            ("tokens", tree.tokens, tree.tokens[0]),
            ("depths", tree.shape.depths, 0),
            ("is_real", True, False),
        ):
            views[name][:num_nodes] = values
            views[name][padding] = padded
        views["num_prefix"][0] = num_prefix
        views["next_position"][0] = next_position
        views["moves"][:] = moves
        self._fill_ancestry(tree)
        self._fill_commitment(tree, table)
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
        return self.inputs

    def _fill_ancestry(self, tree: DraftTree) -> None:
        ancestry, num_nodes = self._views["ancestry"], tree.num_nodes
        ancestry[:num_nodes, :num_nodes] = tree.shape.ancestry.numpy()
        ancestry[:, num_nodes:] = False
        ancestry[num_nodes:, :num_nodes] = False
        for row in range(num_nodes, len(ancestry)):
            ancestry[row, row] = True

    def _fill_commitment(self, tree: DraftTree, table: CommitmentTable | None) -> None:
        by_depth, by_path = self._views["depth_commitment"], self._views["path_commitment"]
        by_depth[:] = by_path[:] = 0.0
        num_nodes = tree.num_nodes
        if table is None or num_nodes == 1:
            by_depth[:num_nodes] = 1.0
            by_path[:num_nodes] = tree.path_probabilities
            return
        probabilities = torch.tensor(tree.path_probabilities)
        depths = torch.tensor(tree.shape.depths)
        by_depth[:num_nodes] = table.depth_commitment(depths).numpy()
        by_path[:num_nodes] = table.path_commitment(probabilities).numpy()


def _split(
    buffer: Tensor, layout: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Tensor]:
    """Views of the byte `buffer`, one a field, each on an aligned address."""
    views: dict[str, Tensor] = {}
    start = 0
    for name, (shape, dtype) in layout.items():
        size = prod(shape) * dtype.itemsize
        views[name] = buffer[start : start + size].view(dtype).view(shape)
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return views
