"""Everything that `import fednorms as fn` offers, imported; `fednorms/__init__.py` loads this when first used."""

from fednorms.analysis.analyse import analyse
from fednorms.analysis.findings import Findings
from fednorms.data import Federation, Site, Split, from_arrays, from_datasets, from_folders
from fednorms.data.partition import partition
from fednorms.data.registry import federation
from fednorms.describe import describe
from fednorms.errors import BadInput, Diverged, FednormsError, RunFailed
from fednorms.method import Method, method
from fednorms.part import Eval, Part, Pass, Phase, Route, option, part
from fednorms.runs.after import adapt, evaluate_run, export, load_model, open_run, predict
from fednorms.runs.compare import Comparison, compare
from fednorms.runs.driver import RoundEvent, resume, run
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.tables.reproduce import Reproduction, reproduce
from fednorms.training import Training
from fednorms.tree import Tree
from fednorms.version import __version__

__all__ = [
    "BadInput",
    "Comparison",
    "Diverged",
    "Eval",
    "Federation",
    "FednormsError",
    "Findings",
    "Method",
    "Part",
    "Pass",
    "Phase",
    "Recipe",
    "Reproduction",
    "Result",
    "RoundEvent",
    "Route",
    "RunFailed",
    "Site",
    "Split",
    "Training",
    "Tree",
    "__version__",
    "adapt",
    "analyse",
    "compare",
    "describe",
    "evaluate_run",
    "export",
    "federation",
    "from_arrays",
    "from_datasets",
    "from_folders",
    "load_model",
    "method",
    "open_run",
    "option",
    "part",
    "partition",
    "predict",
    "reproduce",
    "resume",
    "run",
]
