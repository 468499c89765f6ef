"""GPT-NeoX (Pythia)."""

from ssa_hf.families import register_family

register_family("gpt_neox", "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention")
