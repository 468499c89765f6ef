"""Giving attention modules the parameters of their scoring, and taking them away again."""

import logging
import sys
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from ssa_hf.families import Family, find_family, registered_families
from ssa_hf.parameters import ScoringParameters
from ssa_hf.scorings import Scoring, find_scoring, registered_scorings

logger = logging.getLogger(__name__)

# Where an attention module keeps the parameters of scorings that it does not use now.
_ASIDE = "_detached_scorings"


def synchronize(model: PreTrainedModel) -> None:
    """Make the scoring parameters in a model agree with its config(s): attach what they ask for, detach the rest.

    What is detached is kept aside, so that switching back restores the trained values and an optimiser that holds the
    parameters stays valid. A scoring's options are rewritten in the config in full, as a plain dict.

    Raises:
        ValueError: if an attention module that should use a scoring is of an unknown class, the model has no
            attention at all, or the options are not valid. Nothing is attached or detached then.
    """
    wanted: list[tuple[nn.Module, PreTrainedConfig, Family, type[Scoring]]] = []
    detached: list[tuple[nn.Module, type[Scoring] | None]] = []
    for module, config in attention_modules(model, model.config):
        scoring = find_scoring(config._attn_implementation)
        detached.append((module, scoring))
        if scoring is not None:
            wanted.append((module, config, _supported_family(module, scoring), scoring))
    if not wanted and (scoring := find_scoring(model.config._attn_implementation)):
        raise ValueError(f"{type(model).__name__} has no attention module whose scoring {scoring.name} could replace.")
    options = {
        id(config): scoring.from_any(getattr(config, scoring.options_key(), None)) for _, config, _, scoring in wanted
    }
    for module, config, family, scoring in wanted:
        if written := options[id(config)].to_dict():
            setattr(config, scoring.options_key(), written)
        _attach(module, family, options[id(config)])
    removed = [scoring for module, wanted_scoring in detached for scoring in _detach(module, wanted_scoring)]
    for scoring in dict.fromkeys(removed):
        logger.warning(
            "%s no longer uses %s attention: the trained parameters of %d attention modules are set aside, and saving "
            'the model now loses them. set_attn_implementation("%s") brings them back.',
            type(model).__name__,
            scoring.name,
            removed.count(scoring),
            scoring.name,
        )


def scoring_parameters(module: nn.Module) -> ScoringParameters | None:
    """Return the scoring parameters of an attention module, None if it computes softmax in its own way."""
    names = (scoring.attribute() for scoring in registered_scorings())
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def own_config(module: nn.Module) -> PreTrainedConfig | None:
    """Return the config that a module holds itself, if any."""
    config = getattr(module, "config", None)
    return config if isinstance(config, PreTrainedConfig) else None


def attention_modules(module: nn.Module, config: PreTrainedConfig) -> Iterator[tuple[nn.Module, PreTrainedConfig]]:
    """Yield the innermost attention modules, each with the config that chooses its implementation.

    A module counts if its family is registered, or if its class is called attention and nothing in it is:
    RobertaAttention, say, only wraps RobertaSelfAttention.
    """
    config = own_config(module) or config
    if find_family(type(module)) is not None:
        yield module, config
        return
    inner = [found for child in module.children() for found in attention_modules(child, config)]
    if not inner and "Attention" in type(module).__name__ and any(True for _ in module.parameters()):
        yield module, config
    yield from inner


def _supported_family(module: nn.Module, scoring: type[Scoring]) -> Family:
    cls = type(module)
    family = find_family(cls)
    if family is None:
        known = ", ".join(family.name for family in registered_families())
        raise ValueError(
            f"{scoring.name} attention does not know the class {cls.__name__}; known families: {known}. If it uses "
            "transformers' ALL_ATTENTION_FUNCTIONS, register it before the model is built:\n"
            f'    ssa_hf.register_family("my-family", "{cls.__module__}.{cls.__qualname__}")'
        )
    if not _uses_attention_interface(cls):
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} does not go through transformers' ALL_ATTENTION_FUNCTIONS, "
            f"so it would go on computing its own attention; {scoring.name} can't be used with it."
        )
    return family


def _uses_attention_interface(cls: type) -> bool:
    scopes = [vars(sys.modules[base.__module__]) for base in cls.__mro__ if base.__module__ in sys.modules]
    return any(isinstance(value, AttentionInterface) for scope in scopes for value in scope.values())


def _attach(module: nn.Module, family: Family, scoring: Scoring) -> None:
    name = scoring.attribute()
    if hasattr(module, name):
        return
    device = next(module.parameters()).device
    kept = module.__dict__.get(_ASIDE, {}).pop(name, None)
    made = scoring.parameters(family.num_heads(module), device) if kept is None else kept.to(device)
    module.add_module(name, made)


def _detach(module: nn.Module, wanted: type[Scoring] | None) -> list[type[Scoring]]:
    """Set aside the parameters of all scorings but the wanted one; return those that had any."""
    removed = []
    for scoring in registered_scorings():
        name = scoring.attribute()
        if scoring is wanted or not hasattr(module, name):
            continue
        # In a dict, they are no submodules: neither saved, nor trained, nor counted.
        aside = getattr(module, name)
        module.__dict__.setdefault(_ASIDE, {})[name] = aside
        delattr(module, name)
        if aside.state_dict():
            removed.append(scoring)
    return removed
