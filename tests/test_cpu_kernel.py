"""What the fused CPU kernel must do beyond the battery of test_attention.py."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ssa_hf.cli
from ssa_hf.kernels import blocked, cpu, op
from tests.conftest import tiny_model
from tests.oracle import oracle, relative_rms
from tests.test_attention import check, make, outputs_and_gradients

REPOSITORY = Path(__file__).resolve().parents[1]


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_other_instruction_sets_pass_the_battery(capability):
    """The same code compiled for 8 and for 4 floats a register."""
    command = [sys.executable, "-m", "pytest", "-x", "-k", "cpu and not random", "tests/test_attention.py"]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    process = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-2000:]
    assert " passed" in process.stdout


@pytest.mark.parametrize(("b", "n"), [(0.8, 1.5), (2.718, 1.49), (0.01, 7.0), (3.0, 1.0)])
def test_weights_are_good_to_float_precision(b, n):
    """Two keys, of scores x and 0: the ratio of their weights is w(x)."""
    x = torch.logspace(-8, 2, 2001)
    x = torch.cat((-x, x))
    keys = torch.tensor([[1.0], [0.0]]).expand(1, 1, 2, 1)
    weights = ssa_hf.ssa_attention(x.view(1, 1, -1, 1), keys, torch.eye(2).view(1, 1, 2, 2), b, n, scale=1.0)[0, 0]
    got = weights[:, 0].double() / weights[:, 1].double()
    wide = x.double()
    want = (1 + torch.tensor(b).double() * wide.abs()) ** (wide.sign() * torch.tensor(n).double())
    error = (got / want - 1).abs() / torch.maximum(want.log().abs(), torch.ones(()))
    assert error.max() < 6e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_precision_number_passes_unchanged(dtype):
    """With one key the output is its value: reads and writes 65,536 bit patterns."""
    value = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(-1, 1, 1, 1)
    zeros = torch.zeros_like(value)
    output = ssa_hf.ssa_attention(zeros, zeros, value, 0.8, 1.5, backend="cpu")
    finite = value.isfinite()
    assert torch.equal(output[finite], value[finite])
    assert (output[value.isnan()].isnan()).all()


def test_rounding_to_half_precision():
    generator = torch.Generator().manual_seed(0)
    inputs = [tensor.detach() for tensor in make(batch=4, q_len=40, k_len=40)]
    for dtype in (torch.float16, torch.bfloat16):
        half = [tensor.to(dtype) for tensor in inputs[:3]]
        wide = ssa_hf.ssa_attention(*(tensor.float() for tensor in half), *inputs[3:], backend="cpu")
        assert torch.equal(ssa_hf.ssa_attention(*half, *inputs[3:], backend="cpu"), wide.to(dtype))
    tiny = torch.rand(2, 1, 5, 8, generator=generator) * 1e-6  # subnormal in float16
    zeros = torch.zeros(2, 1, 5, 8)
    wide = ssa_hf.ssa_attention(zeros, zeros, tiny.half().float(), 0.8, 1.5)
    half = ssa_hf.ssa_attention(zeros.half(), zeros.half(), tiny.half(), 0.8, 1.5, backend="cpu")
    torch.testing.assert_close(half.float(), wide, atol=6e-8, rtol=0)


@pytest.mark.parametrize("shape", [dict(q_len=300, k_len=300), dict(q_len=130, k_len=517, heads=6, groups=2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_several_blocks(shape, is_causal):
    check(make(**shape), 1e-6, "cpu", is_causal=is_causal)


def test_packed_documents_over_several_blocks():
    ids = torch.arange(300).repeat(2, 1) // 110
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    for causal in (False, True):
        check(
            make(q_len=300, k_len=300),
            1e-6,
            "cpu",
            document_ids=ids,
            is_causal=causal,
            oracle_arguments=dict(allowed=same, is_causal=causal),
        )


@pytest.mark.parametrize("dim", [1, 7, 96, 128, 200, 256])
def test_head_dimensions(dim):
    check(make(batch=1, q_len=70, k_len=70, dim=dim, value_dim=257 - dim, spread=0.7), 1e-6, "cpu", is_causal=True)


def test_weights_that_overflow_without_a_maximum():
    """n = 200 and b = 1/200, nearly softmax: weights up to e^80 and beyond take the online path."""
    query, key, value, _, _ = make(q_len=200, k_len=300, dim=32, value_dim=32, spread=6.0)
    b, n = torch.full((4,), 1 / 200), torch.full((4,), 200.0)
    output = ssa_hf.ssa_attention(query, key, value, b, n, is_causal=True, backend="cpu")
    expected = ssa_hf.ssa_attention(
        query.double(), key.double(), value.double(), b, n, is_causal=True, backend="reference"
    )
    assert torch.isfinite(output).all()
    assert relative_rms(output.detach(), expected.detach()) < 2e-5  # logits are near 100: their rounding shows


def test_scores_that_grow_from_block_to_block():
    """Plain sums first, then a block that needs a maximum: both paths in one row."""
    query, key, value, b, n = make(q_len=8, k_len=600, dim=4, value_dim=4)
    with torch.no_grad():
        key[:, :, 300:] *= 1e12
    output = ssa_hf.ssa_attention(query, key, value, b, n * 3, backend="cpu")
    expected = oracle(query, key, value, b, n * 3)
    assert relative_rms(output.detach(), expected.detach()) < 1e-5


def test_dropout_is_independent_between_rows_heads_and_seeds():
    query, key = torch.zeros(2, 4, 64, 8), torch.zeros(2, 4, 64, 8)
    identity = torch.eye(64).expand(2, 4, 64, 64)
    options = (None, None, torch.tensor(1), False, 0, 1.0, 0.5)
    one = torch.ones(4)
    kept = (op.attention(query, key, identity, one, one, *options)[0] != 0).reshape(-1, 64).float() * 2 - 1
    correlation = (kept @ kept.T / 64)[~torch.eye(512, dtype=torch.bool)]
    assert correlation.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert correlation.mean().abs() < 0.005
    assert (kept.mean(0).abs() < 0.2).all()


def test_dropout_follows_manual_seed():
    inputs = make(q_len=20, k_len=20)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(ssa_hf.ssa_attention(*inputs, dropout_p=0.5, backend="cpu"))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_checkpointing_repeats_dropout():
    inputs = make(q_len=20, k_len=20)

    def attend(*leaves):
        return ssa_hf.ssa_attention(*leaves, dropout_p=0.5, backend="cpu")

    def checkpointed(*leaves):
        return checkpoint(attend, *leaves, use_reentrant=False)

    results = []
    for function in (attend, checkpointed):
        torch.manual_seed(0)
        results.append(outputs_and_gradients(function, inputs))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("shape", [dict(batch=1, heads=3, groups=3, q_len=400, k_len=400), dict(q_len=200, k_len=200)])
def test_bitwise_repeatable_and_near_equal_over_thread_counts(shape):
    inputs = make(**shape)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (2, 2, 1, 3):
            torch.set_num_threads(count)
            output, gradients = outputs_and_gradients(
                lambda *leaves: ssa_hf.ssa_attention(*leaves, is_causal=True, backend="cpu"), inputs
            )
            results.append((output, *gradients))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    for other in results[2:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_operator_contract():
    """PyTorch's own checks: schema, fake tensors, autograd registration, AOT dispatch with dynamic shapes."""
    query, key, value, b, n = make()
    mask = torch.rand(2, 1, 7, 7) > 0.3
    for given in (None, mask):
        arguments = (query, key, value, b, n, given, None, torch.tensor(1), True, 0, 0.3, 0.2)
        torch.library.opcheck(op.attention, arguments)


