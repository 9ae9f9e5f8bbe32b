"""The version of harness, for whoever inside has to name it."""

__version__ = "0.1.0"
