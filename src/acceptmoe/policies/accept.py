"""`accept`: path-aware commitment, our own policy and the default."""

from __future__ import annotations

from typing import Any

from acceptmoe.policies.policy import RoutingPolicy
from acceptmoe.policies.weighted import check_exponent, select_by_weight
from acceptmoe.selection import RoutedBlock, Selection


class AcceptPolicy(RoutingPolicy):
    """Rows count by the calibrated probability of their own path: alpha = c^exponent.

    The paper weighs all siblings alike. The drafter knows better: it has a probability for every
    path, and the table maps it to the frequency with which such nodes were committed on held-out
    text. Demand then concentrates on few rows, the effective rank falls, and the experts of the
    rows that the output will keep stay eligible.

    With exponent 1, the default, a row counts by its probability itself, so that demand is the gate
    mass expected to matter. Smaller exponents keep more experts for unlikely rows.
    """

    name = "accept"
    reads_paths = True

    def __init__(self, exponent: float = 1.0) -> None:
        self.exponent = check_exponent("exponent", exponent)

    def select(self, block: RoutedBlock) -> Selection:
        return select_by_weight(block, block.rows.path_commitment**self.exponent)

    def params(self) -> dict[str, Any]:
        return {"exponent": self.exponent}
