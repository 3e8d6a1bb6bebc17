"""Opening an engine by the name that a recipe gives it."""

from __future__ import annotations

from fednorms.core.states import Task
from fednorms.data import Federation
from fednorms.data.on_demand import OnDemand
from fednorms.engines.base import EngineSettings
from fednorms.engines.graphs import Graphs
from fednorms.engines.local import LocalEngine
from fednorms.engines.loop import Loop
from fednorms.engines.many_devices import Devices, gpus
from fednorms.engines.states import ClientStates
from fednorms.engines.workers import Workers
from fednorms.engines.workers.auto import loop_or_workers


def open_engine(
    name: str, task: Task, training: Federation, testing: Federation, store: ClientStates, settings: EngineSettings
) -> LocalEngine:
    """The engine of that name, on the device of the task's model."""
    on_cpu = task.like.device.type == "cpu"
    if isinstance(training.sites, OnDemand) and not on_cpu and name != "loop":
        loop = Loop(task, training, testing, store, settings)
        loop.notes.append("clients that are made on demand train one after the other, without CUDA graphs")
        return loop
    if name == "workers" and on_cpu:
        return Workers(task, training, testing, store, settings)
    if name == "workers" and len(devices := gpus(settings.workers)) > 1:
        return Devices(task, training, testing, store, settings, devices)
    if name in ("graphs", "workers"):
        return Graphs(task, training, testing, store, settings)
    if name == "auto":
        return loop_or_workers(task, training, testing, store, settings)
    return Loop(task, training, testing, store, settings)