@pytest.mark.parametrize("family", ["llama", "nemotron", "roberta"])
def test_torch_compile_fullgraph(family, tokens):
    model = tiny_model(family, num_hidden_layers=1).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (11, 7):
        ids = tokens[:, :length].contiguous()
        model.zero_grad()
        plain = model(ids, labels=ids)
        plain.loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        output = compiled(ids, labels=ids)
        output.loss.backward()
        torch.testing.assert_close(output.logits, plain.logits, atol=1e-5, rtol=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4)


def test_torch_compile_with_inductor_and_dropout():
    inputs = make(q_len=20, k_len=20)
    compiled = torch.compile(lambda *leaves: ssa_hf.ssa_attention(*leaves, is_causal=True) * 2, fullgraph=True)
    plain = ssa_hf.ssa_attention(*inputs, is_causal=True) * 2
    torch.testing.assert_close(compiled(*inputs), plain)
    dropped = torch.compile(lambda *leaves: ssa_hf.ssa_attention(*leaves, dropout_p=0.5), fullgraph=True)(*inputs)
    assert torch.isfinite(dropped).all()
    dropped.sum().backward()


def test_torch_export():
    class Attention(torch.nn.Module):
        def forward(self, query, key, value, b, n):
            return ssa_hf.ssa_attention(query, key, value, b, n, is_causal=True)

    inputs = tuple(tensor.detach() for tensor in make())
    length = torch.export.Dim("length", min=2, max=100)
    shapes = tuple({2: length} if tensor.dim() == 4 else None for tensor in inputs)
    program = torch.export.export(Attention(), inputs, dynamic_shapes=shapes)
    longer = tuple(tensor.detach() for tensor in make(q_len=33, k_len=33))
    torch.testing.assert_close(program.module()(*longer), Attention()(*longer))


