"""Rules for SSA parameters in checkpoints: nothing is lost or made up in silence."""

import logging
from typing import Any

from transformers import PreTrainedModel

from ssa_hf.modules import IMPLEMENTATION

logger = logging.getLogger(__name__)

_MARK = ".ssa_norm."


def write_implementation(config_dict: dict[str, Any]) -> None:
    """Keep "ssa" in a serialised config, from which transformers strips the attention implementation.

    Without it, the checkpoint would reload as a softmax model. With it, it reloads with SSA, and a machine
    without this package refuses it.
    """
    if config_dict.get("_attn_implementation_internal") == IMPLEMENTATION:
        config_dict["attn_implementation"] = IMPLEMENTATION


def check_loaded_keys(model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> None:
    """Check that b and n of a checkpoint found their place in the model.

    Args:
        model: the model that the checkpoint was loaded into.
        missing: keys of the model that the checkpoint lacks.
        unexpected: keys of the checkpoint that the model lacks.

    Raises:
        ValueError: if an SSA model got the b and n of some attention modules only, or was offered more than
            it has. (A softmax checkpoint has none at all: then all keep their initial values.)
    """
    expected = {name for name in model.state_dict() if _MARK in f".{name}"}
    lost = sorted(name for name in unexpected if _MARK in f".{name}")
    absent = sorted(expected & missing)
    if not expected and lost:
        modules = {name.rpartition(".")[0] for name in lost}
        logger.warning(
            "This checkpoint was trained with SSA attention, but %s is being loaded with attn_implementation=%r: "
            "the learned b and n of %d attention modules (%s, ...) are LOST and its outputs will be wrong. "
            'Load it without attn_implementation, or with "ssa".',
            type(model).__name__,
            model.config._attn_implementation,
            len(modules),
            min(modules),
        )
    elif expected and (lost or (absent and len(absent) < len(expected))):
        found = len(expected) - len(absent)
        raise ValueError(
            f"The checkpoint's SSA parameters do not match {type(model).__name__}: of {len(expected)} expected tensors "
            f"{found} are there, and {len(lost)} belong to no module of the model (first: "
            f"{(absent + lost)[0]}). The numbers of layers must be equal."
        )
