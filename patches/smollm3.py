"""SmolLM3: some layers without rotary embedding."""

from ssa_hf.families import register_family

register_family("smollm3", "transformers.models.smollm3.modeling_smollm3.SmolLM3Attention")
