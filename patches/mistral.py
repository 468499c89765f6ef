"""Mistral: sliding window."""

from ssa_hf.families import register_family

register_family("mistral", "transformers.models.mistral.modeling_mistral.MistralAttention")
