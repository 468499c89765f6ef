"""Sparse attention by the entmax package: sparsemax, 1.5-entmax, and α-entmax with α trained."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from ssa_hf.scorings.base import WeightScoring


@dataclass(frozen=True)
class Sparsemax(WeightScoring):
    """The Euclidean projection of the scores onto the simplex: α-entmax with α = 2."""

    name: ClassVar[str] = "sparsemax"
    source: ClassVar[str] = "Martins, Astudillo: From Softmax to Sparsemax, arXiv 1602.02068, equation 2"

    def weights(self, scores: Tensor, allowed: Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor:
        """Project."""
        weights: Tensor = _entmax().sparsemax(_hide(scores, allowed), dim=-1)
        return weights


@dataclass(frozen=True)
class Entmax15(WeightScoring):
    """α-entmax with α = 1.5."""

    name: ClassVar[str] = "entmax15"
    source: ClassVar[str] = "Peters, Niculae, Martins: Sparse Sequence-to-Sequence Models, arXiv 1905.05702"

    def weights(self, scores: Tensor, allowed: Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor:
        """Map by 1.5-entmax."""
        weights: Tensor = _entmax().entmax15(_hide(scores, allowed), dim=-1)
        return weights


@dataclass(frozen=True)
class AlphaEntmax(WeightScoring):
    """α-entmax with α = 1 + sigmoid(a), between softmax and sparsemax, trained in each head.

    Attributes:
        alpha_init: initial α, in (1, 2).
    """

    name: ClassVar[str] = "alpha_entmax"
    source: ClassVar[str] = "Correia, Niculae, Martins: Adaptively Sparse Transformers, arXiv 1909.00015"

    alpha_init: float = 1.5

    def __post_init__(self) -> None:
        if not 1 < self.alpha_init < 2:
            raise ValueError(f"alpha_init must be between 1 and 2, got {self.alpha_init}.")

    def initial(self) -> dict[str, float]:
        """Train a."""
        return {"a": math.log((self.alpha_init - 1) / (2 - self.alpha_init))}

    def weights(self, scores: Tensor, allowed: Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor:
        """Map by α-entmax, by bisection."""
        alpha = (1 + parameters["a"].sigmoid()).expand(*scores.shape[:-1], 1)
        # Each step halves the interval of the threshold, which is 1 at first.
        steps = math.ceil(-math.log2(torch.finfo(scores.dtype).eps)) + 2
        weights: Tensor = _entmax().entmax_bisect(_hide(scores, allowed), alpha, dim=-1, n_iter=steps)
        return weights


def _hide(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Put masked scores so far below the largest allowed one that they get weight 0; -inf would make NaN."""
    if allowed is None:
        return scores
    largest = scores.detach().masked_fill(~allowed, -torch.inf).amax(-1, keepdim=True)
    largest = largest.where(largest.isfinite(), 0)  # nothing is allowed
    return torch.where(allowed, scores, largest - 1e4)


@functools.cache
def _entmax() -> ModuleType:
    try:
        import entmax
    except ImportError as error:
        raise ImportError('This attention needs the entmax package: pip install "ssa_hf[rivals]".') from error
    module: ModuleType = entmax
    return module
