"""lm-evaluation-harness with SSA: its command line, model types and tasks."""

MISSING = 'lm-eval is not installed: pip install "ssa_hf[eval]", or pip install lm-eval'
