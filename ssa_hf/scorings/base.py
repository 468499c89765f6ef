"""What a scoring is: options, trained parameters, and a function from raw scores to weights."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ssa_hf.functional import attend_by_weights
from ssa_hf.masks import boolean_mask
from ssa_hf.parameters import HeadParameters, ScoringParameters


@dataclass(frozen=True)
class Scoring(ABC):
    """A way to turn raw attention scores into weights, chosen by ``attn_implementation=name``.

    A subclass is a frozen dataclass. Its fields are the options: numbers, true or false, kept as a plain dict in the
    model's config under ``options_key`` and saved with it.

    Attributes:
        name: what ``attn_implementation`` calls it.
        source: the paper it comes from.
        mask_dim: 4 for a mask of queries and keys, 2 for one that tells of padding alone, (batch, key length).
    """

    name: ClassVar[str]
    source: ClassVar[str]
    mask_dim: ClassVar[int] = 4

    @classmethod
    def options_key(cls) -> str:
        """Return the attribute of the model's config that holds the options."""
        return f"{cls.name}_attention"

    @classmethod
    def attribute(cls) -> str:
        """Return the name of the attention module's submodule that holds the trained parameters."""
        return f"{cls.name}_norm"  # Trainer keeps weight decay off names that end so

    @classmethod
    def from_any(cls, options: Any) -> Self:
        """Read options in any form that a config may hold: None, a mapping of fields, or an instance.

        Raises:
            ValueError: for an unknown field or a value out of range.
        """
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise ValueError(f"config.{cls.options_key()} must be a dict, got {type(options).__name__}.")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(options) - known):
            raise ValueError(
                f"Unknown option(s) {', '.join(unknown)} in config.{cls.options_key()}; "
                f"known: {', '.join(sorted(known)) or 'none'}."
            )
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a dict that JSON can hold."""
        return dataclasses.asdict(self)

    @abstractmethod
    def parameters(self, num_heads: int, device: torch.device) -> ScoringParameters:
        """Make the module that holds what is trained in an attention module of so many query heads."""

    @abstractmethod
    def attend(
        self,
        parameters: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None,
        is_causal: bool,
        sliding_window: int | None,
        scale: float | None,
        dropout_p: float,
        softcap: float | None,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as :func:`ssa_hf.ssa_attention` does.

        Args:
            parameters: the module that :meth:`parameters` made.
            query: (batch, query_heads, query_length, head_dim).
            key: (batch, key_heads, key_length, head_dim).
            value: (batch, key_heads, key_length, value_dim).
            attn_mask: what :meth:`mask` made.
            is_causal: hide later keys, aligned bottom-right; False with a 4-D mask, which says it all.
            sliding_window: with ``is_causal``, keys that a query sees at most.
            scale: factor on query·key, 1/sqrt(head_dim) by default.
            dropout_p: chance of dropping a weight.
            softcap: bound of the scaled scores.
            return_weights: form the weights.

        Returns:
            The output (batch, query_heads, query_length, value_dim), and if asked the weights before dropout (batch,
            query_heads, query_length, key_length).
        """

    @staticmethod
    def mask(**arguments: Any) -> Tensor | None:
        """Make the attention mask; arguments are those of Transformers' mask functions."""
        return boolean_mask(**arguments)


@dataclass(frozen=True)
class WeightScoring(Scoring):
    """A scoring given by its weights as a function of the scores, in plain PyTorch and memory O(length²).

    A subclass implements :meth:`weights`, and :meth:`initial` if it trains something.
    """

    def initial(self) -> dict[str, float]:
        """Return the initial values of what is trained, one for each query head under each name."""
        return {}

    @abstractmethod
    def weights(self, scores: Tensor, allowed: Tensor | None, parameters: Mapping[str, Tensor]) -> Tensor:
        """Turn scores into weights.

        Args:
            scores: (batch, query_heads, query_length, key_length), scaled, float32 or float64. Those of masked keys
                are finite and mean nothing.
            allowed: where a query may attend to a key, broadcastable to ``scores``; None for everywhere. Weights
                elsewhere are set to 0 afterwards.
            parameters: the trained values by name, (query_heads, 1, 1) each, in the dtype of ``scores``.

        Returns:
            Weights in the shape of ``scores``, finite even where nothing is allowed.
        """

    def parameters(self, num_heads: int, device: torch.device) -> ScoringParameters:
        """Make one trained value for each query head under each name of :meth:`initial`."""
        return HeadParameters(num_heads, self, self.initial(), device)

    def attend(
        self, parameters: nn.Module, query: Tensor, key: Tensor, value: Tensor, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with :meth:`weights`."""
        values = parameters()

        def weigh(scores: Tensor, allowed: Tensor | None) -> Tensor:
            shaped = {name: value.to(scores.dtype).view(-1, 1, 1) for name, value in values.items()}
            return self.weights(scores, allowed, shaped)

        return attend_by_weights(query, key, value, weigh, **arguments)


def count_keys(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Return how many keys each query may attend to, at least 1, broadcastable to (..., query_length, 1).

    Unlike the length of the sequence, it is the same with padding, and with a cache as without.
    """
    if allowed is None:
        return torch.tensor(scores.shape[-1], dtype=scores.dtype, device=scores.device)
    return allowed.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
