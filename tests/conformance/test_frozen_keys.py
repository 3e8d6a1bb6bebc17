"""Words that are keys: in files, messages, recipes, seeds and commands. A rename must not change any of them.

Runs, packs and results of version 0.1 are read by these words, and random numbers are hashed from some of them. Every
test compares what the code uses with a literal. If one fails after a rename, undo that part of the rename. Change a
literal only together with a version note in the changelog, and code that still reads the old word.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import re
import struct
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import fednorms as fn
from fednorms import layers
from fednorms.cli import main as command_line
from fednorms.core import noise, states, views
from fednorms.core.error_origin import LIBRARIES
from fednorms.core.part import HOOKS, REGISTRY, SUMS, Slot
from fednorms.core.sampling import Participation
from fednorms.core.training import OPTIMIZERS, SCHEDULES
from fednorms.data.generate.corruptions import CORRUPTIONS
from fednorms.data.pack import pack
from fednorms.data.partition import plan as plan_partition
from fednorms.data.readers import READERS
from fednorms.data.registry import federations
from fednorms.data.rules import RULES, draws, rules
from fednorms.data.show import view as view_federation
from fednorms.data.splits import split
from fednorms.evaluation.modes import MEASURED, Mode
from fednorms.evaluation.modes import Model as MODELS_TESTED
from fednorms.evaluation.modes import Statistics as STATISTICS
from fednorms.explain.leaves import what_leaves
from fednorms.flower import lifeline
from fednorms.flower import settings as flower_settings
from fednorms.flower.generations import Generations
from fednorms.flower.project import write_project
from fednorms.flower.site import open_site
from fednorms.methods.registry import names as method_names
from fednorms.models.registry import models
from fednorms.papers.analysis.measures import ANALYSES
from fednorms.papers.tables import selectors
from fednorms.papers.tables import table as table_module
from fednorms.papers.tables.catalog import known as known_tables
from fednorms.papers.tables.catalog import listing
from fednorms.runs import identity
from fednorms.runs.losses import LOSSES
from fednorms.runs.store import checkpoint
from fednorms.transforms.chains import CHAINS
from tests.support.after import write_images
from tests.support.tables import MINI, table

# Functions that turn names into random numbers.
HASHERS = {"seed_of", "stream", "permutation", "normals", "chance", "draws", "_Draws", "repeatable", "shuffled"}
HASHERS |= {"_shuffled", "even", "photographed"}

SOURCES = Path(fn.__file__).parent


# -- helpers --------------------------------------------------------------------------------------------------------
def words(text: str) -> list[str]:
    """The words of a text, in order."""
    return text.split()


def fields(value: Any, free: str = "", at: str = "") -> list[str]:
    """The dotted paths of all values in nested dictionaries and lists; a key below a `free` one is shown as `*`."""
    if isinstance(value, dict) and value:
        loose = at.rpartition(".")[2].removesuffix("[]") in free.split()
        inner = [(f"{at}.{'*' if loose else key}" if at else str(key), v) for key, v in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        inner = [(f"{at}[]", v) for v in value]
    else:
        return [at]
    return list(dict.fromkeys(path for name, v in inner for path in fields(v, free, name)))


def options_of(cls: type) -> str:
    """The options of a part or a rule with their defaults and choices, as text."""
    said = []
    for f in dataclasses.fields(cls):
        choices = f.metadata.get("choices")
        said.append(f"{f.name}={f.default!r}" + (f" of {'|'.join(map(str, choices))}" if choices else ""))
    return ", ".join(said)


def choices_of(cls: type) -> dict[str, list[Any]]:
    """The words that a setting may have, for every setting with a list of them."""
    found: dict[str, list[Any]] = {}
    for name, hint in get_type_hints(cls).items():
        inner = [hint, *get_args(hint)]
        for kind in inner:
            if get_origin(kind) is Literal:
                found[name] = list(get_args(kind))
    return found


def hashed_words() -> list[str]:
    """The words in all calls that make seeds from names; `{}` is a value, `,` separates two words."""
    found = set()
    for file in SOURCES.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants: dict[str, list[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                arms = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
                texts = [arm.value for arm in arms if isinstance(arm, ast.Constant) and isinstance(arm.value, str)]
                constants.setdefault(node.targets[0].id, []).extend(texts)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called not in HASHERS:
                continue
            told = [text for arg in node.args if (text := _word(arg, constants))]
            if told and not all(text == "{}" for text in told):
                found.update(",".join(pieces) for pieces in _product(told))
    return sorted(found)


def _word(node: ast.expr, constants: dict[str, list[str]]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.Name) and constants.get(node.id):
        return "|".join(constants[node.id])
    return ""


def _product(told: list[str]) -> list[list[str]]:
    out: list[list[str]] = [[]]
    for text in told:
        out = [[*before, word] for before in out for word in text.split("|")]
    return out


def tiny(name: str = "tiny") -> fn.Federation:
    """Two sites of whole numbers: nothing here depends on a machine's arithmetic."""
    sites = {}
    for k, site in enumerate(("north", "south")):
        n = 16
        y = np.arange(n) % 2
        x = (np.arange(n * 3 * 64).reshape(n, 3, 8, 8) * 7 + 40 * k + 60 * y[:, None, None, None]) % 256
        sites[site] = (x.astype(np.uint8), y)
    return fn.from_arrays(sites, classes=["cat", "dog"], val=0.25, test=0.25, name=name)


