"""Attention masks as Transformers hands them to the scorings."""

from typing import Any

from torch import Tensor
from transformers.masking_utils import sdpa_mask


def boolean_mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """Make SDPA's boolean masks, (batch, 1, query length, key length), True = attend; None if ``is_causal`` says it.

    SDPA also skips the mask when a static cache is filled for the first time, counting on its top-left
    alignment of ``is_causal``. Ours is bottom-right, so that mask is kept.
    """
    skip = allow_is_causal_skip and (q_length == 1 or q_length == kv_length)
    return sdpa_mask(q_length=q_length, kv_length=kv_length, allow_is_causal_skip=skip, **kwargs)
