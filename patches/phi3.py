"""Phi-3."""

from ssa_hf.families import register_family

register_family("phi3", "transformers.models.phi3.modeling_phi3.Phi3Attention")
