"""The in-context learner: a Transformers decoder between a linear read-in and a linear read-out."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from ssa_hf import SSAConfig
from ssa_hf.recipes.icl.tasks import Task


class InContextLearner(LlamaPreTrainedModel):
    """Answer at each x of a prompt of numbers, from the numbers up to it.

    Any attention implementation that a Llama takes will do. ``config.kinds`` and ``config.problem_type`` are the
    task's, see :class:`ssa_hf.recipes.icl.tasks.Task`.
    """

    main_input_name = "values"
    base_model_prefix = "decoder"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.decoder = LlamaModel(config)
        self.decoder.set_input_embeddings(nn.Identity())  # there are no tokens, only inputs_embeds
        self.read_in = nn.Linear(config.kinds, config.hidden_size)
        self.read_out = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is getattr(self, "read_in", None):
            # PyTorch's own scale. With Llama's 0.02 and no bias, RMSNorm would leave only the sign of a number.
            init.uniform_(module.weight, -1, 1)
            init.uniform_(module.bias, -1, 1)

    def forward(self, values: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Predict.

        Args:
            values: (batch, length), numbers of ``config.kinds`` kinds in turn.
            labels: (batch, answers), for every x.

        Returns:
            ``logits`` (batch, answers): of yes, or the predicted f(x); and with labels the mean loss.
        """
        kinds = self.config.kinds
        kind = F.one_hot(torch.arange(values.shape[1], device=values.device) % kinds, kinds)
        hidden = self.read_in((values[..., None] * kind).to(self.read_in.weight.dtype))
        hidden = self.decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
        logits = self.read_out(hidden[:, ::kinds])[..., 0].float()
        loss = None
        if labels is not None:
            regression = self.config.problem_type == "regression"
            loss = F.mse_loss(logits, labels) if regression else F.binary_cross_entropy_with_logits(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def build_model(
    attention: str, task: Task, layers: int, heads: int, hidden_size: int, max_length: int, ssa: str | None = None
) -> InContextLearner:
    """Build a learner with random weights; the same seed gives every attention implementation the same ones.

    Args:
        attention: attention implementation.
        task: what to learn.
        layers: decoder layers.
        heads: attention heads.
        hidden_size: width.
        max_length: numbers in a training prompt.
        ssa: SSA preset; by default b and n are trained.

    Raises:
        ValueError: if the sizes do not fit together, or for an unknown attention implementation or preset.
    """
    if hidden_size % (2 * heads):
        raise ValueError(f"hidden_size must be a multiple of 2 * heads for rotary embeddings: {hidden_size}, {heads}.")
    own: dict[str, Any] = {"kinds": task.kinds, "problem_type": task.problem_type}
    config = LlamaConfig(
        vocab_size=1,
        hidden_size=hidden_size,
        intermediate_size=8 * hidden_size // 3,  # gated, it equals GPT-2's 4 * hidden_size in parameters
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=max_length,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **own,
    )
    if attention == "ssa":
        config.ssa = SSAConfig.from_any(ssa).to_dict()
    return InContextLearner._from_config(config, attn_implementation=attention)
