"""The Triton kernel compiled, at full sizes, on a GPU. recipes/gpu_check.sh runs these where there is one."""

import pytest
import torch

import ssa_hf
from tests.conftest import tiny_model
from tests.oracle import relative_rms
from tests.test_attention import make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def on_gpu(**sizes) -> list[torch.Tensor]:
    return [tensor.detach().cuda() for tensor in make(**sizes)]


def run(inputs, backend, wide=False, **arguments):
    leaves = [(tensor.double() if wide else tensor).clone().requires_grad_() for tensor in inputs]
    output = ssa_hf.ssa_attention(*leaves, backend=backend, **arguments)
    generator = torch.Generator("cuda").manual_seed(0)
    direction = torch.randn(output.shape, generator=generator, device="cuda", dtype=torch.float64)
    (output.double() * direction).sum().backward()
    return output.detach(), [leaf.grad for leaf in leaves]


def compare(inputs, **arguments):
    tolerance = TOLERANCE[inputs[0].dtype]
    actual, actual_grads = run(inputs, "triton", **arguments)
    expected, expected_grads = run(inputs, "reference", wide=True, **arguments)
    assert relative_rms(actual, expected) < tolerance
    for name, got, want in zip(("query", "key", "value", "b", "n"), actual_grads, expected_grads, strict=True):
        # b and n sum over a thousand queries, whose roundings partly cancel and partly do not.
        assert relative_rms(got, want) < tolerance * (3 if name in ("b", "n") else 1), name


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_gradients(dtype, dim, is_causal):
    compare(on_gpu(heads=8, groups=2, q_len=1000, k_len=1000, dim=dim, value_dim=dim, dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_masks_window_and_cross_lengths(dtype):
    inputs = on_gpu(heads=4, groups=4, q_len=500, k_len=700, dim=64, value_dim=48, dtype=dtype)
    allowed = torch.rand(2, 1, 500, 700, device="cuda") > 0.3
    allowed[0, :, 3] = False
    compare(inputs, attn_mask=allowed)
    compare(inputs, attn_mask=torch.randn(1, 4, 1, 700, device="cuda"))
    compare(inputs, is_causal=True)
    compare(inputs, is_causal=True, sliding_window=100)


def test_decoding():
    inputs = on_gpu(batch=2, heads=32, groups=8, q_len=1, k_len=16384, dim=128, value_dim=128, dtype=torch.bfloat16)
    actual = ssa_hf.ssa_attention(*inputs, is_causal=True, backend="triton")
    expected = ssa_hf.ssa_attention(*(tensor.double() for tensor in inputs), is_causal=True, backend="reference")
    assert relative_rms(actual, expected) < 1e-2


def test_dropout_repeats_and_keeps_the_expectation():
    query, key, _, b, n = on_gpu(q_len=256, k_len=256, dim=64, value_dim=64)
    identity = torch.eye(256, device="cuda").expand(2, 2, 256, 256)
    torch.manual_seed(0)
    one = ssa_hf.ssa_attention(query, key, identity, b, n, dropout_p=0.25, backend="triton")
    torch.manual_seed(0)
    two = ssa_hf.ssa_attention(query, key, identity, b, n, dropout_p=0.25, backend="triton")
    assert torch.equal(one, two)
    assert (one != 0).float().mean().item() == pytest.approx(0.75, abs=0.005)


def test_fast_logarithm_against_float64():
    """lg2.approx and ex2.approx: two keys of scores x and 0; bfloat16 inputs hold x exactly."""
    x = torch.logspace(-3, 3, 400, device="cuda").bfloat16()
    keys = torch.tensor([[1.0], [0.0]], device="cuda", dtype=torch.bfloat16).expand(1, 1, 2, 1)
    values = torch.eye(2, device="cuda", dtype=torch.bfloat16).view(1, 1, 2, 2)
    weights = ssa_hf.ssa_attention(x.view(1, 1, -1, 1), keys, values, 0.8, 1.5, scale=1.0, backend="triton")[0, 0]
    w = (1 + 0.8 * x.double()) ** 1.5
    assert relative_rms(weights[:, 1], 1 / (1 + w)) < 4e-3  # bfloat16 keeps 8 bits of a weight


def test_compile_and_cuda_graph():
    model = tiny_model("llama", dtype=torch.bfloat16).cuda()
    tokens = torch.randint(3, 64, (2, 33), device="cuda")
    with torch.no_grad():
        plain = model(tokens).logits
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            got = compiled(tokens).logits.clone()
    torch.testing.assert_close(got, plain, atol=5e-2, rtol=5e-2)


def test_auto_takes_triton_on_the_gpu():
    inputs = on_gpu()
    assert torch.equal(ssa_hf.ssa_attention(*inputs, backend="auto"), ssa_hf.ssa_attention(*inputs, backend="triton"))
