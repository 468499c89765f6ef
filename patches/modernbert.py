"""ModernBERT: sliding windows both ways."""

from ssa_hf.families import register_family

register_family("modernbert", "transformers.models.modernbert.modeling_modernbert.ModernBertAttention")
