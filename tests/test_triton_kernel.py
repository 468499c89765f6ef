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
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
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
        # What a launch finds out: multiples of 16 can be loaded in wide words, and so in stages, ahead of their use.
        if name in pointers or name.endswith("_dim") or (name.startswith("stride_") and not contiguous):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


@interpreted_only
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("name", ["forward", "query", "key"])
def test_every_candidate_of_the_tuner_computes_the_same(monkeypatch, name, dropout_p):
    """Lengths that leave rests, several blocks; dropout falls on the same weights whatever the blocks."""
    import triton as compiler

    from ssa_hf.kernels import triton
    from ssa_hf.kernels.triton.configurations import CANDIDATES, configuration

    def run():
        leaves = make(heads=2, groups=1, q_len=150, k_len=170)
        torch.manual_seed(0)
        output = ssa_hf.ssa_attention(*leaves, is_causal=True, dropout_p=dropout_p, backend="triton")
        output.square().sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    expected = run()
    kernel = getattr(triton, f"_{name}")
    for sizes in CANDIDATES[name]:
        alone = compiler.autotune(configs=[configuration(*sizes)], key=[])(kernel.fn)
        monkeypatch.setattr(triton, f"_{name}", alone)
        for got, want in zip(run(), expected, strict=True):
            assert relative_rms(got, want) < 2e-6, sizes


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes one configuration")
@pytest.mark.parametrize("name", ["forward", "query", "key"])
def test_candidates_are_pruned_by_shared_memory(name):
    pytest.importorskip("triton")
    from ssa_hf.kernels.triton.configurations import CANDIDATES, FEWEST_QUERIES, SMALL, configuration, fitting

    candidates = [configuration(*sizes) for sizes in CANDIDATES[name]]
    small = configuration(*SMALL)
    assert min(config.kwargs["BLOCK_QUERIES"] for config in candidates) >= FEWEST_QUERIES
    assert fitting(name, candidates, 64, 64, element_size=2, limit=227 * 1024) == candidates
    half = fitting(name, candidates, 128, 128, element_size=2, limit=99 * 1024)
    assert small in half
    assert 1 < len(half) < len(candidates)
    for hard in ((256, 64, 2, 227 * 1024), (64, 64, 4, 227 * 1024), (128, 128, 2, 1024)):
        assert fitting(name, candidates, *hard) == [small]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("name", "candidate"),
    [(name, 0) for name in ("forward", "query", "key")]
    + [
        pytest.param(name, candidate, marks=pytest.mark.slow)
        for name, count in (("forward", 5), ("query", 5), ("key", 4))
        for candidate in range(1, count)
    ],
)
def test_compiles_for_sm_90_with_fast_approximations(name, candidate, dim):
    """One lg2.approx and one ex2.approx an element, tensor cores, loads ahead of use, shared memory as foretold."""
    pytest.importorskip("triton")
    from ssa_hf.kernels.triton import backward, forward
    from ssa_hf.kernels.triton.configurations import CANDIDATES, SMALL, configuration, shared_memory

    kernel = {"forward": forward.forward_kernel, "query": backward.query_kernel, "key": backward.key_kernel}[name]
    queries, keys, warps, stages = CANDIDATES[name][candidate]
    sizes = {"BLOCK_QUERIES": queries, "BLOCK_KEYS": keys, "num_warps": warps, "num_stages": stages}
    compiled = compile_for_hopper(kernel, dim, sizes)
    ptx = compiled.asm["ptx"]
    assert ("mma.sync" if CANDIDATES[name][candidate] == SMALL else "wgmma.mma_async") in ptx
    assert "cp.async" in ptx
    # Two copies of the loop, with and without mask work, each with one logarithm an element a thread.
    elements = 2 * queries * keys // (32 * warps)
    assert ptx.count("lg2.approx") == elements
    assert elements <= ptx.count("ex2.approx") <= elements + queries
    assert compiled.metadata.shared <= shared_memory(name, configuration(*CANDIDATES[name][candidate]), dim, dim, 2)
