"""The README.md of a saved model: what its attention is, how to load it, and the values it learned."""

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from ssa_hf.modules import attention_modules, scoring_parameters
from ssa_hf.parameters import ScoringParameters


def write_model_card(model: PreTrainedModel, folder: Path) -> None:
    """Write README.md beside a model with a scoring of this package, unless the folder has one already."""
    path = folder / "README.md"
    card = model_card(model)
    if card is None or path.exists() or folder.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(card, encoding="utf-8")


def model_card(model: PreTrainedModel) -> str | None:
    """Return a model card in Markdown, None for a model whose attention is not of this package."""
    found = [
        (name, parameters)
        for name, module in _named_attention(model)
        if (parameters := scoring_parameters(module)) is not None
    ]
    if not found:
        return None
    scoring = found[0][1].config
    options = ", ".join(f"{name} = {value}" for name, value in scoring.to_dict().items()) or "none"
    return f"""---
library_name: transformers
tags:
- ssa_hf
- {scoring.name}
---

# {type(model).__name__} with `attn_implementation="{scoring.name}"`

The attention of this model is computed by the package `ssa_hf`, which must be installed. Loading needs nothing else, as
config.json asks for it; without the package, Transformers refuses the model.

- scoring: {scoring.source}
- options at the start of training: {options}
{_table(found)}"""


def _named_attention(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    names = {module: name for name, module in model.named_modules()}
    return [(names[module], module) for module, _ in attention_modules(model, model.config)]


def _table(found: list[tuple[str, ScoringParameters]]) -> str:
    """Tabulate the values of each attention module; those that are sharded or offloaded are not here to be read."""
    columns = list(found[0][1].values())
    if not columns or any(
        hasattr(value, "full_tensor") or value.is_meta or not value.numel()
        for _, parameters in found
        for value in parameters.values().values()
    ):
        return ""
    lines = [f"\n| attention | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, parameters in found:
        cells = (" ".join(f"{x:.4g}" for x in parameters.values()[column].tolist()) for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\nLearned values, of every head:\n" + "\n".join(lines) + "\n"
