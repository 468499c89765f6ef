import os
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
)

import ssa_hf

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores between them.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
VOCAB = 64

_DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    # Large enough that attention matters in an untrained model.
    initializer_range=0.3,
)


def tiny_config(family: str, **changes) -> PreTrainedConfig:
    if family == "llama":
        return LlamaConfig(**{**_DECODER, **changes})
    if family == "nemotron":
        return NemotronConfig(**{**_DECODER, **changes})
    if family == "mistral":
        return MistralConfig(**{**_DECODER, "sliding_window": 6, **changes})
    encoder = {key: _DECODER[key] for key in _DECODER if key not in ("num_key_value_heads", "head_dim")}
    return RobertaConfig(
        **{
            **encoder,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "type_vocab_size": 1,
            **changes,
        }
    )


def tiny_model(
    family: str, implementation: str = "ssa", seed: int = 0, dtype=torch.float32, **changes
) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    auto = AutoModelForMaskedLM if family == "roberta" and not config.is_decoder else AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=implementation, dtype=dtype).eval()


def norms(model: torch.nn.Module) -> list[ssa_hf.SSANorm]:
    return [module for module in model.modules() if isinstance(module, ssa_hf.SSANorm)]


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no data at {SHARED_DATA}")
    return SHARED_DATA
