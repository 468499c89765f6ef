"""RoBERTa, BabyBERTa among them; cross-attention of a decoder has a b and n of its own."""

from ssa_hf.families import register_family

register_family(
    "roberta",
    (
        "transformers.models.roberta.modeling_roberta.RobertaSelfAttention",
        "transformers.models.roberta.modeling_roberta.RobertaCrossAttention",
    ),
)