def recipe(method: str = "fedbn", **values: Any) -> fn.Recipe:
    made = {"method": method, "rounds": 2, "threads": 1, "engine": "loop", "training": {"batch_size": 4, "lr": 0.01}}
    return fn.Recipe.make(made | values)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with every kind of score."""
    path = tmp_path_factory.mktemp("frozen") / "run"
    told = recipe("fedbn", evaluate=["auto", "after_local"], evaluate_every=2)
    fn.run(federation=tiny(), recipe=told, out=path)
    return path


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


# -- seeds ----------------------------------------------------------------------------------------------------------
SEEDS = [
    (("data", 0, 3, "hospital-a"), 6132464229441900251),
    (("data", 0, 31), 3797319834280743516),
    (("data", 0, 3, 1), 6594120388034643470),
    (("adapt", 1, 2, "north", 0), 8780087002640842250),
    (("cohort", 0, 5), 2597389017531846715),
    (("cohort", 0, 5, 1), 8335359053418372126),
    (("model", 0, "cnn-small"), 3365304072022465959),
    (("noise", 0, 1, "north", False), 8638160743576964373),
    (("noise", 0, 1, "north", True), 1016670992336329552),
    (("torch", 0), 1186004398889587351),
    (("stream", "features.drop"), 8439189020904712280),
    (("split", 0, "clinic", 1), 1677108575371233483),
    (("reader", "tenth", 0, "photo", 3), 1890100866182812680),
    (("partition", 0, "all"), 9162097701374191433),
    (("digits-shift", 0, "clean", "train"), 3821007121860299572),
    (("test order", "clinic", 12), 9020288269896034625),
    (("pass", 7, 0), 3069650313000490595),
    (("noise of a pass", 0, 1, "north", "hbn"), 5943202906339029528),
    (("noise of layer inputs", 0, 1, "north"), 1579511979561848240),
    (("order of a pass", 9), 339764906493223130),
    (("straggles", 0, 2, "north"), 3845924709461378932),
    (("straggler's work", 0, 2, "north"), 4932861213067222099),
    (("privacy conv.weight", 0, 1, None), 8563851977160370873),
    (("projection", 0.5), 1138993263735416767),
    (("wsconv", "conv1", 0.25), 4815843090954273771),
    ((), 8238016292129134938),
    (("",), 2590984705779065588),
    (("é",), 4660715824673782317),
    ((True,), 2036663784989937100),
    ((1,), 8992774166669296750),
    (("1",), 4874322630454220205),
    ((None,), 3775019022500476887),
]


def test_seeds_are_hashed_from_names_and_their_types():
    assert [(names, noise.seed_of(*names)) for names, _ in SEEDS] == SEEDS


def test_streams_and_keyed_numbers_are_the_same_whole_numbers():
    assert {name: noise.stream(name) for name in ("features.drop", "part fraug", "")} == {
        "features.drop": 2808539224,
        "part fraug": 996632965,
        "": 3698126519,
    }
    drawn = noise.hashed_uniform(torch.tensor([7, 11]), 3, (6,), torch.float64)
    assert (drawn * 2**23 - 0.5).tolist() == [3295536.0, 370802.0, 6745040.0, 8279148.0, 5122552.0, 2930389.0]
    assert draws("a", 1).randint(0, 1000, 5).tolist() == [45, 729, 259, 169, 791]


def test_splits_are_the_same_rows():
    parts = split([0] * 8 + [1] * 8, {"val": 0.25, "test": 0.25}, seed=0, name="clinic")
    assert {part: at.tolist() for part, at in parts.items()} == {
        "train": [0, 1, 3, 5, 8, 9, 10, 14],
        "val": [6, 7, 13, 15],
        "test": [2, 4, 11, 12],
    }


HASHED_WORDS = [
    "adapt",
    "bootstrap",
    "bootstrap of seeds",
    "channel attention",
    "client tests",
    "clients",
    "cohort",
    "corruption",
    "data",
    "digits-crowd",
    "digits-crowd,camera",
    "digits-five",
    "digits-shift",
    "embedding",
    "fraug",
    "gaussian",
    "gaussian draws",
    "greg",
    "greg pool",
    "groups",
    "mnist-m",
    "model",
    "noise",
    "noise of a pass",
    "noise of counts",
    "noise of layer inputs",
    "order",
    "order of a pass",
    "part {}",
    "partition",
    "pass",
    "predict",
    "privacy {}",
    "projection",
    "reader",
    "server",
    "shift,camera",
    "shift,labels",
    "show",
    "skew eraser",
    "split",
    "straggler's work",
    "straggles",
    "stratified",
    "stream",
    "synth-digits",
    "tenth",
    "test",
    "test order",
    "top",
    "torch",
    "verify",
    "wsconv",
    "{} augment",
    "{} gaussian",
]


def test_words_that_seeds_are_hashed_from():
    assert hashed_words() == HASHED_WORDS


# -- recipes --------------------------------------------------------------------------------------------------------
RECIPE = {
    "method": "fedavg",
    "federation": "digits-shift",
    "model": "cnn-small",
    "rounds": 30,
    "seed": 0,
    "participation": "all",
    "weighting": "auto",
    "training": {
        "epochs": 1,
        "steps": None,
        "batch_size": 32,
        "lr": 0.05,
        "schedule": "const",
        "decay": 0.998,
        "optimizer": "sgd",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip": None,
        "last": "keep",
        "keep_momentum": False,
        "warmup": None,
        "client_epochs": None,
    },
    "data": {
        "root": "",
        "protocol": "",
        "complete": True,
        "allow_pickle": False,
        "size": None,
        "seed": None,
        "val": None,
        "test": None,
        "group": "",
        "channels": None,
        "group_across": False,
        "copies": "keep",
        "skip_broken": False,
        "subset": None,
        "normalize": "",
        "hold_out": [],
        "proxy": "",
        "augment": "auto",
        "partition": "",
    },
    "loss": "auto",
    "class_weights": "auto",
    "metric": "auto",
    "head": [],
    "pretrained": False,
    "weights": "",
    "evaluate": ["auto"],
    "evaluate_every": 1,
    "validate_every": None,
    "patience": None,
    "checkpoint_every": 1,
    "keep_checkpoints": "newest",
    "keep_predictions": None,
    "on_divergence": "stop",
    "engine": "auto",
    "workers": 0,
    "device": "auto",  # version 0.1: "cpu"
    "precision": "float32",
    "deterministic": True,
    "threads": 1,
    "memory": None,
    "state_limit_mb": 1024,
    "version": "VERSION",
    "fingerprint": "",
    "own_parts": {},
}
# Added after 0.1, and only stored where they are set, as in [training].
STORED = [key for key in RECIPE if key not in ("patience", "memory", "keep_predictions")]
TRAINING_CHOICES = {"last": ["keep", "drop", "fill"]}
RECIPE_CHOICES = {
    "weighting": ["auto", "size", "uniform"],
    "class_weights": ["auto", "none", "balanced"],
    "metric": ["auto", "accuracy", "balanced_accuracy"],
    "keep_checkpoints": ["newest", "all", "resume"],
    "on_divergence": ["stop", "skip"],
    "engine": ["auto", "loop", "graphs", "workers"],
    "precision": ["float32", "tf32", "bfloat16", "float64"],
}


def test_recipe_keys_and_defaults():
    made = fn.Recipe()
    plain = made.model_dump(mode="json") | {"training": dict(vars(made.training)), "version": "VERSION"}
    assert plain == RECIPE
    assert list(plain) == list(RECIPE)
    for inner in ("training", "data"):
        assert list(plain[inner]) == list(RECIPE[inner])


def test_words_that_settings_may_have():
    assert choices_of(fn.Training) == TRAINING_CHOICES
    assert SCHEDULES == ("const", "exp", "step", "cosine")  # which may also be custom:NAME@HASH
    assert OPTIMIZERS == ("sgd", "adam", "adamw")
    assert choices_of(fn.Recipe) == RECIPE_CHOICES


RECIPE_TEXT = """\
method = "fedprox(mu=0.5) + fedbn"
federation = "digits-shift"
model = "cnn-small"
rounds = 30
seed = 0
participation = "all"
weighting = "auto"
loss = "auto"
class_weights = "auto"
metric = "auto"
head = []
pretrained = false
weights = ""
evaluate = ["auto"]
evaluate_every = 1
checkpoint_every = 1
keep_checkpoints = "newest"
on_divergence = "stop"
engine = "auto"
workers = 0
device = "auto"
precision = "float32"
deterministic = true
threads = 1
state_limit_mb = 1024
version = "VERSION"
fingerprint = ""

[training]
epochs = 1
batch_size = 32
lr = 0.05
schedule = "const"
decay = 0.998
optimizer = "sgd"
momentum = 0.0
weight_decay = 0.0
last = "keep"
keep_momentum = false

[data]
root = ""
protocol = ""
complete = true
allow_pickle = false
group = ""
hold_out = []
proxy = ""
augment = "auto"
partition = ""

