"""The harness's own command line, with SSA's model types and tasks: ``python -m ssa_hf.lm_eval``.

    python -m ssa_hf.lm_eval --model ssa --model_args pretrained=CHECKPOINT --tasks ssa_paper --batch_size auto

Model types: ssa, a decoder (refuses a softmax checkpoint), and ssa-mlm, a masked model scored by pseudo-log-likelihood.
Tasks: ssa_paper; ssa_paper_local, the same templates on files (--metadata data=FOLDER); zorro (likewise).
"""

import sys
from importlib.util import find_spec

from ssa_hf.lm_eval import MISSING


def main() -> int:
    """Run the harness; return the exit status."""
    if find_spec("lm_eval") is None:
        print(f"ssa_hf.lm_eval: {MISSING}", file=sys.stderr)
        return 2
    import lm_eval.tasks
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    import ssa_hf.lm_eval.models  # noqa: F401 - registers the model types
    from ssa_hf.lm_eval.tasks import TaskManager

    # The commands look it up there when they run.
    lm_eval.tasks.TaskManager = TaskManager
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
    setup_logging()
    command_line = HarnessCLI()
    arguments = command_line.parse_args()
    try:
        command_line.execute(arguments)
    except (OSError, ValueError) as error:
        if getattr(arguments, "verbosity", None) == "DEBUG":
            raise
        message = " ".join(str(error).split("\n\n")[0].split())
        print(f"ssa_hf.lm_eval: {message} (--verbosity DEBUG shows where)", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
