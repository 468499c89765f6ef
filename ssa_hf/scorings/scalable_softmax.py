"""Scalable softmax: a temperature that follows the number of keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ssa_hf.kernels.reference import masked_softmax
from ssa_hf.scorings.base import WeightScoring, count_keys


@dataclass(frozen=True)
class ScalableSoftmax(WeightScoring):
    """Weights t^(s·x) = exp(s · log t · x), normalised, for a query that may attend to t keys; s trained in each head.

    Attributes:
        s_init: initial s; 0.43 is the paper's example.
    """

    name: ClassVar[str] = "scalable_softmax"
    source: ClassVar[str] = "Nakanishi: Scalable-Softmax Is Superior for Attention, arXiv 2501.19399"

    s_init: float = 0.43

    def initial(self) -> dict[str, float]:
        """Train s."""
        return {"s": self.s_init}

    def weights(self, scores: Tensor, allowed: Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor:
        """Scale by s log t and normalise the exponentials."""
        return masked_softmax(parameters["s"] * count_keys(scores, allowed).log() * scores, allowed)
