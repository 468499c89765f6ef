"""ViT, the vision transformer."""

from ssa_hf.families import register_family

register_family("vit", "transformers.models.vit.modeling_vit.ViTAttention")