[own_parts]
mine = "12ab"
"""


def test_a_recipe_as_text():
    text = fn.Recipe(method="fedprox(mu=0.5) + fedbn", own_parts={"mine": "12ab"}).to_toml()
    assert re.sub(r'version = ".*"', 'version = "VERSION"', text) == RECIPE_TEXT


EVALUATED = [
    "global",
    "personal",
    "after_local",
    "adapted",
    "unseen",
    "global/batch",
    "global/batch:32",
    "personal/own",
    "unseen/re-estimated",
    "global/test-time",
    "unseen/test-time:32",
    "global/global",
    "averaged/global",
]


def test_evaluation_modes_and_participation():
    assert list(get_args(MODELS_TESTED)) == ["global", "personal", "after_local", "adapted", "unseen", "averaged"]
    assert list(get_args(STATISTICS)) == ["auto", "global", "own", "batch", "re-estimated", "test-time"]
    assert MEASURED == "@test"
    assert [str(Mode.read(text)) for text in EVALUATED] == EVALUATED
    told = [Participation.read(text) for text in ("all", "fixed:3", "fixed:0.5", "bernoulli:0.4")]
    assert [(p.kind, p.rate) for p in told] == [("all", 1.0), ("fixed", 3), ("fixed", 0.5), ("bernoulli", 0.4)]


# -- names ----------------------------------------------------------------------------------------------------------
METHODS = {
    "adabn": "",
    "agc": "clip=0.64, min_batch=0",
    "agn": "tau=5.0, groups=2, variant='paper' of paper|author, eval_mode='soft' of soft|hard|sample, "
    "keep=0.997, eps=1e-05, freeze_on_saturation=False",
    "alignfeatures": "lam=1.0, head_epochs=1, head_lr=0.1",
    "alignstats": "lam=0.1, beta=0.001",
    "anfr": "ratio=16, gain=1.0",
    "apfl": "alpha=0.5, adaptive=False",
    "atp": "after=0.5, eta=0.1, online=False",
    "augment": "chain='crop_flip' of crop_flip|flip|crop_flip_cutout|feddyn|feddyn_cifar100|flip_rotate|fairface|isic",
    "centralised": "",
    "consensus": "",
    "ditto": "lam=1.0",
    "dpcentral": "clip=1.0, noise=1.0, delta=1e-05, draws='auto' of auto|seeded|system",
    "dplocal": "clip=1.0, noise=1.0, delta=1e-05, draws='auto' of auto|seeded|system",
    "eraser": "tau=0.5, ratio=2, kernel=3 of 1|3|5|7, activate=True",
    "fbn": "rho=0.1",
    "fedacg": "lam=0.85, beta=0.001",
    "fedadagrad": "lr=0.01, beta1=0.0, tau=0.001",
    "fedadam": "lr=0.01, beta1=0.9, beta2=0.99, tau=0.001",
    "fedala": "layers=1, eta=1.0, share=0.8, threshold=0.1",
    "fedap": "lam=0.5",
    "fedavgm": "beta=0.9, lr=1.0",
    "fedbabu": "epochs=5, lr=0.001",
    "fedbn": "upload=False",
    "fedcm": "alpha=0.1",
    "feddbe": "kappa=1.0, momentum=0.1",
    "feddc": "alpha=0.01, variant='paper' of paper|author",
    "feddecorr": "beta=0.1, variant='author' of author|paper",
    "feddg": "low=0.003, step=0.001, clip=100.0, spectra=16, variant='paper' of paper|author",
    "feddgga": "step=0.2",
    "feddyn": "alpha=0.01, form='paper' of paper|code",
    "fedexp": "eps=0.001, average_last_two=True, variant='paper' of paper|author",
    "fedfa": "p=0.5, momentum=0.99, variance='channel' of channel|scalar, after=''",
    "fedfn": "bias=True",
    "fedfr": "mu=0.005",
    "fedheal": "tau=0.3, beta=0.4",
    "fediir": "penalty=0.001, ema=0.95",
    "fedlaw": "epochs=20, lr=0.01, form='exp' of exp|quad, optimizer='adam' of adam|sgd, batch_size=128",
    "fedlc": "tau=1.0",
    "fedlesam": "rho=0.1",
    "fednorm": "",
    "fednova": "mu=None, variant='paper' of paper|author",
    "fedntd": "beta=1.0, tau=1.0",
    "fedper": "",
    "fedplvm": "lam=1.0, alpha=0.25, tau=0.07",
    "fedproto": "lam=1.0, weights='count' of count|uniform, predict='prototype' of prototype|head",
    "fedprox": "mu=0.001, straggler_fraction=0.0",
    "fedrdn": "variant='paper' of paper|author",
    "fedrep": "head_epochs=10",
    "fedrod": "",
    "fedsam": "rho=0.1, kind='sam' of sam|asam, eta=0.01",
    "fedsmoo": "lam=0.1, rho=0.1",
    "fedspeed": "lam=0.1, rho=0.1, alpha=1.0",
    "fedsr": "l2r=0.01, cmi=0.001, dim=0, samples=20",
    "fedtan": "",
    "fedwsq": "bits=4 of 1|2|4|32, momentum=0.1, start=0.001, first=False",
    "fedyogi": "lr=0.01, beta1=0.9, beta2=0.99, tau=0.001",
    "finetune": "epochs=5, factor=0.1, train='all' of all|head|body, weight_decay=0.0",
    "fixbn": "switch=0.5",
    "fpl": "lam=1.0, tau=0.02",
    "fraug": "latent=32, gamma=0.01, lam_g=1.0, lam_ft=1.0, factor=5.0, momentum=0.3, distance='l2' of l2|mmd",
    "frn": "learn_eps=False",
    "gn": "groups=0",
    "gperxan": "lam=0.5",
    "greg": "alpha=1.0, rho=0.1, detach_global=False",
    "hbn": "rate=0.002, variant='paper' of paper|author",
    "inorm": "",
    "krum": "byzantine=1, keep=1",
    "lgfedavg": "layers=0, shared=''",
    "ln": "",
    "maxweight": "share=0.5",
    "median": "",
    "mixheads": "",
    "mixbn": "kind='fixed' of global|fixed|learned|ensemble, lam=0.5",
    "moon": "mu=0.1, temperature=0.5, projection=0",
    "nonorm": "",
    "normbound": "bound=0.0, relative=3.0",
    "partialfed": "strategy='no_bn_no_head' of no_bn_no_head|no_bn|bottom_up|top_down|adaptive, m=1, temperature=5.0, "
    "cooling=0.965, choice_rate=0.1, choice_epochs=1",
    "perfedavg": "alpha=0.0, beta=0.0, variant='first' of first|exact|hessian_free, delta=0.001",
    "pfedme": "lam=1.0, inner=5, rate=0.05, beta=1.0, mu=0.0",
    "pn": "noise=0.0",
    "rbn": "",
    "scaffold": "control='auto' of auto|gradient|difference, variant='paper' of paper|feddc|fedntd, "
    "option='II' of I|II",
    "silobn": "",
    "sn": "biased=False",
    "spherefed": "loss_kind='mse' of mse|ce, temperature=1.0, mse_reduction='mean' of mean|sum_over_classes",
    "standalone": "",
    "trimmedmean": "fraction=0.2",
    "wn": "variant='paper' of paper|author",
    "ws": "",
    "wsconv": "form='listing' of listing|formula, add_bias=False, start='keep' of keep|xavier, nf_residual=False",
}
SUMMED = {
    "fdse": ("lam=0.1, tau=0.5, beta=0.001, ratio=2, activate=True", "eraser + consensus + alignstats"),
    "fednn": ("tau=5.0, groups=2, variant='paper', keep=0.997, freeze_on_saturation=False", "wn + agn"),
    "fedpac": ("lam=1.0, head_epochs=1, head_lr=0.1", "alignfeatures + mixheads"),
    "fedwon": ("clip=0.64, min_batch=32, start='keep', nf_residual=False", "nonorm + wsconv + agc(min_batch=32)"),
}


def test_methods_with_their_options_and_defaults():
    known = method_names()
    ours = {n: cls for n, cls in REGISTRY.items() if cls.__module__.startswith("fednorms.")}
    assert {name: options_of(cls) for name, cls in sorted(ours.items())} == METHODS
    summed = {}
    for name, make in sorted(SUMS.items()):
        given = inspect.signature(make).parameters.values()
        summed[name] = (", ".join(f"{p.name}={p.default!r}" for p in given), str(fn.method(name)))
    assert summed == SUMMED
    assert {*ours, *summed, "fedavg"} <= set(known)


RULES_KNOWN = {
    "dirichlet": "clients=100, beta=0.3, smallest=10, within='all' of all|domain, test='deal' of "
    "deal|alike|personal|whole",
    "dirichlet_client": "clients=100, beta=0.3, sigma=0.0, within='all' of all|domain, test='deal' of "
    "deal|alike|personal|whole",
    "even_domain_split": "clients=20, test='deal' of deal|alike|personal|whole",
    "group_sizes": "clients=100, group=10, delta=50.0, shards=10, within='all' of all|domain, test='alike' of "
    "deal|alike|personal|whole",
    "heterogeneity": "level=1, parts=10, test='whole' of deal|alike|personal|whole",
    "iid": "clients=100, balanced=False of False|True, sigma=0.0, within='all' of all|domain, test='deal' of "
    "deal|alike|personal|whole",
    "one_domain_per_client": "test='deal' of deal|alike|personal|whole",
    "sharding": "clients=100, shards=10, within='all' of all|domain, test='alike' of deal|alike|personal|whole",
}


def test_partition_rules_with_their_options_and_defaults():
    assert {name: options_of(RULES[name]) for name in sorted(rules())} == RULES_KNOWN


PROTOCOLS = {
    "digits-five": "fedwon fedwon-cross-device fedwon-cross-device-1000 fednn full fedwon-val fednn-val "
    "fedwon-cross-device-val",
    "office-caltech-10": "fedwon full",
    "office-home": "fednn",
    "office-31": "own",
    "pacs": "fednn greg greg-cross-device official",
    "vlcs": "fednn greg",
    "domainnet": "fedwon greg greg-top100 fednn",
    "cifar-10": "fedntd feddc fedbabu greg",
    "cifar-100": "feddc fedbabu",
    "cifar-10-c": "fednn severity-1 severity-2 severity-3 severity-5",
    "camelyon17": "greg full",
    "fed-isic2019": "flamby lesions",
    "fairface": "fednn",
    "centres": "own",
    "medmnist": "official",
    "npz": "own",
    "huggingface": "own",
}


def test_names_of_models_federations_chains_losses_and_analyses():
    assert list(models()) == words("""
        cnn-small lenet digits-cnn digits-cnn-fedbn alexnet alexnet-fedbn cnn4 vgg11 mobilenet-v1 resnet20
        resnet20-b resnet18-cifar resnet18-cifar-untracked
    """)
    assert list(federations()) == words("""
        digits-shift digits-dials digits-corrupted digits-crowd digits-styles folder:PATH pack:FILE
        digits-five office-caltech-10 office-home office-31 pacs
        vlcs domainnet cifar-10 cifar-100 cifar-10-c camelyon17 fed-isic2019 fairface centres medmnist npz
        huggingface
    """)
    assert {name: " ".join(reader.protocols) for name, reader in READERS.items()} == PROTOCOLS
    assert list(CHAINS) == words("""
        crop_flip flip crop_flip_cutout feddyn feddyn_cifar100 flip_rotate fairface isic
    """)
    assert list(LOSSES) == words("cross_entropy focal")
    assert sorted(ANALYSES) == words("""
        bn-statistics bn-variance divergence drift-embedding embedding feature-maps filter-drift four-factors
        loss-bound norms smallest-probability test-gap training-gap
    """)
    assert list(CORRUPTIONS) == words("""
        gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog
        brightness contrast elastic_transform pixelate jpeg_compression speckle_noise gaussian_blur spatter saturate
    """)


READER_OPTIONS = {
    "digits-five": "root protocol size seed complete allow_pickle",
    "office-caltech-10": "root protocol size seed complete allow_pickle cache memory_limit",
    "office-home": "root protocol size seed complete cache memory_limit",
    "office-31": "root protocol size seed val test complete cache memory_limit",
    "pacs": "root protocol size seed complete imagenet_norm cache memory_limit",
    "vlcs": "root protocol size seed complete imagenet_norm cache memory_limit",
    "domainnet": "root protocol size seed complete allow_pickle cache memory_limit",
    "cifar-10": "root protocol size complete allow_pickle cache memory_limit",
    "cifar-100": "root protocol size complete allow_pickle cache memory_limit",
    "cifar-10-c": "root protocol size seed complete",
    "camelyon17": "root protocol size seed complete cache memory_limit",
    "fed-isic2019": "root protocol size seed complete cache memory_limit val",
    "fairface": "root protocol size complete cache memory_limit",
    "centres": "root protocol size seed val test cache memory_limit",
    "medmnist": "root protocol size channels",
    "npz": "root protocol size seed val test",
    "huggingface": "root protocol size seed val test",
}


def test_options_of_readers():
    assert {n: " ".join(inspect.signature(r.read).parameters) for n, r in READERS.items()} == READER_OPTIONS


def test_layers_that_an_export_names():
    found = [name for name in layers.__all__ if isinstance(getattr(layers, name), type)]
    assert found == words("""
        AdaptiveGroupNorm AssembledNorm Change FeatureAugment FilterResponseNorm GaussianFeatures GaussianLinear
        GlobalNorm HybridNorm KeyedDropout KeyedDropout2d KeyedStochasticDepth MixedNorm NormAct PersonalLinear
        PopulationNorm RepresentativeNorm ShiftedLinear SkewEraser SwitchableNorm Synthesis UnitNormLinear WNConv2d
        WSConv2d
    """)


# -- what custom parts are written with -----------------------------------------------------------------------------
VIEWS = {
    "Context": "round rounds lr lr_0 momentum keeps_momentum batch_size client samples relative clients attributes "
    "evaluating mean_steps seed cohort deployed slots rates",
    "Step": "params start x y context head path forward base logits features part down mine testing window hessian "
    "buffers start_buffers inputs value",
    "Begin": "context down mine owned received",
    "End": "params start delta mean_grad buffers steps gradient context down mine model owned",
    "Round": "images model up mine sampled total context even",
    "Received": "images clients samples losses models weights ups model mine total context",
    "Mechanism": "clip noise delta where",
    "Phase": "epochs steps train norm lr factor draws weight_decay plain",
    "Pass": "when client server reduce",
    "Eval": "phases server_model predict statistics unseen personal_model adapt",
    "Slot": "name leaf kind module head trainable layer layers model",
}


def test_hooks_and_what_they_see():
    assert sorted(HOOKS) == words("""
        aggregate arrange batch begin decay down down_to evaluation finish grad init loss lr_factor missing model_to
        objective oracle passes path plan privacy receive remember route send server settled stats surgery twin watches
        weigh
    """)
    seen = [*(getattr(views, n) for n in ("Context", "Step", "Begin", "End", "Round", "Received", "Mechanism"))]
    seen += [fn.Phase, fn.Pass, fn.Eval, Slot]
    assert {cls.__name__: " ".join(f.name for f in dataclasses.fields(cls)) for cls in seen} == VIEWS
    assert {r.name: int(r) for r in fn.Route} == {"SHARED": 0, "SENT": 1, "OWNED": 2, "LOCAL": 3, "FROZEN": 4}


def test_the_spelling_of_version_0_1_is_read(tmp_path, capsys):
    """`optimizer` was `optimiser`: in recipes, run directories, stored results, Python and on the command line."""
    american = fn.Recipe.make({"training": {"optimizer": "adamw"}})
    british = fn.Recipe.make({"training": {"optimiser": "adamw"}})
    assert british == american
    assert fn.Recipe.from_toml(american.to_toml().replace("optimizer", "optimiser")) == american
    assert fn.Training(optimiser="adamw") == fn.Training(optimizer="adamw")
    with pytest.raises(fn.BadInput, match="optimizer") as caught:
        fn.Recipe.make({"training": {"optimzer": "adamw"}})
    assert "optimiser" not in str(caught.value)


PUBLIC = {
    "BadInput": "",
    "Comparison": "",
    "Diverged": "",
    "Eval": "",
    "Federation": "",
    "FednormsError": "",
    "Findings": "",
    "Method": "",
    "Part": "",
    "Pass": "",
    "Phase": "",
    "Recipe": "",
    "Reproduction": "",
    "Result": "",
    "RoundEvent": "",
    "Route": "",
    "RunFailed": "",
    "Site": "",
    "Split": "",
    "Training": "",
    "Tree": "",
    "__version__": "",
    "adapt": "path folder out epochs lr which test size group model loss device skip_broken",
    "check": "federation protocol val test seed group group_across copies skip_broken allow_pickle complete cache "
    "progress",
    "analyze": "path name federation model loss device",
    "compare": "methods federation model rounds loss seeds lr epochs batch_size participation training evaluate "
    "device recipe out jobs watch",
    "describe": "method model classes shape head",
    "evaluate_run": "path modes which split federation model loss device",
    "export": "path out site which onnx model",
    "federation": "spec size seed val test root protocol complete allow_pickle group channels group_across copies "
    "skip_broken subset normalize",
    "from_arrays": "sites classes val test seed layout channels groups domains attributes preprocessing name",
    "from_datasets": "sites classes val test seed channels groups domains attributes preprocessing name",
    "from_folders": "root size channels val test seed group cache memory_limit classes preprocessing name "
    "group_across copies skip_broken",
    "load_model": "folder model",
    "method": "text",
    "open_run": "path which federation model loss device",
    "option": "default at_least above at_most choices",
    "part": "name",
    "partition": "federation by seed",
    "predict": "path inputs site which model skip_broken device",
    "report": "what out images federation",
    "reproduce": "name data seeds only settings out jobs device search report allow_pickle incomplete observer rounds "
    "quick dry_run weights",
    "resume": "path federation model loss callback",
    "run": "method federation model rounds seed lr epochs batch_size participation training loss evaluate device "
    "engine head on_divergence weighting recipe out callback",
    "verify": "path",
}


def test_public_names_and_arguments():
    """Names may be added, and arguments after those that are here: no existing call may change its meaning."""
    for name, arguments in PUBLIC.items():
        assert name in fn.__all__
        thing = getattr(fn, name)
        found = list(inspect.signature(thing).parameters) if inspect.isfunction(thing) else []
        assert [n for n in found if n in arguments.split()] == arguments.split(), name


ATTRIBUTES = {
    "Comparison": "about best columns curve failed files methods path rows seeds table to_dict",
    "Federation": "classes clients domains fingerprint hold_out name num_classes pooled preprocessing protocol shape "
    "site sites source stored_shape to_dict unseen without",
    "Findings": "arrays of plain scalars series words",
    "Method": "evaluation having parts path phases weighting",
    "Part": "keeps_all_local name needs_plain_updates normalizes_input paper reduction requires uploads uses_even_mean "
    "uses_mean_gradient weighting",
    "Recipe": "from_toml make read resolved to_toml whole_method",
    "Reproduction": "failed files out ran skipped summary table to_dict",
    "Result": "accuracy best curve domains headline history method model notes path privacy recipe rounds scores "
    "to_dict",
    "RoundEvent": "round rounds row scores state",
    "Site": "attributes counts domain name splits test train unseen val",
    "Split": "batch batches shape stream subset x y",
    "Training": "rate without_effect",
    "Tree": "clone detach dot finite map nbytes pick sqnorm to zeros",
}


def test_attributes_that_users_read():
    for name, told in ATTRIBUTES.items():
        kinds = [c for c in getattr(fn, name).__mro__ if c.__module__.startswith("fednorms")]
        found = {k for c in kinds for k in (*vars(c), *getattr(c, "__annotations__", {}))}
        assert [word for word in words(told) if word not in found] == [], name


def test_exit_codes():
    kinds = (fn.FednormsError, fn.BadInput, fn.RunFailed, fn.Diverged)
    assert [(k.__name__, k.exit_code) for k in kinds] == [
        ("FednormsError", 1),
        ("BadInput", 2),
        ("RunFailed", 1),
        ("Diverged", 1),
    ]


# -- a run on disk --------------------------------------------------------------------------------------------------
FREE = "scores last after_local sites domains clients images attributes own_parts columns curves rows values"
FILES_OF_A_RUN = """
    .lock checkpoints/best/clients/north-f9b8feec1c@000002.safetensors
    checkpoints/best/clients/south-2a93409585@000002.safetensors checkpoints/best/manifest.json
    checkpoints/best/server@000002.safetensors checkpoints/clients/north-f9b8feec1c@000001.safetensors
    checkpoints/clients/north-f9b8feec1c@000002.safetensors
    checkpoints/clients/south-2a93409585@000001.safetensors
    checkpoints/clients/south-2a93409585@000002.safetensors checkpoints/round-000001/manifest.json
    checkpoints/round-000001/server.safetensors checkpoints/round-000002/manifest.json
    checkpoints/round-000002/server.safetensors federation.json metrics.jsonl
    predictions/round-000002/personal-own-test.safetensors recipe.toml summary.json
