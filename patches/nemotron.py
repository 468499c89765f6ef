"""Nemotron: the paper's 114M decoder."""

from ssa_hf.families import register_family

register_family("nemotron", "transformers.models.nemotron.modeling_nemotron.NemotronAttention")
