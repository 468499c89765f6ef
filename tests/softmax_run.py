"""What a softmax model computes, with no import of ssa_hf: run with and without the plugin to compare."""

import json

import torch
from transformers import AutoConfig, AutoModel


def run(family: str) -> dict[str, torch.Tensor | str]:
    """Build a tiny softmax model of a family, train a step, and return its tensors and its config."""
    torch.manual_seed(0)
    grouped = {} if family == "roberta" else {"num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **grouped,
    )
    results: dict[str, torch.Tensor | str] = {"config": json.dumps(config.to_dict())}
    tokens = torch.randint(3, 64, (2, 11))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    for implementation in ("sdpa", "eager"):
        model = AutoModel.from_config(config, attn_implementation=implementation)
        for given in (None, mask):
            output = model(tokens, attention_mask=given).last_hidden_state
            output.square().mean().backward()
            results[f"{implementation}/{given is None}"] = output.detach()
        results |= {
            f"{implementation}/{name}": parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        results[f"{implementation}/config"] = json.dumps(model.config.to_dict())
    return results
