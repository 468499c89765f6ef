"""The ssa-hf command: each sub-command is the main function of a module, imported only when it runs."""

import importlib
import sys
from collections.abc import Sequence

import ssa_hf

COMMANDS = {
    "build": ("ssa_hf.kernels.cpu.library", "compile the CPU kernel now, rather than at its first use"),
    "demo": (
        "ssa_hf.recipes.demo",
        "train a small SSA model and its softmax twin on a text, and compare them",
    ),
    "families": ("ssa_hf.families", "list the model families whose attention is known"),
    "saturation": ("ssa_hf.recipes.saturation", "draw how softmax saturates on large scores, and SSA does not"),
    "zorro": ("ssa_hf.recipes.probe_zorro", "probe the grammar of models with Zorro's minimal pairs"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Args:
        arguments: command line without the program name; ``sys.argv`` by default.

    Returns:
        The exit status: 0 if all went well, 2 for a wrong command line.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        print(f"ssa-hf {ssa_hf.__version__}")
        return 0
    if given[:1] in (["--help"], ["-h"]):
        print(_usage())
        return 0
    if not given or given[0] not in COMMANDS:
        print(_usage(), file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[given[0]][0])
    return int(module.main(given[1:]) or 0)


def _usage() -> str:
    lines = [f"  {name:<12} {description}" for name, (_, description) in COMMANDS.items()]
    return "\n".join(["usage: ssa-hf COMMAND [options]   (ssa-hf COMMAND --help explains a command)", "", *lines])
