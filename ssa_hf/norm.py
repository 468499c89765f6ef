"""SSANorm: the trained b and n of one attention module."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ssa_hf.parameters import ScoringParameters

if TYPE_CHECKING:
    from ssa_hf.scorings.ssa import SSAConfig

# Above KNEE over its bound a stored value is the value itself, so that an optimiser moves it
# one to one; below, it decays exponentially towards the bound and never crosses it.
KNEE = 2.0**-4
# exp(-80) is still a normal float32: b stays above 0 whatever the optimiser does.
_LOWEST_EXPONENT = -80.0


class SSANorm(ScoringParameters):
    """Hold b > 0 and n >= 1 of one attention module, one pair per query head or one per module.

    ``raw_b`` and ``raw_n`` are what is stored and trained, unconstrained.
    A value that is not trained is a persistent buffer, which no later ``requires_grad_(True)`` and
    no ``from_pretrained`` (it makes every parameter trainable) can set in motion.

    Args:
        num_heads: query heads of the attention module.
        config: initial values and which of them are trained.
        device: where to create the parameters.
    """

    raw_b: Tensor
    raw_n: Tensor

    def __init__(self, num_heads: int, config: "SSAConfig", device: torch.device | str | None = None) -> None:
        super().__init__(num_heads, config)
        size = num_heads if config.per_head else 1
        for name, learn in (("raw_b", config.learn_b), ("raw_n", config.learn_n)):
            value = torch.empty(size, dtype=torch.float32, device=device)
            if learn:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set b and n to their configured initial values, unless a checkpoint has just set them."""
        init.constant_(self.raw_b, _to_raw(self.config.b_init, bound=0.0))
        init.constant_(self.raw_n, _to_raw(self.config.n_init, bound=1.0))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return (b, n). Attention calls this rather than reading the properties, see :class:`HeadParameters`."""
        return self.b, self.n

    def values(self) -> dict[str, Tensor]:
        """Return b and n, one for each head or one for all."""
        return {"b": _from_raw(self.raw_b, bound=0.0), "n": _from_raw(self.raw_n, bound=1.0)}

    @property
    def b(self) -> Tensor:
        """Slope b > 0 of every query head, float32, shape (num_heads,)."""
        return _from_raw(self.raw_b, bound=0.0).expand(self.num_heads)

    @property
    def n(self) -> Tensor:
        """Exponent n >= 1 of every query head, float32, shape (num_heads,)."""
        return _from_raw(self.raw_n, bound=1.0).expand(self.num_heads)


def _from_raw(raw: Tensor, bound: float) -> Tensor:
    knee = bound + KNEE
    low = raw.clamp(knee + KNEE * _LOWEST_EXPONENT, knee)
    # The exponential is tangent to the identity at the knee: the larger one is the right one on either side.
    return torch.maximum(raw, KNEE * ((low - knee) / KNEE).exp() + bound)


def _to_raw(value: float, bound: float) -> float:
    """Invert _from_raw: exactly above the knee, to float32 rounding below it."""
    knee = bound + KNEE
    if value > knee:
        return value
    distance = torch.tensor((value - bound) / KNEE, dtype=torch.float64)
    return knee + KNEE * float(distance.log().clamp(min=_LOWEST_EXPONENT))