"""


def test_files_of_a_run(run):
    found = sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file())
    assert found == words(FILES_OF_A_RUN)


def test_federation_json(run):
    assert fields(read(run / "federation.json")) == words("""
        name classes[] shape[] dtype preprocessing.mean[] preprocessing.std[] sites[].name sites[].domain
        sites[].attributes sites[].images.train[] sites[].images.val[] sites[].images.test[] clients[] samples
        stored prepared protocol.augment protocol.loss protocol.class_weights protocol.metric partition hash
    """)


def test_rows_of_metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert fields(rows[0], FREE) == words(
        "round lr clients train_loss dropped diverged bytes_down bytes_up scores seconds"
    )
    assert fields(rows[1], FREE) == words("""
        round lr clients train_loss dropped diverged bytes_down bytes_up scores.*.mode scores.*.statistics
        scores.*.split scores.*.mean scores.*.std scores.*.pooled scores.*.balanced_accuracy scores.*.loss
        scores.*.worst_domain scores.*.worst scores.*.domains.* scores.*.sites.*.accuracy
        scores.*.sites.*.balanced_accuracy scores.*.sites.*.loss scores.*.sites.*.samples scores.*.sites.*.recall[]
        seconds
    """)


def test_a_row_before_a_test_has_the_scores_of_clients_that_do_not_come_again(tmp_path):
    told = recipe("fedavg", rounds=3, participation="fixed:1", evaluate=["after_local"], evaluate_every=3)
    history = fn.run(federation=tiny(), recipe=told, out=tmp_path / "run").history
    between = [row["after_local"] for row in history if "after_local" in row]
    assert fields(next(iter(between[0].values()))) == words("accuracy balanced_accuracy loss samples recall[]")


def test_a_row_under_differential_privacy_and_its_summary(tmp_path):
    pytest.importorskip("dp_accounting")
    fn.run("dpcentral(draws=seeded) + gn(groups=4)", tiny(), recipe=recipe(rounds=1), out=tmp_path / "dp")
    row = json.loads((tmp_path / "dp" / "metrics.jsonl").read_text())
    assert list(row) == words("""
        round lr clients train_loss dropped diverged epsilon bytes_down bytes_up scores seconds
    """)
    summary = read(tmp_path / "dp" / "summary.json")
    assert list(summary) == words("""
        method headline rounds last best_validation seconds bytes_up bytes_down diverged privacy notes recipe hash
    """)
    assert list(summary["privacy"]) == words("part epsilon delta neighbours cohorts")


def test_summary_json(run):
    summary = read(run / "summary.json")
    told = summary.pop("recipe")
    assert fields(summary, FREE) == words("""
        method headline rounds last.*.mode last.*.statistics last.*.split last.*.mean last.*.std last.*.pooled
        last.*.balanced_accuracy last.*.loss last.*.worst_domain last.*.worst last.*.domains.*
        last.*.sites.*.accuracy last.*.sites.*.balanced_accuracy last.*.sites.*.loss last.*.sites.*.samples
        last.*.sites.*.recall[] best_validation.round best_validation.val best_validation.scores.*.mode
        best_validation.scores.*.statistics best_validation.scores.*.split best_validation.scores.*.mean
        best_validation.scores.*.std best_validation.scores.*.pooled best_validation.scores.*.balanced_accuracy
        best_validation.scores.*.loss best_validation.scores.*.worst_domain best_validation.scores.*.worst
        best_validation.scores.*.domains.* best_validation.scores.*.sites.*.accuracy
        best_validation.scores.*.sites.*.balanced_accuracy best_validation.scores.*.sites.*.loss
        best_validation.scores.*.sites.*.samples best_validation.scores.*.sites.*.recall[] seconds bytes_up
        bytes_down diverged notes hash
    """)
    assert list(told) == STORED


def test_manifests_and_states(run):
    folder = run / "checkpoints"
    manifest = read(folder / "round-000002" / "manifest.json")
    assert fields(manifest, "clients") == words("""
        hash round seed server.path server.size server.hash clients.*.path clients.*.size clients.*.hash
        extra.best.round extra.best.val extra.metrics.rows extra.metrics.hash extra.recipe version
    """)
    assert manifest["version"] == 1
    assert manifest["extra"]["metrics"]["rows"] == 2
    assert fields(read(folder / "best" / "manifest.json"), "clients") == words("""
        hash round seed server.path server.size server.hash clients.*.path clients.*.size clients.*.hash
        extra.best.round extra.best.val version
    """)
    server = folder / "round-000002" / "server.safetensors"
    client = next((folder / "clients").glob("north-*"))
    found = {}
    for name, file in (("server", server), ("client", client)):
        with safe_open(file, "pt") as tensors:
            assert list(tensors.metadata()) == ["fednorms"]
            about = json.loads(tensors.metadata()["fednorms"])
            found[name] = (sorted(about), sorted(about["trees"]), sorted(tensors.keys()))
    assert found == STATES


STATES = {
    "server": (
        ["channels_last", "kind", "round", "seed", "trees"],
        ["model", "part/fedbn"],
        [
            "model/conv1.bias",
            "model/conv1.weight",
            "model/conv2.bias",
            "model/conv2.weight",
            "model/conv3.bias",
            "model/conv3.weight",
            "model/head.bias",
            "model/head.weight",
            "model/norm1.bias",
            "model/norm1.num_batches_tracked",
            "model/norm1.running_mean",
            "model/norm1.running_var",
            "model/norm1.weight",
            "model/norm2.bias",
            "model/norm2.num_batches_tracked",
            "model/norm2.running_mean",
            "model/norm2.running_var",
            "model/norm2.weight",
            "model/norm3.bias",
            "model/norm3.num_batches_tracked",
            "model/norm3.running_mean",
            "model/norm3.running_var",
            "model/norm3.weight",
        ],
    ),
    "client": (
        ["channels_last", "kind", "round", "trees"],
        ["local", "part/fedbn", "velocity"],
        [
            "local/norm1.bias",
            "local/norm1.num_batches_tracked",
            "local/norm1.running_mean",
            "local/norm1.running_var",
            "local/norm1.weight",
            "local/norm2.bias",
            "local/norm2.num_batches_tracked",
            "local/norm2.running_mean",
            "local/norm2.running_var",
            "local/norm2.weight",
            "local/norm3.bias",
            "local/norm3.num_batches_tracked",
            "local/norm3.running_mean",
            "local/norm3.running_var",
            "local/norm3.weight",
        ],
    ),
}


def test_a_client_without_tensors_has_no_file(tmp_path):
    server = states.ServerState(3, fn.Tree(w=torch.ones(2)), {}, seed=0)
    checkpoint.save(tmp_path, server, {"north": states.ClientState(2, fn.Tree(), {"mine": fn.Tree()})}, {})
    manifest = read(tmp_path / "round-000003" / "manifest.json")
    assert manifest["clients"] == {"north": {"round": 2, "parts": ["mine"]}}


# -- what comes after a run -----------------------------------------------------------------------------------------
EXPORTED = """
    format fednorms classes[] shape[] dtype preprocessing.channels preprocessing.height preprocessing.width
    preprocessing.resize preprocessing.prepared preprocessing.stored[] preprocessing.mean[] preprocessing.std[]
    preprocessing.measure preprocessing.steps[]
    architecture.model architecture.custom architecture.size architecture.method architecture.head[]
    architecture.precision architecture.changes trained.federation trained.site trained.round trained.rounds
    trained.which trained.seed needs.fednorms needs.why needs.layers needs.load needs.load_without_fednorms
    notes files.README.txt files.load.py files.model.safetensors hash
    architecture.folded card.model card.data.federation card.data.fingerprint card.data.license card.data.published
    card.data.across_machines
    card.data.sites[].site card.data.sites[].domain card.data.sites[].trained card.data.sites[].images.train
    card.data.sites[].images.val card.data.sites[].images.test card.privacy.sent_tensors card.privacy.sent_bytes
    card.privacy.sent_statistics card.privacy.kept_tensors card.privacy.also_sent_by card.privacy.epsilon
    card.privacy.delta card.privacy.neighbours card.versions.fednorms card.versions.trained_with card.versions.torch
    card.versions.python card.recipe
