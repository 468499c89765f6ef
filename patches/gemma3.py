"""Gemma 3: sliding windows."""

from ssa_hf.families import register_family

register_family("gemma3", "transformers.models.gemma3.modeling_gemma3.Gemma3Attention")
