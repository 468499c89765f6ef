"""Qwen2."""

from ssa_hf.families import register_family

register_family("qwen2", "transformers.models.qwen2.modeling_qwen2.Qwen2Attention")