"""


def test_an_exported_model(run, tmp_path):
    fn.export(run, tmp_path / "out", site="north")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "MODEL_CARD.md",
        "README.txt",
        "load.py",
        "model.json",
        "model.safetensors",
    ]
    about = read(tmp_path / "out" / "model.json")
    # The test's scores are a Scored, with a Judgement.
    assert sorted(key for key in fields(about) if not key.startswith("card.tested.")) == sorted(words(EXPORTED))
    assert about["format"] == 2
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as tensors:
        assert sorted(tensors.keys()) == words("""
            conv1.bias conv1.weight conv2.bias conv2.weight conv3.bias conv3.weight head.bias head.weight norm1.bias
            norm1.num_batches_tracked norm1.running_mean norm1.running_var norm1.weight norm2.bias
            norm2.num_batches_tracked norm2.running_mean norm2.running_var norm2.weight norm3.bias
            norm3.num_batches_tracked norm3.running_mean norm3.running_var norm3.weight
        """)


def test_an_export_names_the_layers_it_needs(tmp_path):
    fn.run("fedwon + fedfn", tiny(), recipe=recipe(rounds=1), out=tmp_path / "run")
    fn.export(tmp_path / "run", tmp_path / "out")
    assert read(tmp_path / "out" / "model.json")["needs"]["layers"] == []  # folded into those of torch
    fn.run("sn", tiny(), recipe=recipe(rounds=1), out=tmp_path / "sn")
    fn.export(tmp_path / "sn", tmp_path / "other")
    assert read(tmp_path / "other" / "model.json")["needs"]["layers"] == ["fednorms.layers.SwitchableNorm"]


# -- packs and partitions -------------------------------------------------------------------------------------------
def test_the_header_of_a_pack(tmp_path):
    data = pack(tiny(), tmp_path / "tiny.fnpack").read_bytes()
    magic, version, zero, at, length, _ = struct.unpack_from("<8sIIQQ16s16x", data)
    assert (magic, version, zero) == (b"FNPACK\r\n", 1, 0)
    assert fields(json.loads(data[at : at + length])) == words("""
        name classes[] preprocessing.mean[] preprocessing.std[] protocol.augment protocol.loss
        protocol.class_weights protocol.metric source.spec source.val source.test source.seed shape[] dtype codec
        quality images blocks.images[] blocks.labels[] blocks.rows[] blocks.hashes[] covered hashes_hash data_hash
        sites[].name sites[].domain sites[].attributes sites[].splits.train[] sites[].splits.val[] sites[].splits.test[]
    """)


def test_the_fingerprint_of_whole_numbers():
    assert tiny().fingerprint() == "f1f9ad3d682b4d86490ef5731594939c"


def test_a_saved_partition(tmp_path):
    made = plan_partition(tiny(), "iid(clients=4)")
    assert made.save(tmp_path / "division.json") == "2412e1934d335a2738b4434649bc47b8"
    told = read(tmp_path / "division.json")
    assert told["format"] == "fednorms partition 1"
    assert fields(told) == words("""
        format rule seed sizes.train sizes.val sizes.test hash clients[].name clients[].domain clients[].train[]
        clients[].val[] clients[].test[]
    """)


# -- across machines ------------------------------------------------------------------------------------------------
DEPLOYMENT = {"sites": "", "minimum": 1, "wait": 600.0, "deadline": 3600.0, "out": "run", "classes": "", "channels": 3}
DEPLOYMENT |= {"max_weight": 0.9, "max_images": 1_000_000, "norm_bound": 50.0, "restart": 0}  # added after 0.1


def test_settings_of_a_deployment():
    assert {f.name: f.default for f in dataclasses.fields(flower_settings.Deployment)} == DEPLOYMENT
    told, deployment = flower_settings.read({"recipe": "rounds = 3", "training.lr": 0.5, "deploy.sites": "a,b"})
    assert (told.rounds, told.training.lr, deployment.sites) == (3, 0.5, "a,b")


def test_a_site_keeps_its_state_under_the_same_hash():
    two = fn.Recipe(), fn.Recipe(method="scaffold + fedbn", rounds=3, model="lenet", data={"size": 32, "group": "(p)"})
    assert [flower_settings.fingerprint(r) for r in two] == ["e849fc08e3e0fd791be9", "ddc5192ce2a89d6d133c"]
    kept = Generations(Path("root"), "hash", "north east")
    assert kept.folder.as_posix() == "root/hash/north%20east-165b65e7"


def test_keys_of_a_node():
    made = fn.Recipe(data={"size": 8})
    nothing = flower_settings.Deployment()
    assert open_site(made, nothing, {"site": "faint"}).sites[0].name == "faint"
    site = open_site(made, nothing, {"partition-id": 1, "attribute.modality": "CT"}).sites[0]
    assert (site.name, site.attributes) == ("faint", {"modality": "CT"})


def test_keys_of_a_node_with_a_folder(tmp_path):
    write_images(tmp_path / "images", {"cat": 4, "dog": 4})
    deployment = flower_settings.Deployment(classes="cat,dog")
    node = {"site": "north", "data": str(tmp_path / "images"), "domain": "phone"}
    site = open_site(fn.Recipe(), deployment, node).sites[0]
    assert (site.name, site.domain) == ("north", "phone")


MESSAGES = {
    "evaluate answers": "about:kept about:site personal/own/test:accuracy personal/own/test:balanced_accuracy "
    "personal/own/test:loss personal/own/test:recall personal/own/test:samples "
    "personal/own/val:accuracy personal/own/val:balanced_accuracy personal/own/val:loss "
    "personal/own/val:recall personal/own/val:samples",
    "evaluate asks": "about:accepted about:agreement about:round about:tests arrays:model arrays:part:fedrdn "
    "arrays:part:scaffold",
    "query.hello answers": "about:card",
    "query.hello asks": "about:",
    "query.measure answers": "about:kept about:site arrays:up",
    "query.measure asks": "about:accepted about:agreement about:part about:round about:when arrays:fixed arrays:model "
    "arrays:part:scaffold",
    "train answers": "about:kept about:site after_local:accuracy after_local:balanced_accuracy after_local:loss "
    "after_local:recall after_local:samples arrays:model arrays:part:scaffold metrics:dropped "
    "metrics:loss metrics:steps",
    "train asks": "about:accepted about:agreement about:round about:score arrays:model arrays:part:fedrdn "
    "arrays:part:scaffold",
}


def test_records_and_keys_of_messages(tmp_path):
    pytest.importorskip("flwr")
    from tests.support import flower_in_process

    found: dict[str, set[str]] = {}
    texts: dict[str, list[str]] = {}

    def listen(site, message, reply):
        kind = message.metadata.message_type
        for way, content in (("asks", message.content), ("answers", reply.content)):
            seen = found.setdefault(f"{kind} {way}", set())
            seen |= {f"arrays:{name}" for name in content.array_records}
            for name, record in (*content.config_records.items(), *content.metric_records.items()):
                seen |= {f"{name}:{key}" for key in record} or {f"{name}:"}
                texts.update(
                    {key: list(json.loads(str(record[key]))) for key in ("card", "agreement") if key in record}
                )
        return reply

    flower_in_process.run("fedrdn + scaffold + fedbn", tmp_path, fault=listen, evaluate='["personal", "after_local"]')
    assert {way: " ".join(sorted(keys)) for way, keys in sorted(found.items())} == MESSAGES
    assert texts["card"] == words("""
        site domain classes shape dtype preprocessing train val test counts order protocol
    """)
    assert texts["agreement"] == words("classes shape dtype preprocessing clients samples counts protocol")
    kept = sorted({p.name for p in (tmp_path / "state").rglob("*") if p.is_file()})
    assert kept == words("fixed.safetensors round-000001.safetensors round-000002.safetensors")


def test_a_row_names_lost_sites(tmp_path):
    pytest.importorskip("flwr")
    from tests.support import flower_in_process

    def lose(site, message, reply):
        return None if (site, message.metadata.message_type) == ("faint", "train") else reply

    result, _ = flower_in_process.run("fedavg", tmp_path, fault=lose, rounds=1, deploy__deadline=1.0)
    assert list(result.history[0]) == words("""
        round lr clients train_loss dropped diverged lost bytes_down bytes_up scores seconds
    """)
    assert list(result.history[0]["lost"]) == ["faint"]


def test_files_and_keys_of_a_project(tmp_path):
    made = write_project(tmp_path / "p", fn.Recipe(), flower_settings.Deployment(sites="a,b", classes="cat,dog"))
    assert [path.name for path in made] == words("pyproject.toml fednorms_app.py README.md")
    told = tomllib.loads((tmp_path / "p" / "pyproject.toml").read_text())
    config = told["tool"]["flwr"]["app"].pop("config")
    assert fields(told) == words("""
        project.name project.version project.description project.dependencies[] tool.flwr.app.publisher
        tool.flwr.app.fab-include[] tool.flwr.app.components.serverapp tool.flwr.app.components.clientapp
        tool.fednorms.address
    """)
    assert fields(config) == words("""
        method federation model rounds seed participation weighting loss class_weights metric head pretrained
        weights evaluate evaluate_every checkpoint_every keep_checkpoints on_divergence engine workers device
        precision deterministic threads state_limit_mb training.epochs training.batch_size training.lr
        training.schedule training.decay training.optimizer training.momentum training.weight_decay training.last
        training.keep_momentum data.root data.protocol data.complete data.allow_pickle data.hold_out data.augment
        data.partition deploy.sites deploy.minimum deploy.wait deploy.deadline deploy.out deploy.classes
        deploy.channels deploy.max_weight deploy.max_images deploy.norm_bound deploy.restart
    """)
    assert "from fednorms.flower import client_app, server_app" in (tmp_path / "p" / "fednorms_app.py").read_text()


# -- tables ---------------------------------------------------------------------------------------------------------
TABLE_KEYS = {
    "Table": {
        "paper": "required",
        "label": "required",
        "title": "required",
        "kind": "'table'",
        "analysis": "''",
        "tolerance": "3.0",
        "seeds": "3",
        "search_seeds": "1",
        "selection": "'last'",
        "notes": "[]",
        "recipe": "{}",
        "settings": "required",
        "rows": "required",
        "averages": "{}",
        "ladder": "None",
        "path": "None",
    },
    "Setting": {
        "name": "required",
        "title": "''",
        "recipe": "{}",
        "columns": "required",
        "incomparable": "{}",
        "store": "[]",
        "derived": "[]",
        "counts": "True",
        "split_per_seed": "False",
        "ranked": "''",
    },
    "Row": {
        "name": "required",
        "method": "required",
        "settings": "None",
        "recipe": "{}",
        "at": "{}",
        "published": "{}",
        "counts": "True",
        "averages": "{}",
        "search": "{}",
    },
    "Axis": {"label": "required", "column": "required", "settings": "{}", "rows": "{}"},
}


def test_keys_of_tables():
    kinds = (table_module.Table, table_module.Setting, table_module.Row, table_module.Axis)
    found = {}
    for cls in kinds:
        found[cls.__name__] = {
            name: "required" if info.is_required() else repr(info.get_default(call_default_factory=True))
            for name, info in cls.model_fields.items()
        }
    assert found == TABLE_KEYS
    assert choices_of(table_module.Table) == {"kind": ["table", "figure"], "selection": ["last", "best-val"]}
    assert choices_of(table_module.Setting) == {"store": ["curve", "model", "rounds"]}
    assert table_module.FILE == "table.toml"
    assert [*selectors._PLAIN, *selectors._NAMED] == words("""
        mean pooled domain-mean worst spread seconds bytes domain domains site rounds-to peak
    """)


def test_names_of_tables():
    assert known_tables() == words(TABLES)


TABLES = """
    beyond-cifar beyond-digits beyond-fednn-digit beyond-fedwon-digits beyond-fedwon-office beyond-fedwon-skin
    beyond-fedwon-table-21 beyond-greg-pacs beyond-office beyond-pacs beyond-skin fedfn-table-1 fedfn-table-2
    fedfn-table-3 fedfn-figure-1 fedfn-figure-2 fedfn-figure-3 fedfn-figure-4 fedfn-figure-5
    fedfn-appendix-table-2 fedfn-appendix-table-3 fedfn-appendix-table-4 fedfn-appendix-table-5
    fedfn-appendix-table-6 fedfn-appendix-table-7 fedfn-appendix-table-8 fedfn-appendix-table-9
    fedfn-appendix-table-10 fedfn-appendix-table-11 fedfn-appendix-table-12 fedfn-appendix-table-13
    fedfn-appendix-table-14 fedfn-appendix-figure-1 fedfn-appendix-figure-2 fedfn-appendix-figure-3
    fednn-table-1 fednn-table-2 fednn-table-3 fednn-table-4 fednn-table-5 fednn-table-6 fednn-table-7
    fednn-table-8 fednn-table-9 fednn-table-10 fednn-table-11 fednn-table-12 fednn-figure-5 fednn-figure-6
    fednn-figure-7 fednn-figure-8 fedwon-table-1 fedwon-table-2 fedwon-table-3 fedwon-table-4 fedwon-table-11
    fedwon-table-12 fedwon-table-13 fedwon-table-14 fedwon-table-15 fedwon-table-16 fedwon-table-17
    fedwon-table-18 fedwon-table-19 fedwon-table-20 fedwon-table-21 fedwon-table-22 fedwon-figure-3
    fedwon-figure-4 fedwon-figure-5 fedwon-figure-6 fedwon-figure-11 fedwon-figure-12 fedwon-figure-13
    fedwon-figure-14 fedwon-figure-10a fedwon-figure-10b greg-table-1 greg-table-2 greg-table-3 greg-table-4
    greg-table-5 greg-table-7 greg-table-8 greg-table-9 greg-table-10 greg-figure-1 greg-figure-2 greg-figure-3
    greg-figure-4 greg-figure-5 greg-figure-6 greg-figure-7 greg-figure-9
