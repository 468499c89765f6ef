"""Runnable recipes: each is a script with a ``main`` and its own ``--help``."""
