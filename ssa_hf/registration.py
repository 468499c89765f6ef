"""register() and unregister(): the few places where the plugin enters Transformers."""

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ssa_hf.attention import ssa_attention_forward, ssa_mask
from ssa_hf.checkpoint import check_loaded_keys, write_implementation
from ssa_hf.modules import IMPLEMENTATION, own_config, synchronize
from ssa_hf.norm import SSANorm

Method = Callable[..., Any]

_lock = threading.Lock()
_originals: dict[tuple[type, str], Method] = {}


def register() -> None:
    """Make attn_implementation="ssa" known to Transformers. Idempotent, thread-safe; importing ssa_hf does it."""
    with _lock:
        if _originals:
            return
        importlib.import_module("ssa_hf.patches")
        AttentionInterface.register(IMPLEMENTATION, ssa_attention_forward)
        AttentionMaskInterface.register(IMPLEMENTATION, ssa_mask)
        # from_pretrained(..., ssa=...) hands a keyword to the config only if the config has that attribute.
        PreTrainedConfig.ssa = None  # type: ignore[attr-defined]
        for cls, name, wrap in _WRAPPED:
            original = cls.__dict__[name]
            _originals[cls, name] = original
            setattr(cls, name, functools.wraps(original)(wrap(original)))


def unregister() -> None:
    """Undo :func:`register`. SSA models that still live can no longer run. Idempotent, thread-safe."""
    with _lock:
        if not _originals:
            return
        for (cls, name), original in _originals.items():
            setattr(cls, name, original)
        _originals.clear()
        del PreTrainedConfig.ssa  # type: ignore[attr-defined]
        AttentionInterface._global_mapping.pop(IMPLEMENTATION)
        AttentionMaskInterface._global_mapping.pop(IMPLEMENTATION)


def _wrap_post_init(original: Method) -> Method:
    """Every way to build a model ends here, before its weights are initialised or loaded."""

    def post_init(self: PreTrainedModel) -> None:
        synchronize(self)
        original(self)
        # from_pretrained(dtype=...) reads it.
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "ssa_norm"}

    return post_init


def _wrap_initialize_weights(original: Method) -> Method:
    """The models' own _init_weights does not know SSANorm, and would leave it as uninitialised memory."""

    def _initialize_weights(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, SSANorm) and not getattr(module, "_is_hf_initialized", False):
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


_WRAPPED: tuple[tuple[type, str, Callable[[Method], Method]], ...] = (
    (PreTrainedModel, "post_init", _wrap_post_init),
    (PreTrainedModel, "_initialize_weights", _wrap_initialize_weights),
    (PreTrainedModel, "set_attn_implementation", _wrap_set_attn_implementation),
    (
        PreTrainedModel,
        "_adjust_missing_and_unexpected_keys",
        _wrap_adjust_missing_and_unexpected_keys,
    ),
    (PreTrainedConfig, "_remove_keys_not_serialized", _wrap_remove_keys_not_serialized),
)
