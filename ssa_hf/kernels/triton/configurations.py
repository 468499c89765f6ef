"""Block sizes of the kernels: a few candidates each, which Triton times on the GPU at hand.

It does so at the first call for a data type and head dimension, and keeps the winner on disk (in ~/.triton). Other
lengths use the same: timing each anew would stall training on batches of varying length. A CUDA graph can't be
captured while that goes on: call once before, as torch.compile does.
"""

import functools
import os
from typing import Any

import torch
import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Fits everywhere: for float32, which has no tensor cores here, and head dimensions over 128 it is the only one.
SMALL = (32, 32, 4, 2)
#: (queries, keys, warps, stages) of a block. Chosen among what ptxas fits into registers for sm_90 with little or no
#: spilling at head dimensions 64 and 128.
CANDIDATES = {
    "forward": ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), SMALL),
    "query": ((64, 32, 4, 2), (64, 64, 4, 2), (128, 32, 8, 2), (128, 64, 8, 2), SMALL),
    "key": ((32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 2), SMALL),
}
_IN_TESTS = (16, 32, 4, 2)
#: Smallest number of queries a block may have: how many partial sums a head needs at most follows from it.
FEWEST_QUERIES = 16 if INTERPRETED else 32


def tuned(kernel: Any, name: str, reset_to_zero: list[str] | None = None) -> Any:
    """Let Triton choose among the candidates of a kernel; in the interpreter, take one that gives several blocks.

    Args:
        kernel: function decorated with ``triton.jit``.
        name: its key in ``CANDIDATES``.
        reset_to_zero: arguments that the blocks of one candidate may leave with the values of another.
    """
    sizes = [_IN_TESTS] if INTERPRETED else CANDIDATES[name]
    return triton.autotune(
        configs=[configuration(*size) for size in sizes],
        key=["head_dim", "value_dim"],  # and, always, the data types
        reset_to_zero=reset_to_zero,
        prune_configs_by={"early_config_prune": functools.partial(_prune, name)},
        cache_results=True,
    )(kernel)


def configuration(queries: int, keys: int, warps: int, stages: int) -> triton.Config:
    """Return block sizes in Triton's form."""
    return triton.Config({"BLOCK_QUERIES": queries, "BLOCK_KEYS": keys}, num_warps=warps, num_stages=stages)


def shared_memory(name: str, config: triton.Config, dim: int, value_dim: int, element_size: int) -> int:
    """Return the bytes of shared memory that a block needs at most.

    They hold what stays (queries; with output gradients; keys and values, and weights), what streams by in stages, and
    a few numbers a query.
    """
    queries, keys = config.kwargs["BLOCK_QUERIES"], config.kwargs["BLOCK_KEYS"]
    both = dim + value_dim
    elements = {
        "forward": queries * dim + config.num_stages * keys * both,
        "query": queries * both + config.num_stages * keys * both,
        "key": keys * both + config.num_stages * queries * both + queries * keys,
    }
    return element_size * elements[name] + 2048


def fitting(
    name: str, configs: list[triton.Config], dim: int, value_dim: int, element_size: int, limit: int
) -> list[triton.Config]:
    """Return the configurations worth timing, at least one.

    Args:
        name: kernel.
        configs: its candidates.
        dim: padded head dimension of queries and keys.
        value_dim: padded head dimension of values.
        element_size: bytes of an element.
        limit: bytes of shared memory a block may have.
    """
    if element_size == 4 or max(dim, value_dim) > 128:
        return [config for config in configs if config == configuration(*SMALL)] or configs[:1]
    fits = [config for config in configs if shared_memory(name, config, dim, value_dim, element_size) <= limit]
    return fits or [configuration(*SMALL)]


def _prune(name: str, configs: list[triton.Config], arguments: dict[str, Any], **meta: Any) -> list[triton.Config]:
    query = arguments["query"]
    return fitting(
        name, configs, meta["BLOCK_DIM"], meta["BLOCK_VALUE_DIM"], query.element_size(), _limit(query.device)
    )


def _limit(device: torch.device) -> int:
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])
