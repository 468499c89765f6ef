"""T5: encoder, decoder and cross-attention; its relative position bias is added to the scores before weighing."""

import operator

from ssa_hf.families import register_family

register_family("t5", "transformers.models.t5.modeling_t5.T5Attention", num_heads=operator.attrgetter("n_heads"))
