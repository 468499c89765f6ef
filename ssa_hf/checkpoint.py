"""Rules for scoring parameters in checkpoints: nothing is lost or made up in silence."""

import functools
import logging
from typing import Any

from packaging.version import Version
from transformers import PreTrainedModel

from ssa_hf.scorings import Scoring, find_scoring, registered_scorings
from ssa_hf.version import __version__

logger = logging.getLogger(__name__)


def write_implementation(config_dict: dict[str, Any]) -> None:
    """Keep a scoring's name in a serialised config, from which transformers strips the attention implementation.

    Without it, the checkpoint would reload as a softmax model. With it, it reloads with its scoring, and a machine
    without this package refuses it. The version of this package is written as well.
    """
    implementation = config_dict.get("_attn_implementation_internal")
    if find_scoring(implementation) is not None:
        config_dict["attn_implementation"] = implementation
        config_dict["ssa_hf_version"] = __version__


@functools.cache
def warn_of_newer_version(written_by: str | None) -> None:
    """Warn, once for each version, of checkpoints that a newer version of this package wrote."""
    if written_by is not None and Version(written_by) > Version(__version__):
        logger.warning(
            "This checkpoint was written by ssa_hf %s, newer than the installed %s, which refuses options that it does "
            "not know. pip install -U ssa_hf",
            written_by,
            __version__,
        )


def check_loaded_keys(model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> None:
    """Check that the scoring parameters of a checkpoint found their place in the model, and are finite.

    Args:
        model: the model that the checkpoint was loaded into.
        missing: keys of the model that the checkpoint lacks.
        unexpected: keys of the checkpoint that the model lacks.

    Raises:
        ValueError: if a value is NaN or infinite, or if a model got the parameters of some attention modules only, or
            was offered more than it has. (A softmax checkpoint has none at all: then all keep their initial values.)
    """
    state = model.state_dict()
    expected = _by_scoring(set(state))
    offered = _by_scoring(unexpected)
    for scoring in offered.keys() - expected.keys():
        modules = {name.rpartition(".")[0] for name in offered[scoring]}
        logger.warning(
            "This checkpoint was trained with %s attention, but %s is being loaded with attn_implementation=%r: "
            "the learned parameters of %d attention modules (%s, ...) are LOST and its outputs will be wrong. "
            'Load it without attn_implementation, or with "%s".',
            scoring.name,
            type(model).__name__,
            model.config._attn_implementation,
            len(modules),
            min(modules),
            scoring.name,
        )
    for scoring, names in expected.items():
        absent, lost = sorted(names & missing), sorted(offered.get(scoring, ()))
        if lost or (absent and len(absent) < len(names)):
            raise ValueError(
                f"The checkpoint's {scoring.name} parameters do not match {type(model).__name__}: of {len(names)} "
                f"expected tensors {len(names) - len(absent)} are there, and {len(lost)} belong to no module of the "
                f"model (first: {(absent + lost)[0]}). The numbers of layers must be equal."
            )
        for name in sorted(names - missing):
            if not state[name].is_meta and not state[name].isfinite().all():
                raise ValueError(
                    f"{name} in the checkpoint of {type(model).__name__} holds NaN or infinite values: training had "
                    "diverged, or the file is damaged. Take an earlier checkpoint."
                )


def _by_scoring(names: set[str]) -> dict[type[Scoring], set[str]]:
    found: dict[type[Scoring], set[str]] = {}
    for scoring in registered_scorings():
        if own := {name for name in names if f".{scoring.attribute()}." in f".{name}"}:
            found[scoring] = own
    return found
