"""GPT-2."""

from ssa_hf.families import register_family

register_family("gpt2", "transformers.models.gpt2.modeling_gpt2.GPT2Attention")
