"""lm-evaluation-harness with SSA: its command line, model types and tasks."""