"""

SEARCHED_ROW = "published.shift = { Clean = 2.0, Avg = 0.1 }"


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory) -> Path:
    """The tiny table, one row of it with a search."""
    folder = tmp_path_factory.mktemp("table")
    more = (SEARCHED_ROW, SEARCHED_ROW + '\nsearch = { "training.lr" = [0.01, 0.02] }')
    mini = table(folder / "mini", MINI, search=more)
    fn.reproduce(mini, out=folder / "out", settings=["shift"], device="cpu")
    return folder / "out"


def test_files_of_a_reproduction(reproduced):
    found = sorted(p.relative_to(reproduced).as_posix() for p in reproduced.rglob("*") if p.is_file())
    assert [name for name in found if not name.endswith(".png")] == words("""
        RESULTS.md results.csv results.json searches.json
    """)


def test_a_stored_result(reproduced):
    told = next(run for run in read(reproduced / "results.json")["runs"] if run["row"] == "FedAvg")
    kept = told.pop("recipe")
    assert fields(told, "last scores domains sites") == words("""
        table setting row hardware jobs data.federation data.layout data.fingerprint data.clients data.unseen
        data.classes data.shape[] data.domains.*.sites data.domains.*.train data.domains.*.val data.domains.*.test
        data.notes seed status date version sources torch headline rounds last.*.clients.count
        last.*.clients.accuracy.mean last.*.clients.accuracy.spread last.*.clients.accuracy.worst
        last.*.clients.accuracy.pooled last.*.clients.balanced.mean last.*.clients.balanced.spread
        last.*.clients.balanced.worst last.*.domains.*.accuracy last.*.domains.*.balanced last.*.domains.*.images
        last.*.sites.*.accuracy last.*.sites.*.balanced last.*.sites.*.images val.clients.count
        val.clients.accuracy.mean val.clients.accuracy.spread val.clients.accuracy.worst val.clients.accuracy.pooled
        val.clients.balanced.mean val.clients.balanced.spread val.clients.balanced.worst val.domains.*.accuracy
        val.domains.*.balanced val.domains.*.images val.sites.*.accuracy val.sites.*.balanced val.sites.*.images
        best.round best.val best.scores.*.clients.count best.scores.*.clients.accuracy.mean
        best.scores.*.clients.accuracy.spread best.scores.*.clients.accuracy.worst
        best.scores.*.clients.accuracy.pooled best.scores.*.clients.balanced.mean
        best.scores.*.clients.balanced.spread best.scores.*.clients.balanced.worst best.scores.*.domains.*.accuracy
        best.scores.*.domains.*.balanced best.scores.*.domains.*.images best.scores.*.sites.*.accuracy
        best.scores.*.sites.*.balanced best.scores.*.sites.*.images bytes seconds.total seconds.round
    """)
    assert list(kept) == STORED
    later = ["group_across", "copies", "skip_broken", "subset", "normalize"]  # recorded where they are set
    assert [k for k in RECIPE["data"] if k not in kept["data"]] == ["root", *later]


def test_a_stored_search(reproduced):
    [told] = read(reproduced / "searches.json")["searches"]
    del told["recipe"], told["data"]
    assert fields(told, "values grid recipe_of chosen") == words("""
        table setting row hardware jobs status date version sources torch grid.*[] metric scores[].values.*
        scores[].mean chosen.* at_edge[] runs[].values.* runs[].seed runs[].val runs[].seconds failed recipe_of.*
    """)


def test_columns_of_results_csv(reproduced):
    assert (reproduced / "results.csv").read_text().splitlines()[
        0
    ] == "setting,row,column,selector,ours,std,seeds,diverged,published,published std,difference,verdict"


def test_findings_of_analyses():
    found = fn.Findings({"gap": 0.25}, {"loss": [(1, 0.5)]}, {"points": np.zeros((1, 2))}, {"client": "a"})
    assert list(found.plain()) == ["scalars", "series", "arrays", "words"]


STORED_KEYS = """
    analysis best bytes curve data date error from hardware headline jobs last recipe rounds row seconds seed
    setting sources status table torch val version
