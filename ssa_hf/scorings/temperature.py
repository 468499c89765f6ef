"""Softmax with a trained temperature."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ssa_hf.kernels.reference import masked_softmax
from ssa_hf.scorings.base import WeightScoring


@dataclass(frozen=True)
class Temperature(WeightScoring):
    """Weights exp(x / τ), normalised, with τ > 0 trained in each head.

    Attributes:
        temperature_init: initial τ.
    """

    name: ClassVar[str] = "temperature"
    source: ClassVar[str] = "Hinton et al.: Distilling the Knowledge in a Neural Network, arXiv 1503.02531, equation 1"

    temperature_init: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature_init < math.inf:
            raise ValueError(f"temperature_init must be above 0 and finite, got {self.temperature_init}.")

    def initial(self) -> dict[str, float]:
        """Train log τ, so that τ stays above 0."""
        return {"log_temperature": math.log(self.temperature_init)}

    def weights(self, scores: Tensor, allowed: Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor:
        """Divide by the temperature and normalise the exponentials."""
        return masked_softmax(scores * (-parameters["log_temperature"]).exp(), allowed)
