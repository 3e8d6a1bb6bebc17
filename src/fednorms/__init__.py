"""fednorms: federated learning when clients differ.

>>> import fednorms as fn
>>> result = fn.run("fedbn", "digits-shift", model="cnn-small", rounds=2)
>>> result.rounds
2
"""

from fednorms.data import Federation, Site, Split, from_arrays, from_datasets, from_folders
from fednorms.data.registry import federation
from fednorms.errors import BadInput, Diverged, FednormsError, RunFailed
from fednorms.method import Method, method
from fednorms.part import Eval, Part, Pass, Phase, Route, option, part
from fednorms.runs.driver import RoundEvent, resume, run
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.training import Training
from fednorms.tree import Tree
from fednorms.version import __version__

__all__ = [
    "BadInput",
    "Diverged",
    "Eval",
    "Federation",
    "FednormsError",
    "Method",
    "Part",
    "Pass",
    "Phase",
    "Recipe",
    "Result",
    "RoundEvent",
    "Route",
    "RunFailed",
    "Site",
    "Split",
    "Training",
    "Tree",
    "__version__",
    "federation",
    "from_arrays",
    "from_datasets",
    "from_folders",
    "method",
    "option",
    "part",
    "resume",
    "run",
]
