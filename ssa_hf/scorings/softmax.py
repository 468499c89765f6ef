"""Softmax by the same path as the other scorings: the control of comparisons."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ssa_hf.kernels.reference import masked_softmax
from ssa_hf.scorings.base import WeightScoring


@dataclass(frozen=True)
class Softmax(WeightScoring):
    """Weights exp(x), normalised."""

    name: ClassVar[str] = "softmax"
    source: ClassVar[str] = "Vaswani et al.: Attention Is All You Need, arXiv 1706.03762, equation 1"

    def weights(self, scores: Tensor, allowed: Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor:
        """Normalise the exponentials."""
        return masked_softmax(scores, allowed)
