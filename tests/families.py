"""A tiny model of every family, and inputs for it."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.t5 import modeling_t5

VOCAB = 64

_LLAMA = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
_TOKENS = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_BERT = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)

#: By family: configuration class, automatic class, sizes. Weights are large enough for attention to matter.
FAMILIES = {
    "llama": ("LlamaConfig", "CausalLM", _LLAMA),
    "nemotron": ("NemotronConfig", "CausalLM", _LLAMA),
    "mistral": ("MistralConfig", "CausalLM", _LLAMA | {"sliding_window": 6}),
    "mixtral": ("MixtralConfig", "CausalLM", _LLAMA | {"num_local_experts": 2}),
    "qwen2": ("Qwen2Config", "CausalLM", _LLAMA),
    "qwen3": ("Qwen3Config", "CausalLM", _LLAMA | {"head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        "CausalLM",
        _LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "CausalLM",
        _LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
    "phi3": ("Phi3Config", "CausalLM", _LLAMA),
    "olmo2": ("Olmo2Config", "CausalLM", _LLAMA),
    "smollm3": ("SmolLM3Config", "CausalLM", _LLAMA | {"no_rope_layer_interval": 2}),
    "gpt2": ("GPT2Config", "CausalLM", dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "gpt_neox": (
        "GPTNeoXConfig",
        "CausalLM",
        {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"},
    ),
    "opt": (
        "OPTConfig",
        "CausalLM",
        dict(
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        ),
    ),
    "roberta": ("RobertaConfig", "MaskedLM", _BERT),
    "bert": ("BertConfig", "MaskedLM", _BERT),
    "xlm_roberta": ("XLMRobertaConfig", "MaskedLM", _BERT),
    "electra": ("ElectraConfig", "MaskedLM", _BERT | {"embedding_size": 32}),
    "distilbert": (
        "DistilBertConfig",
        "MaskedLM",
        dict(dim=32, hidden_dim=48, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0),
    ),
    "modernbert": (
        "ModernBertConfig",
        "MaskedLM",
        {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
        | {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "vit": (
        "ViTConfig",
        "ImageClassification",
        {key: value for key, value in _BERT.items() if key != "max_position_embeddings"}
        | {"image_size": 12, "patch_size": 4, "num_labels": 5},
    ),
    "t5": (
        "T5Config",
        "Seq2SeqLM",
        dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0),
    ),
    "bart": (
        "BartConfig",
        "Seq2SeqLM",
        dict(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            dropout=0.0,
            decoder_start_token_id=0,
            forced_eos_token_id=None,
        ),
    ),
}
DECODERS = [name for name, (_, kind, _) in FAMILIES.items() if kind == "CausalLM"]
SEQ2SEQ = [name for name, (_, kind, _) in FAMILIES.items() if kind == "Seq2SeqLM"]


def build(family: str, implementation: str = "ssa", seed: int = 0, **options) -> PreTrainedModel:
    if family == "t5" and not hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("T5 of this Transformers has an attention of its own")
    config_class, kind, sizes = FAMILIES[family]
    tokens = {} if kind == "ImageClassification" else _TOKENS
    config = getattr(transformers, config_class)(**tokens, **sizes)
    for name in ("initializer_range", "init_std", "initializer_factor"):
        if hasattr(config, name):
            setattr(config, name, 3.0 if name == "initializer_factor" else 0.3)
    torch.manual_seed(seed)
    auto = getattr(transformers, f"AutoModelFor{kind}")
    return auto.from_config(config, attn_implementation=implementation, **options).eval()


def inputs(family: str, length: int = 11, padded: bool = False) -> dict[str, Tensor]:
    """Return a batch of two with labels; if padded, the first row is, on the left for decoders."""
    generator = torch.Generator().manual_seed(1)
    kind = FAMILIES[family][1]
    if kind == "ImageClassification":
        return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator), "labels": torch.tensor([1, 2])}
    ids = torch.randint(3, VOCAB, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        hidden = slice(0, 4) if kind == "CausalLM" else slice(length - 4, length)
        mask[0, hidden], ids[0, hidden] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
