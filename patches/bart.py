"""BART: encoder, decoder and cross-attention, whose head counts may differ."""

import operator

from ssa_hf.families import register_family

register_family(
    "bart", "transformers.models.bart.modeling_bart.BartAttention", num_heads=operator.attrgetter("num_heads")
)
