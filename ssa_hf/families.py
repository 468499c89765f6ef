"""The registry of model families: which attention classes SSA knows, and how many heads they have."""

import argparse
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

NumHeads = Callable[[nn.Module], int]


def config_num_heads(attention: nn.Module) -> int:
    """Return the query head count that nearly every Transformers config states."""
    return int(attention.config.num_attention_heads)  # type: ignore[union-attr, arg-type]


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: how messages call it.
        attention: qualified names ("module.Class") of its attention classes; subclasses count as well.
        num_heads: gives the number of query heads of an attention module.
    """

    name: str
    attention: frozenset[str]
    num_heads: NumHeads = config_num_heads


_families: dict[str, Family] = {}


def register_family(
    name: str,
    attention: str | type[nn.Module] | Iterable[str | type[nn.Module]],
    *,
    num_heads: NumHeads = config_num_heads,
) -> Family:
    """Tell SSA of a model family. Models built (or switched to "ssa") afterwards can use it.

    The attention classes must call transformers' ``ALL_ATTENTION_FUNCTIONS`` in their forward, as all
    models that support ``attn_implementation="sdpa"`` through it do, and hold their config in
    ``self.config``. Registering a name again replaces it.

    Args:
        name: the family's name.
        attention: its attention class or classes, as classes or as "module.Class" (not imported).
        num_heads: gives the number of query heads of an attention module; the default reads
            ``attention.config.num_attention_heads``.

    Returns:
        The registered family.

    Raises:
        ValueError: if an attention class is neither a class nor a dotted name.
    """
    given = [attention] if isinstance(attention, str | type) else list(attention)
    family = Family(name, frozenset(_qualified_name(item) for item in given), num_heads)
    _families[name] = family
    return family


def registered_families() -> tuple[Family, ...]:
    """Return all registered families, sorted by name."""
    return tuple(family for _, family in sorted(_families.items()))


def find_family(attention_class: type) -> Family | None:
    """Return the family of an attention class (or of a class that it inherits from), None if unknown."""
    for cls in inspect.getmro(attention_class):
        qualified = _qualified_name(cls)
        for family in _families.values():
            if qualified in family.attention:
                return family
    return None


def _qualified_name(item: str | type) -> str:
    if isinstance(item, type):
        return f"{item.__module__}.{item.__qualname__}"
    if not isinstance(item, str) or "." not in item:
        raise ValueError(f'An attention class is given as a class or as "module.Class", got {item!r}.')
    return item


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the registered families as a Markdown table; return the exit status."""
    parser = argparse.ArgumentParser(prog="ssa-hf families", description="List the model families that are known.")
    parser.parse_args(arguments)
    print("| family | attention classes |\n|---|---|")
    for family in registered_families():
        classes = sorted(name.rpartition(".")[2] for name in family.attention)
        print(f"| {family.name} | {', '.join(classes)} |")
    return 0
