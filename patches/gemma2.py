"""Gemma 2: score softcapping, sliding windows."""

from ssa_hf.families import register_family

register_family("gemma2", "transformers.models.gemma2.modeling_gemma2.Gemma2Attention")
