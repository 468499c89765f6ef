"""The command line of a recipe: dataclasses, a YAML configuration, and overrides of single options."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

CONFIGS = Path(__file__).parent / "configs"


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Without the usage, which is hundreds of lines with Trainer's options in it.
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(
    types: Sequence[Any], arguments: Sequence[str] | None = None, description: str | None = None
) -> tuple[Any, ...]:
    """Fill dataclasses from ``--config FILE`` and from the command line, which has the last word.

    A configuration is a flat YAML mapping of option names to values. Its key ``base`` names another one, relative to
    it, whose values it overrides. ``--config`` takes a file or the name of one that is shipped in recipes/configs.

    Args:
        types: dataclasses whose fields are the options; ``metadata={"help": ...}`` documents one.
        arguments: command line without the program name; ``sys.argv`` by default.
        description: what ``--help`` says first.

    Returns:
        One instance of each type.

    Raises:
        SystemExit: with status 2 and a message, for an unknown option, a wrong value or a missing file.
    """
    parser = _Parser(list(types), description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with options, or one of: {', '.join(_shipped())}")
    given = list(sys.argv[1:] if arguments is None else arguments)
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config")
    try:
        config = config_parser.parse_known_args(given)[0].config
        options = {} if config is None else read_config(config)
        known = {action.dest for action in parser._actions}
        if unknown := sorted(set(options) - known):
            raise ValueError(f"unknown option(s) in {config}: {', '.join(unknown)}.")
        return parser.parse_args_into_dataclasses(_command_line(options) + given, look_for_args_file=False)[:-1]
    except ValueError as error:
        parser.error(str(error))


def read_config(name: str) -> dict[str, Any]:
    """Read a YAML configuration and those it is based on.

    Raises:
        ValueError: if there is no such file, or it is not a mapping.
    """
    path = Path(name)
    if not path.is_file() and (CONFIGS / f"{name}.yaml").is_file():
        path = CONFIGS / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"no configuration {name}: give a YAML file, or one of {', '.join(_shipped())}.")
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{path} must be a mapping of option names to values.")
    base = options.pop("base", None)
    return options if base is None else {**read_config(str(path.parent / base)), **options}


def _command_line(options: dict[str, Any]) -> list[str]:
    """Write options as arguments, so that argparse checks and converts both in the same way."""
    arguments = []
    for name, value in options.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{name}", *(json.dumps(item) if isinstance(item, dict) else str(item) for item in values)]
    return arguments


def _shipped() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))
