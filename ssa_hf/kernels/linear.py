"""Linear attention in plain PyTorch: weights q·k of non-negative features, normalised, in time O(length)."""

import torch
from torch import Tensor

#: Queries and keys of a block, within which weights are formed.
BLOCK = 128


def linear_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, smallest_sum: float) -> Tensor:
    """Average the values with weights query·key.

    Args:
        query: features (batch, query_heads, query_length, features), all products with keys at least 0.
        key: (batch, key_heads, key_length, features), 0 where masked; key_heads divides query_heads.
        value: (batch, key_heads, key_length, value_dim).
        is_causal: hide later keys; needs as many queries as keys.
        smallest_sum: weights are divided by their sum, and by this if it is larger.

    Returns:
        (batch, query_heads, query_length, value_dim) in the dtype of the inputs.
    """
    batch, heads, length, features = query.shape
    groups = key.shape[1]
    query = query.view(batch, groups, heads // groups, length, features)
    # With ones beside the values, the sums of weights come out of the same products.
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    summed = _causal(query, key, value) if is_causal else query @ (key.mT @ value)[:, :, None]
    output = summed[..., :-1] / summed[..., -1:].clamp(min=smallest_sum)
    return output.reshape(batch, heads, length, -1)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sum over earlier blocks by a running state, and within a block over the weights themselves."""
    length = query.shape[-2]
    fill = -length % BLOCK
    query, key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, fill)) for tensor in (query, key, value))
    query = query.unflatten(-2, (-1, BLOCK))  # (batch, groups, heads of a group, blocks, BLOCK, features)
    key, value = key.unflatten(-2, (-1, BLOCK))[:, :, None], value.unflatten(-2, (-1, BLOCK))[:, :, None]
    states = key.mT @ value
    before = torch.nn.functional.pad(states.cumsum(3)[:, :, :, :-1], (0, 0, 0, 0, 1, 0))
    summed = query @ before + (query @ key.mT).tril() @ value
    return summed.flatten(3, 4)[..., :length, :]
