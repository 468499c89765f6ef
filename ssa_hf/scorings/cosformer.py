"""cosFormer: linear attention with a cosine in the distance."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ssa_hf.functional import attend_by_weights
from ssa_hf.kernels.linear import linear_attention
from ssa_hf.parameters import HeadParameters
from ssa_hf.scorings.base import Scoring

# Of a row's weights; as in the authors' code.
_SMALLEST_SUM = 1e-6


@dataclass(frozen=True)
class CosFormer(Scoring):
    """Weights relu(q_i)·relu(k_j) cos(π/2 · (i - j) / M), normalised; nothing is trained.

    Time and memory are O(length), causal or not, as the cosine of a difference splits into products. Where attention
    weights are asked for, dropped out, or few (a step of generation, whose keys come from the cache), they are formed.

    Attributes:
        max_length: M, the longest sequence. It is the same in training and in use, with a cache and without.
    """

    name: ClassVar[str] = "cosformer"
    source: ClassVar[str] = "Qin et al.: cosFormer: Rethinking Softmax in Attention, arXiv 2202.08791"
    mask_dim: ClassVar[int] = 2

    max_length: int = 2048

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {self.max_length}.")

    def parameters(self, num_heads: int, device: torch.device) -> HeadParameters:
        """Make no parameters."""
        return HeadParameters(num_heads, self, {}, device)

    @staticmethod
    def mask(*, mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None, **sizes: Any) -> Any:
        """Return which keys are no padding, (batch, key length), None if all.

        Raises:
            ValueError: for masks beyond causality and padding, and for static caches.
        """
        if mask_function not in (causal_mask_function, bidirectional_mask_function):
            raise ValueError(
                '"cosformer" masks the future and padding alone: no sliding windows, packed sequences or custom masks. '
                "Pad instead of packing, or choose another attention for this model."
            )
        seen = int(sizes.get("kv_offset", 0)) + sizes["kv_length"]
        if mask_function is causal_mask_function and int(sizes.get("q_offset", 0)) + sizes["q_length"] != seen:
            raise ValueError('"cosformer" needs a dynamic cache: generate with cache_implementation="dynamic".')
        return None if attention_mask is None else attention_mask[:, -sizes["kv_length"] :].bool()

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
        """Attend in linear time; ``scale`` cancels out."""
        if softcap is not None:
            raise ValueError('"cosformer" has no scores that a softcap could bound: choose another attention.')
        query_length, key_length = query.shape[-2], key.shape[-2]
        if key_length > self.max_length:
            raise ValueError(
                f'"cosformer" was built for sequences up to {self.max_length}, got {key_length}: set '
                f"config.{self.options_key()} = {{'max_length': ...}} before the model is built."
            )
        dtype = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            query = self._features(query.to(dtype), key_length - query_length)
            key = self._features(key.to(dtype), 0)
            if dropout_p > 0 or return_weights or sliding_window is not None or query_length < key_length:
                return attend_by_weights(
                    query,
                    key,
                    value,
                    _normalise,
                    attn_mask=None if attn_mask is None else attn_mask[:, None, None],
                    is_causal=is_causal,
                    sliding_window=sliding_window,
                    scale=1.0,
                    dropout_p=dropout_p,
                    return_weights=return_weights,
                )
            if attn_mask is not None:
                key = key * attn_mask[:, None, :, None]
            return linear_attention(query, key, value.to(dtype), is_causal, _SMALLEST_SUM).to(value.dtype), None

    def _features(self, tensor: Tensor, offset: int) -> Tensor:
        """Return features whose products are relu(q_i)·relu(k_j) cos(π/2 · (i - j) / max_length)."""
        positions = torch.arange(offset, offset + tensor.shape[-2], dtype=tensor.dtype, device=tensor.device)
        angles = (positions * (math.pi / 2 / self.max_length))[:, None]
        positive = tensor.relu()
        return torch.cat([positive * angles.cos(), positive * angles.sin()], -1)


def _normalise(scores: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is not None:
        scores = scores.masked_fill(~allowed, 0)
    return scores / scores.sum(-1, keepdim=True).clamp(min=_SMALLEST_SUM)
