"""ELECTRA; cross-attention of a decoder has a b and n of its own."""

from ssa_hf.families import register_family

register_family(
    "electra",
    (
        "transformers.models.electra.modeling_electra.ElectraSelfAttention",
        "transformers.models.electra.modeling_electra.ElectraCrossAttention",
    ),
)