"""


def test_keys_of_the_results_in_the_repository():
    home = SOURCES.parents[1] / "recipes"
    if not home.is_dir():
        pytest.skip("the tables of an installed package come without their results")
    found = set()
    for file in sorted(home.glob("results/*/results.json")):
        found = found.union(*read(file)["runs"])
    assert sorted(found) == words(STORED_KEYS)


def test_columns_of_a_comparison(tmp_path):
    fn.compare(["fedavg"], tiny(), recipe=recipe(rounds=1), seeds=1, out=tmp_path / "compared")
    told = read(tmp_path / "compared" / "comparison.json")
    assert fields(told, "methods accuracy seeds curves about") == words("""
        methods.* seeds[] columns[] best rows[].method rows[].mode rows[].lr rows[].accuracy.*.mean
        rows[].accuracy.*.std rows[].seeds.*.north rows[].seeds.*.south rows[].seeds.*.mean rows[].failed
        rows[].unseen rows[].to_best curves.*[].round curves.*[].mean curves.*[].std about.* notes path files[]
    """)
    assert sorted(p.name for p in (tmp_path / "compared").iterdir()) == words(
        "comparison.csv comparison.json comparison.md curves.png fedavg-0"
    )


# -- identity of custom code ----------------------------------------------------------------------------------------
class Custom(nn.Module):
    """A custom model; its text counts."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(x.flatten(1))


def custom_loss(logits, y):
    return nn.functional.cross_entropy(logits, y, label_smoothing=0.1)


