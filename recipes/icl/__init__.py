"""In-context learning of quantifiers and linear functions: tasks, model, evaluation, figures, and the command."""
