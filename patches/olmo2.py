"""OLMo 2."""

from ssa_hf.families import register_family

register_family("olmo2", "transformers.models.olmo2.modeling_olmo2.Olmo2Attention")
