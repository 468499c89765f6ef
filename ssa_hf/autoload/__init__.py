"""Activation without an import: PyTorch calls :func:`install` at the end of ``import torch``.

It is installed as the top-level package ``ssa_hf_autoload``, an entry point of the group ``torch.backends``: inside
ssa_hf it could not be imported without importing all of that. ``SSA_HF_AUTOLOAD=0`` turns it off, and so does
PyTorch's own ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``; then ``import ssa_hf`` does the same.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Where Transformers keeps its attention implementations.
MODULE = "transformers.modeling_utils"


def install() -> None:
    """Arrange that ssa_hf is imported as soon as Transformers' models are."""
    if os.environ.get("SSA_HF_AUTOLOAD") == "0":
        return
    if _is_loaded():
        _activate()
    elif not any(isinstance(finder, _Hook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hook())


class _Hook(MetaPathFinder):
    """Finds nothing itself; once MODULE has been executed, it imports ssa_hf."""

    done = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Tested before anything else, as every import comes by here.
        if self.done or not name.startswith("transformers."):
            return None
        if name == MODULE:
            self.done = True
            return _activating(importlib.util.find_spec(name))
        # MODULE was itself importing torch when this hook came in. What needs SSA is still to be imported.
        if _is_loaded():
            self.done = True
            _activate()
        return None


def _activating(spec: ModuleSpec | None) -> ModuleSpec | None:
    if spec is None or spec.loader is None:
        return spec
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _activate()

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _is_loaded() -> bool:
    spec = getattr(sys.modules.get(MODULE), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _activate() -> None:
    try:
        importlib.import_module("ssa_hf")
    except Exception as error:  # a program that does not use SSA must go on
        warnings.warn(
            f'ssa_hf could not be imported ({type(error).__name__}: {error}): attn_implementation="ssa" is not '
            "available. Reinstall it, or set SSA_HF_AUTOLOAD=0.",
            RuntimeWarning,
            stacklevel=2,
        )
