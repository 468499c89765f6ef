"""Llama (and the many checkpoints that share its architecture)."""

from ssa_hf.families import register_family

register_family("llama", "transformers.models.llama.modeling_llama.LlamaAttention")
