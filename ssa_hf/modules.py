"""Giving attention modules their SSANorm, and taking it away again."""

import logging
import sys
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from ssa_hf.config import SSAConfig
from ssa_hf.families import Family, find_family, registered_families
from ssa_hf.norm import SSANorm

logger = logging.getLogger(__name__)

IMPLEMENTATION = "ssa"


def synchronize(model: PreTrainedModel) -> None:
    """Make the SSANorms of a model agree with its config(s): attach where "ssa" is asked for, else detach.

    A detached SSANorm is kept aside, so that switching back restores the trained values and an optimiser
    that holds the parameters stays valid. ``config.ssa`` is rewritten in full, as a plain dict.

    Raises:
        ValueError: if an attention module that should use SSA is of an unknown class, the model has no
            attention at all, or ``config.ssa`` is not valid. Nothing is attached or detached then.
    """
    attached, detached = [], []
    for module, config in attention_modules(model, model.config):
        if config._attn_implementation != IMPLEMENTATION:
            detached.append(module)
        else:
            attached.append((module, config, _supported_family(module)))
    if model.config._attn_implementation == IMPLEMENTATION and not attached:
        raise ValueError(f"{type(model).__name__} has no attention module whose scoring SSA could replace.")
    options = {id(config): SSAConfig.from_any(getattr(config, "ssa", None)) for _, config, _ in attached}
    for module, config, family in attached:
        config.ssa = options[id(config)].to_dict()
        _attach(module, family, options[id(config)])
    removed = [_detach(module) for module in detached]
    if any(removed):
        logger.warning(
            "%s no longer uses SSA: the b and n of %d attention modules are set aside, and saving the model now "
            'loses them. set_attn_implementation("ssa") brings them back.',
            type(model).__name__,
            sum(removed),
        )


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


def _supported_family(module: nn.Module) -> Family:
    cls = type(module)
    family = find_family(cls)
    if family is None:
        known = ", ".join(family.name for family in registered_families())
        raise ValueError(
            f"SSA does not know the attention class {cls.__name__}; known families: {known}. If it uses "
            "transformers' ALL_ATTENTION_FUNCTIONS, register it before the model is built:\n"
            f'    ssa_hf.register_family("my-family", "{cls.__module__}.{cls.__qualname__}")'
        )
    if not _uses_attention_interface(cls):
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} does not go through transformers' ALL_ATTENTION_FUNCTIONS, "
            "so it would go on computing its own attention; SSA can't be used with it."
        )
    return family


def _uses_attention_interface(cls: type) -> bool:
    scopes = [vars(sys.modules[base.__module__]) for base in cls.__mro__ if base.__module__ in sys.modules]
    return any(isinstance(value, AttentionInterface) for scope in scopes for value in scope.values())


def _attach(module: nn.Module, family: Family, options: SSAConfig) -> None:
    if hasattr(module, "ssa_norm"):
        return
    device = next(module.parameters()).device
    kept = module.__dict__.pop("_detached_ssa_norm", None)
    module.ssa_norm = SSANorm(family.num_heads(module), options, device) if kept is None else kept[0].to(device)


def _detach(module: nn.Module) -> bool:
    if not hasattr(module, "ssa_norm"):
        return False
    # In a tuple, it is no submodule: neither saved, nor trained, nor counted.
    module.__dict__["_detached_ssa_norm"] = (module.ssa_norm,)
    del module.ssa_norm
    return True
