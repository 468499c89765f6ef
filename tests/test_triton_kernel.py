"""The Triton kernel: interpreted on the CPU in a process of its own, compiled where there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ssa_hf
from tests.oracle import oracle, relative_rms
from tests.test_attention import make

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_interpreted")


def test_interpreted():
    """Run the battery of test_attention.py and the tests below under TRITON_INTERPRET=1."""
    pytest.importorskip("triton", reason='Triton is not installed: pip install "ssa_hf[triton]"')
    if INTERPRETED:
        pytest.skip("this is that process")
    command = [sys.executable, "-m", "pytest", "-x", "tests/test_attention.py", "tests/test_triton_kernel.py"]
    process = subprocess.run(
        command,
        cwd=Path(__file__).resolve().parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-3000:]
    assert " passed" in process.stdout


@interpreted_only
def test_the_cpu_backend_says_that_it_is_replaced():
    with pytest.raises(ValueError, match="under TRITON_INTERPRET=1"):
        ssa_hf.ssa_attention(*make(), backend="cpu")


def test_refused_on_a_device_it_does_not_run_on():
    if INTERPRETED:
        pytest.skip("interpreted, it runs on CPUs")
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="does not run on cpu"):
        ssa_hf.ssa_attention(*make(), backend="triton")


@interpreted_only
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 700])
def test_decoding_splits_the_keys(is_causal, window):
    """One query on 1,100 keys: the parts of its keys, put together, are the whole."""
    from ssa_hf.kernels import triton

    query, key, value, b, n = (t.detach() for t in make(batch=1, heads=2, groups=1, q_len=1, k_len=1100))
    assert triton._splits(2, 1100, query.device) == 4
    allowed = torch.rand(1, 1, 1, 1100, generator=torch.Generator().manual_seed(0)) > 0.5
    allowed[..., :300] = False  # a part with nothing to see
    for mask in (None, allowed):
        sees = torch.ones(1, 1100, dtype=torch.bool)
        if window is not None and is_causal:
            sees[:, : 1100 - window] = False
        output = ssa_hf.ssa_attention(
            query,
            key,
            value,
            b,
            n,
            attn_mask=mask,
            is_causal=is_causal,
            sliding_window=window if is_causal else None,
            backend="triton",
        )
        expected = oracle(query, key, value, b, n, allowed=sees if mask is None else mask & sees)
        assert relative_rms(output, expected) < 1e-6


def compile_for_hopper(kernel, dim: int, sizes: dict[str, int]):
    """Compile a kernel ahead of time for sm_90, with no GPU: bfloat16, causal, contiguous rows."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = dict(sizes)
    warps = options.pop("num_warps")
    constants = dict(CAUSAL=True, WINDOW=False, MASK=0, DOCUMENTS=False, DROPOUT=False, PRECISION="tf32", FAST=True)
    constants |= dict(options, BLOCK_DIM=dim, BLOCK_VALUE_DIM=dim, SPLITS=1)
    pointers = {
        "b": "*fp32",
        "n": "*fp32",
        "normaliser": "*fp32",
        "delta": "*fp32",
        "grad_b": "*fp32",
        "grad_n": "*fp32",
    }
    pointers |= {"mask": "*u8", "documents": "*i32", "seed": "*i64"}
    halves = ("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value")
    pointers |= dict.fromkeys(halves, "*bf16")
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        contiguous = name.startswith("stride_") and name.endswith("d")
        if name in constants or contiguous:
            signature[name], constexprs[name] = "constexpr", constants.get(name, 1)
        elif name in pointers:
            signature[name] = pointers[name]
        else:
            signature[name] = "fp32" if name in ("scale", "dropout_p") else "i32"
        if name in pointers or (name.startswith("stride_") and not contiguous):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 2})


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["forward", "query", "key"])
def test_compiles_for_sm_90_with_fast_approximations(name, dim):
    """One lg2.approx and one ex2.approx an element, tensor cores, and shared memory for two blocks a processor."""
    pytest.importorskip("triton")
    from ssa_hf.kernels.triton import _BLOCKS, backward, forward

    kernel = {"forward": forward.forward_kernel, "query": backward.query_kernel, "key": backward.key_kernel}[name]
    queries, keys, warps = _BLOCKS[name]
    compiled = compile_for_hopper(kernel, dim, {"BLOCK_QUERIES": queries, "BLOCK_KEYS": keys, "num_warps": warps})
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    # Two copies of the loop, with and without mask work, each with one logarithm an element a thread.
    elements = 2 * queries * keys // (32 * warps)
    assert ptx.count("lg2.approx") == elements
    assert elements <= ptx.count("ex2.approx") <= elements + queries
    assert compiled.metadata.shared <= 113 * 1024
