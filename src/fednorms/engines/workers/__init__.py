"""Clients in worker processes of this machine."""

from fednorms.engines.workers.engine import Workers

__all__ = ["Workers"]
