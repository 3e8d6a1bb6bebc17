"""Import paths of version 0.1: each fails with the line to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

_PUBLIC = {
    "analysis.analyse": "analyze",
    "describe": "describe",
    "errors": "BadInput, Diverged, FednormsError, RunFailed",
    "method": "Method, method",
    "options": "option",
    "part": "Eval, Part, Pass, Phase, Route, option, part",
    "public": "run",
    "runs.after": "adapt, evaluate_run, export, load_model, open_run, predict",
    "runs.opened": "open_run",
    "tables.reproduce": "Reproduction, reproduce",
    "training": "Training",
    "tree": "Tree",
    "version": "__version__",
}
_PRIVATE = {
    "accounting": "core.accounting",
    "analysis": "papers.analysis",
    "blame": "core.error_origin",
    "clustering": "core.clustering",
    "data.ahead": "data.read_ahead",
    "data.preprocessing": "core.preprocessing",
    "data.repeats": "data.duplicates",
    "engines.capture": "engines.graphs.capture",
    "engines.exams": "engines.graphs.evaluation",
    "engines.layout": "engines.graphs.layout",
    "engines.letters": "engines.workers.transport",
    "engines.measured": "engines.workers.auto",
    "engines.pool": "engines.workers.pool",
    "engines.sampling": "core.sampling",
    "engines.store": "runs.store.clients",
    "engines.unguarded": "engines.workers.unguarded",
    "engines.waiting": "engines.graphs.pending",
    "flower.deployable": "explain.deployable",
    "gradients": "core.step",
    "hook_returns": "core.checks",
    "layers.carry": "layers.replacement",
    "layers.keyed_dropout": "core.dropout",
    "layers.moments": "core.moments",
    "layers.norm_act": "core.norm_act",
    "layers.norms": "core.norms",
    "layers.surgery": "core.surgery",
    "methods.alone": "methods.baselines",
    "models.head": "core.head",
    "near": "core.options",
    "net": "core.net",
    "noise": "core.noise",
    "overview": "explain.overview",
    "passes": "core.passes",
    "privacy": "explain.leaves",
    "protection": "core.protection",
    "reductions": "core.reductions",
    "runs.adapting": "runs.use.adapt",
    "runs.atomic": "runs.store.atomic",
    "runs.checkpoint": "runs.store.checkpoint",
    "runs.choosing": "runs.use.choose",
    "runs.directory": "runs.store.directory",
    "runs.evaluating": "runs.use.evaluate",
    "runs.exporting": "runs.use.export",
    "runs.facts": "data.facts",
    "runs.handed_over": "runs.identity",
    "runs.loading": "runs.use.load",
    "runs.packing": "runs.store.packing",
    "runs.predicting": "runs.use.predict",
    "states": "core.states",
    "tables": "papers.tables",
    "views": "core.views",
}


def advice(module: str) -> str:
    """What to write instead of an import path of version 0.1; empty if it was none.

    >>> advice("fednorms.tree")
    'fednorms.tree has moved. Write: from fednorms import Tree'
    >>> advice("fednorms.net")
    'fednorms.net has moved. Write: from fednorms.core.net import ... (private: it may move again)'
    """
    old = module.removeprefix("fednorms.")
    if old in _PUBLIC:
        return f"{module} has moved. Write: from fednorms import {_PUBLIC[old]}"
    if old in _PRIVATE:
        return f"{module} has moved. Write: from fednorms.{_PRIVATE[old]} import ... (private: it may move again)"
    return ""


class Finder:
    """Asked by Python after all other finders: explains imports of modules that have moved."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError with the new line for a moved module; otherwise find nothing."""
        if name.startswith("fednorms.") and (text := advice(name)):
            raise ModuleNotFoundError(text, name=name)
