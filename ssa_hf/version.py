"""The version of this package; checkpoints name the one that wrote them."""

__version__ = "0.1.0"