def test_blocked_fallback_in_several_blocks(monkeypatch):
    monkeypatch.setattr(blocked, "_SCORES", 4 * 2 * 20 * 9)
    allowed = torch.rand(2, 1, 31, 20, generator=torch.Generator().manual_seed(1)) > 0.3
    inputs = make(q_len=31, k_len=20)
    for causal in (False, True):
        for mask in (None, allowed):
            check(
                inputs,
                1e-6,
                "blocked",
                attn_mask=mask,
                is_causal=causal,
                oracle_arguments=dict(allowed=mask, is_causal=causal),
            )
    ids = torch.arange(31).repeat(2, 1) // 9
    square = make(q_len=31, k_len=31)
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    check(
        square, 1e-6, "blocked", document_ids=ids, is_causal=True, oracle_arguments=dict(allowed=same, is_causal=True)
    )
    window = torch.ones(31, 20, dtype=torch.bool).tril(-11) & torch.ones(31, 20, dtype=torch.bool).triu(-13)
    check(inputs, 1e-6, "blocked", is_causal=True, sliding_window=3, oracle_arguments=dict(allowed=window))


MEMORY = """
import resource, sys, torch, ssa_hf
length, backend = 32768, sys.argv[1] if len(sys.argv) > 1 else "BACKEND"
ssa_hf.ssa_attention(*(torch.randn(1, 1, 64, 64) for _ in range(3)), 0.8, 1.5, backend=backend)
query, key, value = (torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3))
b, n = (torch.tensor([x], requires_grad=True) for x in (0.8, 1.5))
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
ssa_hf.ssa_attention(query, key, value, b, n, is_causal=True, backend=backend).sum().backward()
print(peak() - before)
"""


def test_memory_is_linear_in_the_length():
    """32,768 queries and keys: their scores alone would be 4 GiB."""
    process = run_python(MEMORY.replace("BACKEND", "cpu"))
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < 200, "MiB"


BUILD = """
import torch, ssa_hf
x = torch.randn(1, 2, 5, 8)
torch.testing.assert_close(ssa_hf.ssa_attention(x, x, x, 0.8, 1.5, backend="cpu"),
                           ssa_hf.ssa_attention(x, x, x, 0.8, 1.5, backend="reference"))
"""


def test_two_processes_building_at_once_both_end_well(tmp_path):
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-c", BUILD]
    processes = [subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    messages = [process.communicate()[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], messages
    assert all("Building the SSA CPU kernel" in message for message in messages)
    assert len(list((tmp_path / "ssa_hf").iterdir())) == 1
    again = run_python(BUILD, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert again.returncode == 0
    assert "Building" not in again.stderr


FALLBACK = """
import torch, ssa_hf
x = torch.randn(1, 2, 5, 8, requires_grad=True)
for _ in range(2):
    ssa_hf.ssa_attention(x, x, x, 0.8, 1.5).sum().backward()
assert torch.isfinite(x.grad).all()
try:
    ssa_hf.ssa_attention(x, x, x, 0.8, 1.5, backend="cpu")
except ValueError as error:
    print(error)
"""


# A compiler that reports success and writes no library.
LIAR = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo nonsense > "$2"; shift; done
"""


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("/nonexistent", "No C++ compiler"), ("/bin/false", "No C++ compiler"), ("liar", "can't be loaded")],
)
def test_without_a_working_compiler_auto_falls_back_and_says_so_once(compiler, message, tmp_path):
    if compiler == "liar":
        compiler = str(tmp_path / "liar")
        Path(compiler).write_text(LIAR)
        Path(compiler).chmod(0o755)
    process = run_python(FALLBACK, CXX=compiler, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("falls back to blocked PyTorch") == 1
    assert message in process.stdout
    assert "Backend 'cpu' can't run" in process.stdout


def test_python_and_cpp_agree_on_the_problem():
    assert cpu.load().ssa_problem_size() == ctypes.sizeof(cpu._Problem)
    with pytest.raises(AttributeError):
        cpu._Problem().querry = 1


def test_build_command(tmp_path, capsys):
    assert ssa_hf.cli.main(["build"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()
    script = "import ssa_hf.cli, sys; sys.exit(ssa_hf.cli.main(['build']))"
    process = run_python(script, CXX="/nonexistent", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert process.returncode == 1
    assert process.stderr.startswith("ssa-hf build: No C++ compiler")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=torch.float64), "float64"),
        (dict(dim=257), "up to 256"),
    ],
)
def test_what_the_kernel_refuses_auto_does_otherwise(change, message, caplog):
    inputs = make(**change)
    with pytest.raises(ValueError, match=message):
        ssa_hf.ssa_attention(*inputs, backend="cpu")
    assert relative_rms(ssa_hf.ssa_attention(*inputs).detach(), oracle(*inputs).detach()) < 1e-6
