"""The scorings: what each ``attn_implementation`` of this package does to attention scores, and their registry."""

from ssa_hf.scorings.base import Scoring, WeightScoring, count_keys
from ssa_hf.scorings.cosformer import CosFormer
from ssa_hf.scorings.entmax import AlphaEntmax, Entmax15, Sparsemax
from ssa_hf.scorings.sa_softmax import SASoftmax
from ssa_hf.scorings.scalable_softmax import ScalableSoftmax
from ssa_hf.scorings.sigmoid import Sigmoid
from ssa_hf.scorings.softmax import Softmax
from ssa_hf.scorings.ssa import SSAConfig
from ssa_hf.scorings.temperature import Temperature

__all__ = ["Scoring", "WeightScoring", "add_scoring", "count_keys", "find_scoring", "registered_scorings"]

_scorings: dict[str, type[Scoring]] = {}


def add_scoring(scoring: type[Scoring]) -> None:
    """Put a scoring into the registry by its name; :func:`ssa_hf.register_scoring` also tells Transformers of it.

    Raises:
        ValueError: if its name can't stand in the name of a parameter.
    """
    name = getattr(scoring, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{scoring.__name__} needs a name that is a Python identifier, got {name!r}.")
    _scorings[name] = scoring


def find_scoring(implementation: str | None) -> type[Scoring] | None:
    """Return the scoring that an attention implementation names, None if it is none of this package's."""
    return _scorings.get(implementation) if implementation else None


def registered_scorings() -> tuple[type[Scoring], ...]:
    """Return all registered scorings, in the order of registration."""
    return tuple(_scorings.values())


for _scoring in (
    SSAConfig,
    Softmax,
    Temperature,
    ScalableSoftmax,
    Sparsemax,
    Entmax15,
    AlphaEntmax,
    SASoftmax,
    Sigmoid,
    CosFormer,
):
    add_scoring(_scoring)
