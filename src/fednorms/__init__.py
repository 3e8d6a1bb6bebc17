"""fednorms: federated learning when clients differ.

>>> import fednorms as fn
>>> result = fn.run("fedbn", "digits-shift", model="cnn-small", rounds=2)
>>> result.rounds
2

The names in `__all__` are the public interface, and so are the apps of `fednorms.flower`. Everything else may change.
Names are imported at first use: `import fednorms` and the command line's help need no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from fednorms import _moved
from fednorms._version import __version__

if TYPE_CHECKING:
    from fednorms import layers, methods
    from fednorms.advice.advice import Advice
    from fednorms.advice.advise import advise
    from fednorms.advice.tune import Tuned, tune
    from fednorms.core.errors import BadInput, Diverged, FednormsError, RunFailed
    from fednorms.core.method import Method
    from fednorms.core.norms import Statistics, norm_layer
    from fednorms.core.options import option
    from fednorms.core.part import Eval, Part, Pass, Phase, Route
    from fednorms.core.training import Training
    from fednorms.core.tree import Tree
    from fednorms.core.views import Mechanism, Privacy
    from fednorms.data.arrays import from_arrays, from_datasets
    from fednorms.data.check import Checked, check
    from fednorms.data.federation import Federation, Site, Split
    from fednorms.data.folders import from_folders
    from fednorms.data.on_demand import OnDemand
    from fednorms.data.partition import partition
    from fednorms.data.registry import federation
    from fednorms.evaluation.judgement import Judgement
    from fednorms.explain.describe import describe
    from fednorms.methods.registry import method, part
    from fednorms.papers.analysis.analyze import analyze
    from fednorms.papers.analysis.findings import Findings
    from fednorms.papers.tables.reproduce import Reproduction, reproduce
    from fednorms.reports.report import report
    from fednorms.runs.compare import compare
    from fednorms.runs.comparison import Comparison
    from fednorms.runs.driver import resume, run
    from fednorms.runs.recipe import Recipe
    from fednorms.runs.result import Result
    from fednorms.runs.rounds import RoundEvent
    from fednorms.runs.stopping import STOP, EarlyStopping
    from fednorms.runs.use.adapt import adapt
    from fednorms.runs.use.evaluate import evaluate_run
    from fednorms.runs.use.export import export
    from fednorms.runs.use.judge import judge
    from fednorms.runs.use.load import load_model
    from fednorms.runs.use.open import open_run
    from fednorms.runs.use.predict import predict
    from fednorms.runs.use.verify import Verified, verify

__all__ = [
    "STOP",
    "Advice",
    "BadInput",
    "Checked",
    "Comparison",
    "Diverged",
    "EarlyStopping",
    "Eval",
    "Federation",
    "FednormsError",
    "Findings",
    "Judgement",
    "Mechanism",
    "Method",
    "OnDemand",
    "Part",
    "Pass",
    "Phase",
    "Privacy",
    "Recipe",
    "Reproduction",
    "Result",
    "RoundEvent",
    "Route",
    "RunFailed",
    "Site",
    "Split",
    "Statistics",
    "Training",
    "Tree",
    "Tuned",
    "Verified",
    "__version__",
    "adapt",
    "advise",
    "analyze",
    "check",
    "compare",
    "describe",
    "evaluate_run",
    "export",
    "federation",
    "from_arrays",
    "from_datasets",
    "from_folders",
    "judge",
    "layers",
    "load_model",
    "method",
    "methods",
    "norm_layer",
    "open_run",
    "option",
    "part",
    "partition",
    "predict",
    "report",
    "reproduce",
    "resume",
    "run",
    "tune",
    "verify",
]

_DEFINED_IN = {
    "advice.advice": ("Advice",),
    "advice.advise": ("advise",),
    "advice.tune": ("Tuned", "tune"),
    "core.errors": ("BadInput", "Diverged", "FednormsError", "RunFailed"),
    "core.method": ("Method",),
    "core.norms": ("Statistics", "norm_layer"),
    "core.options": ("option",),
    "core.part": ("Eval", "Part", "Pass", "Phase", "Route"),
    "core.training": ("Training",),
    "core.tree": ("Tree",),
    "core.views": ("Mechanism", "Privacy"),
    "data.arrays": ("from_arrays", "from_datasets"),
    "data.check": ("Checked", "check"),
    "data.federation": ("Federation", "Site", "Split"),
    "data.folders": ("from_folders",),
    "data.on_demand": ("OnDemand",),
    "data.partition": ("partition",),
    "data.registry": ("federation",),
    "evaluation.judgement": ("Judgement",),
    "explain.describe": ("describe",),
    "methods.registry": ("method", "part"),  # the decorator from there: a new part must not take a published name
    "papers.analysis.analyze": ("analyze",),
    "papers.analysis.findings": ("Findings",),
    "papers.tables.reproduce": ("Reproduction", "reproduce"),
    "reports.report": ("report",),
    "runs.compare": ("compare",),
    "runs.comparison": ("Comparison",),
    "runs.driver": ("resume", "run"),
    "runs.recipe": ("Recipe",),
    "runs.result": ("Result",),
    "runs.rounds": ("RoundEvent",),
    "runs.stopping": ("STOP", "EarlyStopping"),
    "runs.use.adapt": ("adapt",),
    "runs.use.evaluate": ("evaluate_run",),
    "runs.use.export": ("export",),
    "runs.use.judge": ("judge",),
    "runs.use.load": ("load_model",),
    "runs.use.open": ("open_run",),
    "runs.use.predict": ("predict",),
    "runs.use.verify": ("Verified", "verify"),
}
_HOME = {name: module for module, names in _DEFINED_IN.items() for name in names}

_SPELLINGS = {"analyse": "analyze"}  # names of version 0.1

sys.meta_path.append(_moved.Finder())


def __getattr__(name: str) -> object:
    if name in ("layers", "methods"):
        return import_module(f"fednorms.{name}")
    name = _SPELLINGS.get(name, name)
    if name in _HOME:
        return getattr(import_module(f"fednorms.{_HOME[name]}"), name)
    raise AttributeError(f"module 'fednorms' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
