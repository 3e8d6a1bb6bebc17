"""The library's version, written into every run."""

__version__ = "0.2.0.dev0"
