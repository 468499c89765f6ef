"""OPT."""

from ssa_hf.families import register_family

register_family("opt", "transformers.models.opt.modeling_opt.OPTAttention")
