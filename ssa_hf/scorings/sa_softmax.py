"""Self-Adjust softmax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ssa_hf.kernels.reference import masked_softmax
from ssa_hf.scorings.base import WeightScoring


@dataclass(frozen=True)
class SASoftmax(WeightScoring):
    """Weights r(z)·softmax(z): r(z) = z, or z rescaled by its extremes in the row and 0 to lie in [0, 1].

    The weights do not sum to 1; the plain ones may be negative.

    Attributes:
        normalised: rescale, r(z) = (z - min(z_min, 0)) / (max(z_max, 0) - min(z_min, 0)); otherwise r(z) = z.
    """

    name: ClassVar[str] = "sa_softmax"
    source: ClassVar[str] = "Zheng et al.: Self-Adjust Softmax, arXiv 2502.18277"

    normalised: bool = True

    def weights(self, scores: Tensor, allowed: Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor:
        """Multiply softmax by the scores or by the rescaled scores."""
        softmax = masked_softmax(scores, allowed)
        if not self.normalised:
            return scores * softmax
        # 0, put in a masked key's place, changes neither extreme.
        visible = scores if allowed is None else scores.masked_fill(~allowed, 0)
        low = visible.amin(-1, keepdim=True).clamp(max=0)
        high = visible.amax(-1, keepdim=True).clamp(min=0)
        # A row of zeros has no extent: its weights are 0, and their gradients stay finite.
        extent = (high - low).clamp(min=1e-6)
        return (visible - low) / extent * softmax
