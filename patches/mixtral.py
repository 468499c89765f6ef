"""Mixtral: Mistral with experts."""

from ssa_hf.families import register_family

register_family("mixtral", "transformers.models.mixtral.modeling_mixtral.MixtralAttention")
