"""Python imports this first in every process of a patient Cluster: it lengthens Flower's time limits.

Flower restarts an app that is not up within 30 s, and gives up a process that is silent for 60 s. On a busy machine
both happen to processes that only wait for the processor, and a run may never end.
"""

from __future__ import annotations

import importlib.util
import sys


class Patience:
    """Changes Flower's constants as soon as they are imported: other modules copy them."""

    def find_spec(self, name, path=None, target=None):
        if name != "flwr.common.constant":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.HEARTBEAT_DEFAULT_INTERVAL = module.HEARTBEAT_MAX_INTERVAL

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Patience())
