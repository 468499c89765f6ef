"""Sigmoid attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ssa_hf.scorings.base import WeightScoring, count_keys


@dataclass(frozen=True)
class Sigmoid(WeightScoring):
    """Weights sigmoid(x - log t) for a query that may attend to t keys; not normalised, near 1 in sum for small x."""

    name: ClassVar[str] = "sigmoid"
    source: ClassVar[str] = (
        "Ramapuram et al.: Theory, Analysis, and Best Practices for Sigmoid Self-Attention, arXiv 2409.04431"
    )

    def weights(self, scores: Tensor, allowed: Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor:
        """Shift by -log t and squash."""
        return (scores - count_keys(scores, allowed).log()).sigmoid()
