"""register() and unregister(): the few places where the plugin enters Transformers."""

import functools
import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ssa_hf.attention import attention_forward
from ssa_hf.checkpoint import check_loaded_keys, warn_of_newer_version, write_implementation
from ssa_hf.model_card import write_model_card
from ssa_hf.modules import own_config, synchronize
from ssa_hf.parameters import ScoringParameters
from ssa_hf.scorings import Scoring, add_scoring, find_scoring, registered_scorings

Method = Callable[..., Any]

# The attribute of a wrapper that holds what it wraps.
_MARK = "_ssa_hf_original"

_lock = threading.Lock()
_originals: dict[tuple[type, str], Method] = {}


def register() -> None:
    """Make "ssa" and the other scorings known to Transformers. Idempotent, thread-safe; importing ssa_hf does it."""
    with _lock:
        if _originals:
            return
        importlib.import_module("ssa_hf.patches")
        for scoring in registered_scorings():
            _enter(scoring)
        for cls, name, wrap in _WRAPPED:
            # A copy of this package that was imported before (a reload) may have left its wrapper.
            original = getattr(cls.__dict__[name], _MARK, cls.__dict__[name])
            _originals[cls, name] = original
            wrapper = functools.wraps(original)(wrap(original))
            setattr(wrapper, _MARK, original)
            setattr(cls, name, wrapper)


def unregister() -> None:
    """Undo :func:`register`. SSA models that still live can no longer run. Idempotent, thread-safe."""
    with _lock:
        if not _originals:
            return
        for (cls, name), original in _originals.items():
            setattr(cls, name, original)
        _originals.clear()
        for scoring in registered_scorings():
            delattr(PreTrainedConfig, scoring.options_key())
            AttentionInterface._global_mapping.pop(scoring.name)
            AttentionMaskInterface._global_mapping.pop(scoring.name)


def register_scoring(scoring: type[Scoring]) -> type[Scoring]:
    """Make a scoring of one's own usable as ``attn_implementation=scoring.name``; a class decorator.

    Saving, loading, masks, caches, families and recipes then work as for SSA. Registering a name again replaces it.

    Args:
        scoring: a concrete subclass of :class:`ssa_hf.Scoring`, most simply of :class:`ssa_hf.WeightScoring`, a frozen
            dataclass whose fields all have defaults.

    Returns:
        The class.

    Raises:
        ValueError: if its name is not an identifier, or that of an attention of Transformers' own.
    """
    with _lock:
        name = getattr(scoring, "name", None)
        if name == "eager" or (name in AttentionInterface._global_mapping and find_scoring(name) is None):
            raise ValueError(f"Transformers has an attention implementation {name!r} already: choose another name.")
        add_scoring(scoring)
        if _originals:
            _enter(scoring)
    return scoring


def _enter(scoring: type[Scoring]) -> None:
    AttentionInterface.register(scoring.name, functools.partial(attention_forward, scoring))
    AttentionMaskInterface.register(scoring.name, scoring.mask)
    # from_pretrained(..., ssa=...) hands a keyword to the config only if the config has that attribute.
    setattr(PreTrainedConfig, scoring.options_key(), None)


def _wrap_post_init(original: Method) -> Method:
    """Every way to build a model ends here, before its weights are initialised or loaded."""

    def post_init(self: PreTrainedModel) -> None:
        warn_of_newer_version(getattr(self.config, "ssa_hf_version", None))
        synchronize(self)
        original(self)
        # from_pretrained(dtype=...) reads it.
        names = {scoring.attribute() for scoring in registered_scorings()}
        self._keep_in_fp32_modules_strict = names.union(self._keep_in_fp32_modules_strict or ())

    return post_init


def _wrap_initialize_weights(original: Method) -> Method:
    """The models' own _init_weights does not know them, and would leave them as uninitialised memory."""

    def _initialize_weights(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, ScoringParameters) and not getattr(module, "_is_hf_initialized", False):
            module.reset_parameters()
        original(self, module, *args, **kwargs)

    return _initialize_weights


def _wrap_set_attn_implementation(original: Method) -> Method:
    def set_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        configs = {id(config): config for module in self.modules() if (config := own_config(module))}
        before = [(config, config._attn_implementation) for config in configs.values()]
        original(self, *args, **kwargs)
        try:
            synchronize(self)
        except ValueError:
            for config, implementation in before:
                config._attn_implementation_internal = implementation
            raise

    return set_attn_implementation


def _wrap_adjust_missing_and_unexpected_keys(original: Method) -> Method:
    def _adjust_missing_and_unexpected_keys(self: PreTrainedModel, loading_info: Any) -> None:
        original(self, loading_info)
        check_loaded_keys(self, loading_info.missing_keys, loading_info.unexpected_keys)

    return _adjust_missing_and_unexpected_keys


def _wrap_remove_keys_not_serialized(original: Method) -> Method:
    def _remove_keys_not_serialized(self: PreTrainedConfig, d: dict[str, Any]) -> None:
        write_implementation(d)
        original(self, d)

    return _remove_keys_not_serialized


def _wrap_save_pretrained(original: Method) -> Method:
    def save_pretrained(
        self: PreTrainedModel, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        if args[0] if args else kwargs.get("is_main_process", True):
            write_model_card(self, Path(save_directory))
        original(self, save_directory, *args, **kwargs)

    return save_pretrained


_WRAPPED: tuple[tuple[type, str, Callable[[Method], Method]], ...] = (
    (PreTrainedModel, "post_init", _wrap_post_init),
    (PreTrainedModel, "_initialize_weights", _wrap_initialize_weights),
    (PreTrainedModel, "save_pretrained", _wrap_save_pretrained),
    (PreTrainedModel, "set_attn_implementation", _wrap_set_attn_implementation),
    (
        PreTrainedModel,
        "_adjust_missing_and_unexpected_keys",
        _wrap_adjust_missing_and_unexpected_keys,
    ),
    (PreTrainedConfig, "_remove_keys_not_serialized", _wrap_remove_keys_not_serialized),
)
