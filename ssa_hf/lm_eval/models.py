"""Model types for lm-evaluation-harness: "ssa" for decoders and "ssa-mlm" for masked language models.

Both are the harness's HFLM, with its arguments, batch sizes, devices and processes.
"""

from typing import Any

import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import PreTrainedModel

import ssa_hf  # noqa: F401 - registers "ssa"
from ssa_hf.likelihood import pseudo_log_likelihoods

#: Sentences that "ssa-mlm" scores between two steps of its progress bar.
_CHUNK = 1000


@register_model("ssa")
class SSALM(HFLM):
    """A decoder scored with SSA attention.

    Args:
        pretrained: checkpoint folder, Hub name, or a model.
        convert: score a softmax checkpoint with SSA at its initial b and n; otherwise one is refused.
        **kwargs: HFLM's, and those of from_pretrained, such as ``ssa``.

    Raises:
        ValueError: for a checkpoint that was not trained with SSA, unless ``convert`` is true.
    """

    def __init__(self, pretrained: str | PreTrainedModel, convert: bool = False, **kwargs: Any) -> None:
        self._convert = convert
        super().__init__(pretrained, attn_implementation="ssa", **kwargs)
        if self.model.config._attn_implementation != "ssa":
            raise ValueError("the model given does not use SSA attention: model.set_attn_implementation('ssa').")

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        super()._get_config(pretrained, **kwargs)
        if not self._convert and self.config._attn_implementation != "ssa":
            raise ValueError(
                f"{pretrained} is no SSA checkpoint, its b and n would be untrained. Score it with softmax by "
                "--model hf, or as it is with SSA by adding convert=True to --model_args."
            )


@register_model("ssa-mlm")
class MaskedLM(HFLM):
    """A masked language model, with SSA or softmax attention as its checkpoint says, for minimal pairs.

    A sentence's score is its pseudo-log-likelihood: each token masked in turn (Salazar et al., 2020). That is defined
    for a whole sentence only, so requests with a context, and generation, are refused.
    """

    AUTO_MODEL_CLASS = transformers.AutoModelForMaskedLM

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score sentences, without the space that the harness puts before them.

        Returns:
            A sentence's pseudo-log-likelihood in nats, and False: it is not known whether it is the most probable.

        Raises:
            ValueError: for a request with a context.
        """
        sentences = [request.args[1].strip() for request in requests]
        if any(request.args[0] for request in requests):
            raise ValueError(
                "ssa-mlm scores whole sentences, as tasks of minimal pairs ask for (zorro, blimp): a masked model has "
                "no likelihood of a continuation. Choose such a task, or a decoder and --model ssa."
            )
        batch_size = 64 if self.batch_size == "auto" else int(self.batch_size)
        scores: list[float] = []
        for start in tqdm(
            range(0, len(sentences), _CHUNK), "Scoring sentences (in 1000s)", disable=disable_tqdm or self.rank > 0
        ):
            ids = self.tokenizer(sentences[start : start + _CHUNK])["input_ids"]
            scores += pseudo_log_likelihoods(
                self.model, ids, self.tokenizer.mask_token_id, self.tokenizer.all_special_ids, batch_size
            )
        return [(score, False) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refuse: a masked model has no likelihood of a text."""
        raise ValueError("ssa-mlm scores minimal pairs (tasks zorro, blimp); perplexity needs a decoder.")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Refuse: a masked model does not generate."""
        raise ValueError("ssa-mlm scores minimal pairs (tasks zorro, blimp); generation needs a decoder.")
