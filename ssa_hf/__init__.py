"""Scaled Signed Averaging for Hugging Face Transformers: attn_implementation="ssa".

Importing this package registers "ssa"; :func:`unregister` takes it back.
"""

from ssa_hf.families import Family, register_family, registered_families
from ssa_hf.functional import ssa_attention
from ssa_hf.norm import SSANorm
from ssa_hf.registration import register, register_scoring, unregister
from ssa_hf.scoring import ssa_logits
from ssa_hf.scorings import Scoring, WeightScoring, registered_scorings
from ssa_hf.scorings.ssa import PRESETS, SSAConfig
from ssa_hf.version import __version__

__all__ = [
    "PRESETS",
    "Family",
    "SSAConfig",
    "SSANorm",
    "Scoring",
    "WeightScoring",
    "__version__",
    "register",
    "register_family",
    "register_scoring",
    "registered_families",
    "registered_scorings",
    "ssa_attention",
    "ssa_logits",
    "unregister",
]

register()
