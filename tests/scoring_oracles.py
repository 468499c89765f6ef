"""Float64 oracles of the scorings, written from their formulas, a query at a time."""

import math

import torch
from scipy.optimize import brentq
from torch import Tensor


def weights_of(name: str, x: Tensor, values: dict[str, float], options: dict) -> Tensor:
    """Return the weights of one query's visible keys, of scores x (keys,), not empty."""
    x, keys = x.double(), len(x)
    if name == "ssa":
        w = (1 + values["b"] * x.abs()) ** (x.sign() * values["n"])
        return w / w.sum()
    if name == "softmax":
        return _softmax(x)
    if name == "temperature":
        return _softmax(x / math.exp(values["log_temperature"]))
    if name == "scalable_softmax":
        return _softmax(x * values["s"] * math.log(keys))
    if name == "sigmoid":
        return 1 / (1 + torch.exp(-x) * keys)
    if name == "sa_softmax":
        if not options["normalised"]:
            return x * _softmax(x)
        low, high = min(0.0, x.min().item()), max(0.0, x.max().item())
        return (x - low) / (high - low) * _softmax(x)
    alpha = {"sparsemax": 2.0, "entmax15": 1.5}.get(name) or 1 + 1 / (1 + math.exp(-values["a"]))
    return _entmax(x, alpha)


def _softmax(x: Tensor) -> Tensor:
    w = torch.exp(x - x.max())
    return w / w.sum()


def _entmax(x: Tensor, alpha: float) -> Tensor:
    """[(α - 1)x - τ]_+^(1/(α - 1)) with τ such that the weights sum to 1 (Peters et al., 2019)."""

    def weights(tau: float) -> Tensor:
        return ((alpha - 1) * x - tau).clamp(min=0) ** (1 / (alpha - 1))

    highest = ((alpha - 1) * x).max().item()
    tau = brentq(lambda t: weights(t).sum().item() - 1, highest - 1 - 1e-9, highest, xtol=1e-15, rtol=1e-14)
    return weights(tau)


def cosformer_weights(query: Tensor, keys: Tensor, distances: Tensor, max_length: int) -> Tensor:
    """Return the weights of one query's visible keys, (keys, head_dim), at distances (keys,)."""
    w = (keys.double().clamp(min=0) @ query.double().clamp(min=0)) * torch.cos(math.pi / 2 * distances / max_length)
    return w / max(w.sum().item(), 1e-6)


def attention(name: str, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, values: dict, options: dict):
    """Return output and weights; ``allowed`` is (batch, query_length, key_length), values are lists over heads."""
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    weights = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            own = key[b, h // (heads // key.shape[1])]
            for i in range(queries):
                visible = allowed[b, i].nonzero()[:, 0]
                if not len(visible):
                    continue
                if name == "cosformer":
                    distances = (i + keys - queries - visible).double()
                    row = cosformer_weights(query[b, h, i], own[visible], distances, options["max_length"])
                else:
                    x = own[visible].double() @ query[b, h, i].double() / head_dim**0.5
                    row = weights_of(name, x, {key: v[h] for key, v in values.items()}, options)
                weights[b, h, i, visible] = row
    repeated = value.double().repeat_interleave(heads // value.shape[1], 1)
    return weights @ repeated, weights
