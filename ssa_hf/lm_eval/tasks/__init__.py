"""Tasks for lm-evaluation-harness, as its YAML files."""