def constant(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    return model


def test_identity_of_models_losses_and_parts(parts_as_before):
    @fn.part("frozenkey")
    class FrozenKey(fn.Part):
        mu: float = fn.option(0.5)

        def loss(self, s):
            return self.mu * s.logits.square().mean()

    plain = constant(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert identity.own_model(plain) == "custom:Sequential@a5412d2f54e0.bccb7365e10c"
    assert identity.own_model(constant(Custom())) == "custom:Custom@8f86c3d2f10b.e92205bd9b3e"
    assert identity.own_loss(custom_loss) == "custom:custom_loss@86099b2a2016"
    assert identity.own_parts(fn.method("frozenkey + fedbn")) == {"frozenkey": "b92a88eefc7c"}
    assert sorted(LIBRARIES) == words("abc builtins fednorms functools numpy timm torch torchvision typing")


# -- explanations as JSON -------------------------------------------------------------------------------------------
def test_fields_of_descriptions():
    assert fields(fn.describe("scaffold + fedbn").to_dict(), "routes changes") == words("""
        method model weighting bytes_up bytes_down client_state server_state acts_on[] forward_passes_per_step
        extra_passes_per_round batch_of_one mixes_batch pretrained lost_weights lost_statistics unseen
        stateless_clients averaged_only addressed proxy parts[].name parts[].acts_on[] parts[].layers_changed
        parts[].bytes_down parts[].bytes_up parts[].client_state parts[].server_state parts[].setup_trips
        parts[].round_trips parts[].test_trips parts[].averaged_only parts[].addressed routes.* changes
    """)
    assert fields(what_leaves("scaffold + fedbn").to_dict()) == words("""
        method model leaves[].when leaves[].sender leaves[].what leaves[].names[] leaves[].nbytes
        leaves[].statistics leaves[].averaged told[].when told[].what told[].keys[] class_counts
        received[].sender received[].names[] received[].single received[].mixed stays[] stays_bytes secure_aggregation
        addressed proxy deployable obstacle differential_privacy
    """)
    assert fields(view_federation(tiny()).to_dict()) == words("""
        name classes[] sites[].name sites[].domain sites[].train sites[].val sites[].test sites[].labels[]
        sites[].label_shift sites[].mean[] sites[].std[] sites[].feature_shift label_shift feature_shift size_ratio
    """)
    assert list(listing()[0].to_dict()) == words("name paper label title data runs done where")


# -- commands -------------------------------------------------------------------------------------------------------
SEARCHED = (  # options of a recipe that a search does not decide itself
    "--recipe --out --jobs --model --rounds --seed --participation --weighting --loss --class-weights --metric "
    "--head --pretrained --weights --on-divergence --engine --workers --device --precision --deterministic "
    "--threads --memory --state-limit-mb --epochs --steps --batch-size --schedule --decay --optimizer --momentum "
    "--weight-decay --clip --last --keep-momentum --warmup --root --protocol --complete --allow-pickle --size "
    "--data-seed --val --test --group --group-across --copies --skip-broken --subset --normalize --channels "
    "--hold-out --proxy --augment --partition --quiet --json"
)
COMMANDS = {
    "advise": "--minutes --budget --one-model --personal --methods --rates --seeds --epsilon --retrain " + SEARCHED,
    "run": "--recipe --out --method --federation --model --rounds --seed --participation --weighting --loss "
    "--class-weights --metric --head --pretrained --weights --evaluate --evaluate-every --validate-every --patience "
    "--checkpoint-every --keep-checkpoints --keep-predictions --on-divergence --engine --workers --device --precision "
    "--deterministic --threads --memory --state-limit-mb --epochs --steps --batch-size --lr --schedule --decay "
    "--optimizer --momentum --weight-decay --clip --last --keep-momentum --warmup --root --protocol --complete "
    "--allow-pickle --size --data-seed --val --test --group --group-across --copies --skip-broken --subset --normalize "
    "--channels --hold-out --proxy --augment --partition --quiet --json --track",
    "compare": "--methods --seeds --lrs --search --recipe --out --jobs --federation --model --rounds --participation "
    "--weighting --loss --class-weights --metric --head --pretrained --weights --evaluate --evaluate-every "
    "--validate-every --patience --checkpoint-every --keep-checkpoints --keep-predictions --on-divergence --engine "
    "--workers --device "
    "--precision --deterministic --threads --memory --state-limit-mb --epochs --steps --batch-size --lr --schedule "
    "--decay --optimizer --momentum --weight-decay --clip --last --keep-momentum --warmup --root --protocol "
    "--complete --allow-pickle --size --data-seed --val --test --group --group-across --copies --skip-broken "
    "--subset --normalize --channels --hold-out --proxy --augment --partition --quiet --json --track",
    "tune": "--grid --seeds --federation " + SEARCHED,
    "resume": "--rounds --patience --quiet --json --track",
    "reproduce": "--list --data --seeds --only --settings --out --jobs --device --search --report --allow-pickle "
    "--no-complete --quiet --json --dry-run --quick --rounds --minutes --weights",
    "evaluate": "--data --modes --which --split --site --group --skip-broken --sensitivity --positive --clients "
    "--full --out --device --json",
    "report": "--out --images --json",
    "predict": "--site --averaged --which --out --skip-broken --device --json",
    "export": "--out --site --averaged --which --onnx --torch-export --json",
    "adapt": "--epochs --lr --test --size --group --skip-broken --which --out --device --json",
    "analyze": "--out --round --client --dead --device --json",
    "data check": "--protocol --group --group-across --copies --skip-broken --val --test --seed --allow-pickle "
    "--complete --quiet --json",
    "data pack": "--protocol --size --channels --quality --codec --seed --val --test --group --group-across --copies "
    "--skip-broken --subset --normalize --complete --allow-pickle --quiet",
    "data show": "--out --images --json --root --protocol --complete --allow-pickle --size --data-seed --val --test "
    "--group --group-across --copies --skip-broken --subset --normalize --channels --hold-out --proxy "
    "--augment --partition",
    "cache": "--folder --json",
    "deploy init": "--sites --classes --host --port --channels --minimum --deadline --recipe --json --method "
    "--federation --model --rounds --seed --participation --weighting --loss --class-weights --metric --head "
    "--pretrained --weights --evaluate --evaluate-every --validate-every --patience --checkpoint-every "
    "--keep-checkpoints --keep-predictions --on-divergence --engine --workers --device --precision --deterministic "
    "--threads --memory --state-limit-mb --epochs --steps --batch-size --lr --schedule --decay --optimizer "
    "--momentum --weight-decay --clip --last --keep-momentum --warmup --root --protocol --complete "
    "--allow-pickle --size --data-seed --val --test --group --group-across --copies --skip-broken --subset "
    "--normalize --hold-out --proxy --augment --partition",
    "deploy certificates": "--days --renew --json",
    "deploy enroll": "--site --key --images",
    "deploy revoke": "--site",
    "deploy link": "--host --port --link-port --database",
    "deploy probe": "--ca --site --key --json",
    "deploy check": "--data --site --policy --json",
    "deploy node": "--site --ca --key --data --policy --server --state --audit --device --config",
    "deploy audit": "--json",
    "deploy export": "--site --out --state --json",
    "list": "--paper --ideas --costs --json",
    "describe": "--model --classes --privacy --json",
    "verify": "--json",
}


def help_of(*command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command_line([*command, "--help"])
    return out.getvalue()


def options_in(text: str) -> list[str]:
    """The options that a help text lists, sorted; those that prose mentions do not begin a line."""
    return sorted(re.findall(r"^(?:│ | {1,2})(--[a-z][a-z-]*)", text, re.MULTILINE))


def test_commands_and_their_options(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # a wider help has options side by side
    usage = help_of()
    listed = re.findall(r"^  ([a-z]+) ", usage.partition("For example:")[0], re.MULTILINE)
    assert listed == [name for name in dict.fromkeys(c.split()[0] for c in COMMANDS)]
    for group in ("data", "deploy"):
        inner = re.findall(r"^  ([a-z]+) ", help_of(group), re.MULTILINE)
        assert [f"{group} {name}" for name in inner] == [c for c in COMMANDS if c.startswith(f"{group} ")]
    found = {command: options_in(help_of(*command.split())) for command in COMMANDS}
    assert found == {command: sorted(words(text)) for command, text in COMMANDS.items()}


def test_the_spelling_of_version_0_1_is_understood():
    assert fn.analyse is fn.analyze
    assert help_of("analyse") == help_of("analyze")
    assert "fednorms analyze" in help_of("analyse")
    assert "--no-complete, --incomplete" in help_of("reproduce")
    for command in ("check", "pack"):
        assert "--seed INT, --data-seed INT" in help_of("data", command)


def test_what_can_be_listed():
    text = help_of("list")
    assert "{methods,models,federations,partitions,transforms,analyses}" in re.sub(r"[│\s]", "", text)


def test_environment_variables():
    found = set()
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "environ" in ast.unparse(node.func) and node.args:
                found.add(node.args[0].value if isinstance(node.args[0], ast.Constant) else lifeline.VARIABLE)
    assert sorted(found) == words("""
        CUBLAS_WORKSPACE_CONFIG CUDA_VISIBLE_DEVICES CXX FEDNORMS_CACHE FEDNORMS_LINK FEDNORMS_METHODS
        FEDNORMS_MODELS FEDNORMS_POLICY FEDNORMS_ROSTER FEDNORMS_TRACEBACK GLOO_SOCKET_IFNAME
        MLFLOW_EXPERIMENT_NAME WANDB_PROJECT XDG_CACHE_HOME XDG_STATE_HOME
    """)
