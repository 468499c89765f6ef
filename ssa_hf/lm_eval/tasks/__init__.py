"""Tasks for lm-evaluation-harness, as its YAML files, and a TaskManager that knows them."""

from pathlib import Path
from typing import Any

import lm_eval.tasks

FOLDER = Path(__file__).parent


class TaskManager(lm_eval.tasks.TaskManager):
    """Knows this package's tasks besides the harness's and those of ``include_path``."""

    def __init__(self, *args: Any, include_path: str | Path | list[str | Path] | None = None, **kwargs: Any) -> None:
        given = include_path if isinstance(include_path, list) else [include_path] if include_path else []
        super().__init__(*args, include_path=[FOLDER, *given], **kwargs)
