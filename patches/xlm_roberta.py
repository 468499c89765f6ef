"""XLM-RoBERTa; cross-attention of a decoder has a b and n of its own."""

from ssa_hf.families import register_family

register_family(
    "xlm_roberta",
    (
        "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaSelfAttention",
        "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaCrossAttention",
    ),
)
