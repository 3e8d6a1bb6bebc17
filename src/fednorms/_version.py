"""The library's version, written into every run."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fednorms")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0.1.0"
