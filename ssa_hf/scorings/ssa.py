"""Scaled Signed Averaging: its options, kept as a plain dict in ``config.ssa`` and saved in config.json."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ssa_hf.functional import attend
from ssa_hf.norm import SSANorm
from ssa_hf.scorings.base import Scoring


@dataclass(frozen=True)
class SSAConfig(Scoring):
    """Weights (1 + b|x|)^(sgn(x)·n), normalised.

    How the attention layers of a model score: initial b and n, and which of them are trained.

    Attributes:
        n_init: initial exponent n, at least 1.
        b_init: initial slope b, above 0.
        learn_n: train n; otherwise it stays at ``n_init``.
        learn_b: train b; otherwise it stays at ``b_init``.
        per_head: one (b, n) per query head if true, one per layer otherwise.

    Raises:
        ValueError: if a value is out of range.
    """

    name: ClassVar[str] = "ssa"
    source: ClassVar[str] = "Naim, Bhar, Bolte, Asher: Scaled Signed Averaging, arXiv 2508.14685"

    n_init: float = 1.5
    b_init: float = 0.8
    learn_n: bool = True
    learn_b: bool = True
    per_head: bool = True

    def __post_init__(self) -> None:
        for name in ("n_init", "b_init"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"SSA option {name} must be a finite number, got {value!r}.")
        for name in ("learn_n", "learn_b", "per_head"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"SSA option {name} must be true or false, got {getattr(self, name)!r}.")
        if self.n_init < 1:
            raise ValueError(f"SSA needs n_init >= 1, got {self.n_init}.")
        if self.n_init == 1 and self.learn_n:
            raise ValueError(
                "n_init = 1 is the lower bound of n, where its gradient vanishes: "
                "start a trained n a little above (say 1.05), or set learn_n=False."
            )
        if self.b_init <= 0:
            raise ValueError(f"SSA needs b_init > 0, got {self.b_init}.")

    @classmethod
    def options_key(cls) -> str:
        """Return "ssa"."""
        return "ssa"

    @classmethod
    def from_any(cls, options: "SSAConfig | Mapping[str, Any] | str | None") -> "SSAConfig":
        """Read options in any form that ``config.ssa`` may hold.

        Args:
            options: an ``SSAConfig``, a mapping of its fields (optionally with a ``preset`` that the
                other fields override), the name of a preset, or None for the defaults.

        Raises:
            ValueError: for an unknown preset, an unknown field or a value out of range.
        """
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        if isinstance(options, str):
            return _preset(options)
        if not isinstance(options, Mapping):
            raise ValueError(f"config.ssa must be a dict, a preset name or an SSAConfig, got {type(options).__name__}.")
        fields = dict(options)
        base = _preset(fields.pop("preset")) if "preset" in fields else cls()
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(
                f"Unknown SSA option(s) {', '.join(unknown)} in config.ssa; known: preset, {', '.join(sorted(known))}."
            )
        return dataclasses.replace(base, **fields)

    def parameters(self, num_heads: int, device: torch.device) -> SSANorm:
        """Make b and n."""
        return SSANorm(num_heads, self, device)

    def attend(
        self, parameters: nn.Module, query: Tensor, key: Tensor, value: Tensor, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend by the fastest backend that can."""
        b, n = parameters()
        return attend(query, key, value, b, n, **arguments)


#: The settings of the authors' experiments, by name.
PRESETS: dict[str, SSAConfig] = {
    # 114M Nemotron decoder on FineWeb: n trained, b fixed, one pair per layer.
    "nemotron": SSAConfig(n_init=1.5, b_init=0.8, learn_n=True, learn_b=False, per_head=False),
    # BabyBERTa on AO-CHILDES: both fixed.
    "ssa-1.5": SSAConfig(n_init=1.5, b_init=0.8, learn_n=False, learn_b=False),
    "ssa-2": SSAConfig(n_init=2.0, b_init=0.8, learn_n=False, learn_b=False),
    # nanoGPT fork: n = exp(0.4) and b = e, both trained.
    "gpt2": SSAConfig(n_init=math.exp(0.4), b_init=math.e, learn_n=True, learn_b=True),
}


def _preset(name: str) -> SSAConfig:
    try:
        return PRESETS[name]
    except (KeyError, TypeError):
        raise ValueError(f"Unknown SSA preset {name!r}; known: {', '.join(PRESETS)}.") from None
