"""Qwen3: queries and keys are normalised before they meet."""

from ssa_hf.families import register_family

register_family("qwen3", "transformers.models.qwen3.modeling_qwen3.Qwen3Attention")
