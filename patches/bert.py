"""BERT; cross-attention of a decoder has a b and n of its own."""

from ssa_hf.families import register_family

register_family(
    "bert",
    (
        "transformers.models.bert.modeling_bert.BertSelfAttention",
        "transformers.models.bert.modeling_bert.BertCrossAttention",
    ),
)
