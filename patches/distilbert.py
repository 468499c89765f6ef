"""DistilBERT."""

from ssa_hf.families import register_family

register_family("distilbert", "transformers.models.distilbert.modeling_distilbert.DistilBertSelfAttention")
