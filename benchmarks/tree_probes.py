"""The program that `compare_trees.py` runs in each source tree: it writes a digest per probe as JSON.

    python tree_probes.py FOUND.json GROUP ... [--list]

Everything that depends on where a module is stands in `PLACES`: the new place first, then that of version 0.1. A
module that moves again needs one more place there and no other edit. A probe is a function of a folder that returns
values; `Several` gives each of its entries a digest of its own.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import enum
import hashlib
import io
import itertools
import json
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

PLACES: dict[str, tuple[str, ...]] = {
    # core
    "noise": ("fednorms.core.noise", "fednorms.noise"),
    "REGISTRY": ("fednorms.core.part:REGISTRY", "fednorms.part:REGISTRY"),
    "method_names": ("fednorms.methods.registry:names", "fednorms.method:names"),
    "Net": ("fednorms.core.net:Net", "fednorms.net:Net"),
    "Context": ("fednorms.core.views:Context", "fednorms.views:Context"),
    "Participation": ("fednorms.core.sampling:Participation", "fednorms.engines.sampling:Participation"),
    "Guarantee": ("fednorms.core.accounting:Guarantee", "fednorms.accounting:Guarantee"),
    "Preprocessing": ("fednorms.core.preprocessing:Preprocessing", "fednorms.data.preprocessing:Preprocessing"),
    "split_head": ("fednorms.core.head:split_head", "fednorms.models.head:split_head"),
    # data
    "RULES": ("fednorms.data.rules:RULES",),
    "rules": ("fednorms.data.rules:rules",),
    "plan": ("fednorms.data.partition:plan",),
    "Partition": ("fednorms.data.partition:Partition",),
    "split": ("fednorms.data.splits:split",),
    "READERS": ("fednorms.data.readers:READERS",),
    "divisions": ("fednorms.data.readers.divisions",),
    "cifar": ("fednorms.data.readers.cifar",),
    "domainnet": ("fednorms.data.readers.domainnet",),
    "office": ("fednorms.data.readers.office",),
    "pacs_vlcs": ("fednorms.data.readers.pacs_vlcs",),
    "tables": ("fednorms.data.readers.fairface", "fednorms.data.readers.tables"),
    "generate": ("fednorms.data.generate",),
    "pack": ("fednorms.data.pack:pack",),
    "view": ("fednorms.data.show:view",),
    "repeats": ("fednorms.data.duplicates:duplicates", "fednorms.data.repeats:repeats"),
    "CHAINS": ("fednorms.transforms.chains:CHAINS",),
    # models, runs and what explains them
    "models": ("fednorms.models.registry:models",),
    "build": ("fednorms.models.registry:build",),
    "identity": ("fednorms.runs.identity",),
    "what_leaves": ("fednorms.explain.leaves:what_leaves", "fednorms.privacy:what_leaves"),
    "overview": ("fednorms.explain.overview:overview", "fednorms.overview:overview"),
    # papers
    "ANALYSES": ("fednorms.papers.analysis.measures:ANALYSES", "fednorms.analysis.measures:ANALYSES"),
    "known_tables": ("fednorms.papers.tables.catalog:known", "fednorms.tables.folders:known"),
    "open_table": ("fednorms.papers.tables.catalog:open_table", "fednorms.tables.folders:open_table"),
    "listing": ("fednorms.papers.tables.catalog:listing", "fednorms.tables.listing:listing"),
    "pairs": ("fednorms.papers.tables.plan:pairs", "fednorms.tables.plan:pairs"),
    "recipe_for": ("fednorms.papers.tables.plan:recipe_for", "fednorms.tables.plan:recipe_for"),
    # across machines, and the command line
    "obstacle": ("fednorms.explain.deployable:obstacle", "fednorms.flower.deployable:obstacle"),
    "client_app": ("fednorms.flower.client:client_app",),
    "serve": ("fednorms.flower.server:serve",),
    "settings": ("fednorms.flower.settings",),
    "export_at_site": ("fednorms.flower.collect:export_at_site",),
    "write_project": ("fednorms.flower.project:write_project",),
    "main": ("fednorms.cli:main",),
}
# What a run's files hold that may differ between two runs, or is prose.
UNTOLD = {"seconds", "date", "version", "fednorms", "sources", "hardware", "jobs", "notes", "note"}
PROSE = {"steps", "resize", "why", "load", "load_without_fednorms", "what", "obstacle", "differential_privacy"}
PROSE |= {"neighbours", "title", "error", "about"}

Value = Any
Thunk = Callable[[Path], Value]
Probe = tuple[str, Thunk]


def find(*places: str) -> Any:
    """The first of these places ("module:name" or "module") that this tree has."""
    for place in places:
        module, _, path = place.partition(":")
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("fednorms"):
                raise
            continue
        try:
            for name in path.split(".") if path else ():
                found = getattr(found, name)
        except AttributeError:
            continue
        return found
    raise LookupError(f"this tree has none of {', '.join(places)}")


class _Places:
    """The names of `PLACES`, each looked up when it is used."""

    def __getattr__(self, name: str) -> Any:
        found = find(*PLACES[name])
        setattr(self, name, found)
        return found


at = _Places()


class Several(dict):
    """Values that each get a digest of their own."""


# -- digests --------------------------------------------------------------------------------------------------------
def digest(value: Value) -> str:
    """A hash of names, types, shapes and raw bytes of tensors, and of plain values as JSON."""
    hasher = hashlib.sha256()
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Value) -> None:
    import numpy as np
    import torch

    def word(*words: object) -> None:
        text = "\x1f".join(map(str, words)).replace("optimizer", "optimiser")  # a recipe key that was respelled
        hasher.update((text + "\x1e").encode("utf-8", "surrogateescape"))

    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        word("tensor", array.dtype, tuple(array.shape))
        hasher.update(array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    elif isinstance(value, np.ndarray):
        word("array", value.dtype.str, value.shape)
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bytes):
        word("bytes", len(value))
        hasher.update(value)
    elif isinstance(value, Mapping):
        tensors = bool(value) and all(isinstance(v, torch.Tensor) for v in value.values())
        word("mapping", len(value))
        for key in value if tensors else sorted(value, key=str):  # the order of a model's tensors counts
            word(key)
            _feed(hasher, value[key])
    elif isinstance(value, enum.Enum):
        word("enum", value.name)
    elif isinstance(value, (list, tuple)):
        word("list", len(value))
        for entry in value:
            _feed(hasher, entry)
    elif isinstance(value, (set, frozenset)):
        _feed(hasher, sorted(value, key=str))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(hasher, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    elif value is None or isinstance(value, (bool, int, float, str)):
        word(type(value).__name__, json.dumps(value))
    elif isinstance(value, np.generic):
        _feed(hasher, np.asarray(value))
    else:
        raise TypeError(f"no digest for {type(value).__name__}")


def without(value: Value, left_out: set[str]) -> Value:
    """Nested plain values without some keys, at any depth."""
    if isinstance(value, Mapping):
        return {k: without(v, left_out) for k, v in value.items() if k not in left_out}
    return [without(v, left_out) for v in value] if isinstance(value, (list, tuple)) else value


def told(value: Value) -> Value:
    """Plain values without times, versions and prose."""
    return without(value, UNTOLD | PROSE)


def row_of(row: Mapping[str, Value]) -> Value:
    """A row of metrics; of what went wrong, who it was and not the words."""
    return told({k: sorted(v) if k in ("diverged", "lost") else v for k, v in row.items()})


def files_of(folder: Path) -> dict[str, Value]:
    """Everything in a folder that a run, an export or a reproduction wrote, as values to be hashed."""
    found: dict[str, Value] = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if not file.is_file() or file.name in (".lock", "README.txt", "README.md", "RESULTS.md", "comparison.md"):
            continue
        if file.suffix == ".json":
            paths = {"path", "files"} if file.name == "comparison.json" else set()
            found[name] = without(told(json.loads(file.read_bytes())), paths)
        elif file.suffix == ".jsonl":
            found[name] = [row_of(json.loads(line)) for line in file.read_text().splitlines()]
        elif file.suffix == ".toml":
            found[name] = re.sub(r'(?m)^version = ".*"\n', "", file.read_text())
        elif file.suffix == ".csv":
            found[name] = list(csv.reader(io.StringIO(file.read_text())))
        elif file.suffix != ".png":
            found[name] = file.read_bytes()
    return found


def federation_of(federation: Value) -> Value:
    """A federation: its sites with their images, and everything it says of itself but paths and prose."""
    sites = {}
    for site in federation.sites:
        splits = {part: {"x": s.x[:], "y": s.y} for part, s in site.splits.items()}
        sites[site.name] = {"domain": site.domain, "attributes": dict(site.attributes), **splits}
    about = without(federation.to_dict(), {"root", "notes", "packed_from", "spec", "layout", "prepared"})
    return {"fingerprint": federation.fingerprint(), "order": list(sites), "sites": sites, "about": about}


# -- a tiny federation and runs on it -------------------------------------------------------------------------------
def pictures(n: int, k: int = 0, classes: int = 3, size: int = 8) -> tuple[Value, Value]:
    """Images and labels made of whole numbers alone; `k` changes the look."""
    import numpy as np

    y = np.arange(n) * (k + 2) % classes
    places = np.arange(n * 3 * size * size, dtype=np.int64).reshape(n, 3, size, size)
    x = (places * places * 31 + places * (17 + 6 * k)) % 97 + 30 * k + 40 * y[:, None, None, None]
    return (x % 256).astype(np.uint8), y


def tiny(unseen: bool = True) -> Value:
    """Three clients of two modalities, and a site that never trains."""
    import fednorms as fn

    sites: dict[str, Any] = {}
    for k, (name, n) in enumerate({"a": 14, "b": 11, "c": 17}.items()):
        sites[name] = {"train": pictures(n, k), "val": pictures(6, k + 3), "test": pictures(9, k + 6)}
    if unseen:
        sites["far"] = {"test": pictures(9, 9)}
    modality = {name: {"modality": "ct" if name in "ab" else "mr"} for name in sites}
    return fn.from_arrays(sites, classes=["cat", "dog", "owl"], attributes=modality, name="tiny")


RECIPE = {"rounds": 3, "threads": 1, "engine": "loop", "model": "cnn-small"}
TRAINING = {"batch_size": 4, "lr": 0.05}


def recipe(text: str, **values: Value) -> Value:
    import fednorms as fn

    training = TRAINING | values.pop("training", {})
    return fn.Recipe.make(RECIPE | {"method": text, "training": training} | values)


def seeded(name: str) -> str:
    """A method whose noise comes from the seed, so that it repeats, and with the defaults of version 0.1."""
    name = re.sub(r"\bscaffold\b(?!\()", "scaffold(control=gradient)", name)
    return re.sub(r"\b(dpcentral|dplocal)\b(?!\()", r"\1(draws='seeded')", name)


def trained(text: str, folder: Path, **values: Value) -> Value:
    """A run: the server after every round, and all files at the end."""
    import fednorms as fn

    seen: list[Value] = []

    def see(event: Value) -> None:
        state = event.state
        server = {"round": state.round, "model": state.model, "parts": state.parts, "seed": state.seed}
        seen.append({"server": server, "row": row_of(event.row)})

    fn.run(federation=tiny(), recipe=recipe(seeded(text), **values), out=folder / "run", callback=see)
    rounds = {f"round {k}": value for k, value in enumerate(seen, start=1)}
    return Several(**rounds, files=files_of(folder / "run"))


def names_of_methods() -> list[str]:
    """The library's methods, without the part that is made here."""
    return [name for name in at.method_names() if name != "probed"]


# -- methods --------------------------------------------------------------------------------------------------------
COMBINED = [
    "scaffold + greg + fedfn",
    "fedprox(mu=0.1) + fedbn + agc",
    "fedexp + fedbabu + scaffold",
    "mixbn(kind=learned) + scaffold(option=I)",
    "mixbn(kind=ensemble) + fedfr",
    "perfedavg(variant=hessian_free) + silobn",
    "fednn + scaffold(control=difference)",
    "fedrdn + hbn + fedrep(head_epochs=1)",
    "fedbn(upload=true) + spherefed",
    "partialfed(strategy=adaptive) + silobn",
    "moon(projection=5) + fedper",
    "greg + fedfa",
    "fedplvm + greg",
    "ditto + scaffold + fedrdn",
    "fraug(distance=mmd) + fedprox",
    "augment(chain=flip) + fedwon",
    "fedprox(straggler_fraction=0.5) + fednova",
    "lgfedavg(layers=1) + adabn",
    "dplocal + gn",
]
SETTINGS: dict[str, tuple[str, dict[str, Value]]] = {
    "momentum and weight decay": ("scaffold", {"training": {"momentum": 0.9, "weight_decay": 1e-3}}),
    "kept momentum": ("fedbn", {"training": {"momentum": 0.9, "keep_momentum": True}}),
    "adamw": ("fedavg", {"training": {"optimiser": "adamw", "lr": 1e-3, "weight_decay": 0.05}}),
    "clipping": ("fedprox", {"training": {"clip": 0.5}}),
    "fill and two epochs": ("fedavg", {"training": {"last": "fill", "epochs": 2}}),
    "drop": ("fedavg", {"training": {"last": "drop"}}),
    "steps": ("fednova", {"training": {"steps": 3}}),
    "exponential rate": ("fedavg", {"training": {"schedule": "exp", "decay": 0.9}}),
    "stepwise rate": ("fedavg", {"rounds": 4, "training": {"schedule": "step"}}),
    "cosine rate": ("fedavg", {"training": {"schedule": "cosine"}}),
    "two of three": ("scaffold + fedbn", {"participation": "fixed:2", "rounds": 4}),
    "a fraction": ("feddyn", {"participation": "fixed:0.7", "rounds": 4}),
    "tosses": ("fedexp", {"participation": "bernoulli:0.5", "rounds": 4}),
    "uniform weights": ("fedavg", {"weighting": "uniform"}),
    "focal and balanced": ("fedavg", {"loss": "focal", "class_weights": "balanced"}),
    "class weights": ("fedavg", {"class_weights": [1.0, 2.0, 0.5]}),
    "balanced accuracy": ("fedavg", {"metric": "balanced_accuracy"}),
    "float64": ("scaffold", {"precision": "float64"}),
    "bfloat16": ("fedavg", {"precision": "bfloat16"}),
    "another seed": ("fedbn", {"seed": 7}),
    "sparse tests": ("fedavg", {"rounds": 5, "evaluate_every": 3, "validate_every": 1, "checkpoint_every": 2}),
    "kept checkpoints": ("fedavg", {"keep_checkpoints": "all"}),
    "spilled states": ("scaffold + fedbn", {"state_limit_mb": 0}),
    "augmented": ("fedavg", {"data": {"augment": "crop_flip"}}),
    "all modes": (
        "fedavg + finetune(epochs=1)",
        {"evaluate": ["global", "global/batch", "global/batch:3", "personal", "after_local", "adapted", "unseen"]},
    ),
    "more modes": (
        "fedbn",
        {"evaluate": ["personal/batch", "personal/re-estimated", "unseen/re-estimated", "after_local"]},
    ),
    "after_local between tests": (
        "fedavg",
        {"evaluate": ["after_local"], "evaluate_every": 4, "rounds": 4, "participation": "fixed:1"},
    ),
    "skipped divergence": ("fedavg", {"training": {"lr": 1e30}, "on_divergence": "skip", "rounds": 2}),
    "stopped divergence (refused)": ("fedavg", {"training": {"lr": 1e30}}),
    "resnet20": ("fedwon(nf_residual=true)", {"model": "resnet20", "rounds": 1}),
    "two threads": ("fedavg", {"threads": 2, "rounds": 1}),
}
ONLY_THE_LOOP = {"fedtan"}
NEEDS_ALL_DATA = {"centralised"}
IN_WORKERS = [
    "fedavg",
    "scaffold + fedbn",
    "hbn",
    "ditto + fedrdn",
    "fraug",
    "fedplvm",
    "dpcentral + gn",
    "partialfed(strategy=adaptive)",
]


def methods() -> Iterator[Probe]:
    names = names_of_methods()
    for name in names:
        yield f"loop/{name}", partial(trained, name)
    for text in COMBINED:
        yield f"loop/{text}", partial(trained, text)
    for name, (text, values) in SETTINGS.items():
        yield f"settings/{name}", partial(trained, text, **values)
    for text in _variants():
        yield f"options/{text}", partial(trained, text, rounds=2)
    for text in [*names, *COMBINED]:
        refused = " (refused)" * bool(ONLY_THE_LOOP & set(re.findall(r"\w+", text)))
        yield f"graphs/{text}{refused}", partial(trained, text, engine="graphs")
    for name, (text, values) in SETTINGS.items():
        if values.keys() <= {"training", "participation", "rounds", "evaluate"} and "refused" not in name:
            yield f"graphs settings/{name}", partial(trained, text, engine="graphs", **values)
    for text in IN_WORKERS:
        yield f"workers/{text}", partial(trained, text, engine="workers", workers=2)
    for text in [*names, "scaffold + fedbn", "fedfa + fednova"]:
        refused = " (refused)" * bool((ONLY_THE_LOOP | NEEDS_ALL_DATA) & {text})
        yield f"flower/{text}{refused}", partial(deployed, text)
    yield "flower/some sites", partial(deployed, "scaffold", participation="fixed:2", class_weights="balanced")
    yield "custom part, model and loss", _custom_parts


def _variants() -> Iterator[str]:
    """Every method with each of its other choices and switches."""
    known = names_of_methods()
    for name, cls in sorted(at.REGISTRY.items()):
        for f in dataclasses.fields(cls) if name in known else ():
            others = f.metadata.get("choices") or ((not f.default,) if isinstance(f.default, bool) else ())
            for value in others:
                if value not in (f.default, "system") and (name, f.name) != ("wsconv", "nf_residual"):
                    yield f"{name}({f.name}={value!r})"  # not noise of the system, nor what needs residual blocks


def _custom_parts(folder: Path) -> Value:
    """A custom part with most hooks, a custom model and a custom loss."""
    import fednorms as fn

    if "probed" not in at.REGISTRY:
        _make_part()
    result = fn.run("probed + fedbn", tiny(), model=_model(), loss=_loss, recipe=recipe("fedavg"), out=folder / "run")
    return {"rows": [row_of(row) for row in result.history], "files": files_of(folder / "run")}


def _make_part() -> None:
    import fednorms as fn

    @fn.part("probed")
    class Probed(fn.Part):
        """A part that keeps, sends and averages something of its own."""

        mu: float = fn.option(0.5, at_least=0)
        uploads = True

        def init(self, w: Value) -> Value:
            return w.zeros(), fn.Tree()

        def batch(self, x: Value, y: Value, s: Value) -> Value:
            return x + 0.01 * s.uniform(*x.shape), y

        def loss(self, s: Value) -> Value:
            return self.mu * s.logits.square().mean()

        def grad(self, g: Value, s: Value) -> Value:
            return g * 0.9

        def finish(self, e: Value) -> Value:
            return fn.Tree(), e.delta

        def server(self, delta: Value, r: Value) -> Value:
            return delta * 0.5, r.up


def _model() -> Value:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def _loss(logits: Value, y: Value) -> Value:
    from torch.nn import functional

    return functional.cross_entropy(logits, y, label_smoothing=0.1)


class InProcess:
    """Flower's Grid in this process: every message goes through Flower's serialization to a ClientApp and back."""

    def __init__(self, config: dict[str, Any], folder: Path, sites: list[str]) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as Flower's processes do
        self.config, self.folder, self.nodes = config, folder, dict(enumerate(sites, start=100))
        self.app = at.client_app(site=self._site)
        self.replies: dict[str, Any] = {}
        self.numbers = itertools.count(1)

    def _site(self, context: Value, recipe: Value) -> Value:
        whole = tiny(unseen=False)
        return dataclasses.replace(whole, sites=[whole.site(str(context.node_config["site"]))])

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Any) -> list[str]:
        from flwr.app import Context, RecordDict

        ids = []
        for message in messages:
            ids.append(f"message {next(self.numbers)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            node = message.metadata.dst_node_id
            arrived = _travelled(message)
            arrived.metadata.__dict__["_message_id"] = ids[-1]
            config = {"state": str(self.folder / "state" / str(node)), "site": self.nodes[node]}
            context = Context(1, node, config, RecordDict(), dict(self.config))
            self.replies[ids[-1]] = _travelled(self.app(arrived, context))
        return ids

    def pull_messages(self, ids: Any) -> list[Any]:
        return [self.replies.pop(m) for m in list(ids) if m in self.replies]


def _travelled(message: Value) -> Value:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    contents = {key: thing.deflate() for key, thing in get_all_nested_objects(message).items()}
    return inflate_object_from_contents(message.object_id, contents)


def deployed(text: str, folder: Path, **values: Value) -> Value:
    """A run over Flower's messages: the server's files, and what each site keeps."""
    chosen = recipe(seeded(text), rounds=2, evaluate_every=2, **values)
    config = {"recipe": chosen.to_toml(), "deploy.sites": "a,b,c", "deploy.out": str(folder / "run")}
    at.serve(InProcess(config | {"deploy.wait": 5.0, "deploy.deadline": 60.0}, folder, ["a", "b", "c"]), config)
    state = folder / "state"
    return Several(server=files_of(folder / "run"), sites=files_of(state) if state.exists() else {})


# -- resume ---------------------------------------------------------------------------------------------------------
INTERRUPTED = [
    "fedavg",
    "scaffold + fedbn",
    "feddyn",
    "feddc",
    "fedadam",
    "fedavgm",
    "fedexp",
    "hbn",
    "fbn",
    "moon",
    "ditto",
    "fedproto",
    "fedplvm",
    "fraug",
    "partialfed(strategy=adaptive)",
    "fedrdn + fednova",
    "fixbn",
    "dpcentral + gn",
]


class Interrupted(Exception):
    """Stands for a crash."""


def resume() -> Iterator[Probe]:
    for text in INTERRUPTED:
        yield text, partial(_resumed, text)
    yield "kept momentum", partial(_resumed, "fedavg", training={"momentum": 0.9, "keep_momentum": True})
    yield "some clients", partial(_resumed, "scaffold + fedbn", participation="fixed:2")
    yield "all rounds kept", partial(_resumed, "fedbn", keep_checkpoints="all")
    yield "with graphs", partial(_resumed, "scaffold + fedbn", engine="graphs")


def _resumed(text: str, folder: Path, **values: Value) -> Value:
    import fednorms as fn

    def crash(event: Value) -> None:
        if event.round == 3:
            raise Interrupted

    plan = {"rounds": 5, "checkpoint_every": 2} | values
    with contextlib.suppress(Interrupted):
        fn.run(federation=tiny(), recipe=recipe(seeded(text), **plan), out=folder / "run", callback=crash)
    before = files_of(folder / "run")
    fn.resume(folder / "run", federation=tiny())
    return Several(interrupted=before, finished=files_of(folder / "run"))


# -- privacy --------------------------------------------------------------------------------------------------------
def privacy() -> Iterator[Probe]:
    for name in names_of_methods():
        yield f"what leaves/{name}", partial(lambda folder, text: told(at.what_leaves(text).to_dict()), text=name)
    for text, who, secret in itertools.product(
        ("dpcentral(noise=2)", "dplocal(noise=3)", "dpcentral(noise=0.8, delta=1e-4)"),
        ("all", "fixed:3", "fixed:0.2", "bernoulli:0.3"),
        (True, False),
    ):
        yield f"epsilon/{text}, {who}, {'secret' if secret else 'known'}", partial(_epsilon, text, who, secret)
    yield "noise/normals", lambda folder: at.noise.normals(_zeros(2, 3), "privacy w", 0, 1, "a")
    yield "noise/context", _context_noise
    for text in ("dpcentral(draws=seeded, clip=0.1)", "dplocal(draws=seeded, clip=0.1, noise=0.5)"):
        yield f"runs/{text}", partial(trained, text, participation="bernoulli:0.5", rounds=4)


def _zeros(*shape: int) -> Value:
    import torch

    return torch.zeros(*shape)


def _epsilon(text: str, who: str, secret: bool, folder: Path) -> Value:
    import fednorms as fn

    names = [f"site {k}" for k in range(10)]
    found = at.Guarantee.of(fn.method(text), at.Participation.read(who), names, 0, secret=secret)
    return [found.epsilon(t) for t in (0, 1, 5, 20)]


def _context_noise(folder: Path) -> Value:
    given = {f.name: f for f in dataclasses.fields(at.Context)}
    needed = [n for n, f in given.items() if f.default is f.default_factory is dataclasses.MISSING]
    values: dict[str, Any] = dict.fromkeys(needed, 0) | {"client": "a", "round": 2, "seed": 5}
    context = at.Context(**values)
    return [context.normals("privacy w", _zeros(4), system=False), context.chance("straggles")]


# -- data -----------------------------------------------------------------------------------------------------------
def data() -> Iterator[Probe]:
    import fednorms as fn

    for options in ({}, {"size": 8}, {"size": 20, "seed": 3, "val": 0.2, "test": 0.3}):
        yield f"digits-shift/{options}", partial(_named, "digits-shift", **options)
    for text in ("digits-dials", "digits-dials(clients=3, label=0.5, feature=0.5)"):
        yield f"digits-dials/{text}", partial(_named, text, size=8)
    yield "from arrays", lambda folder: federation_of(tiny())
    yield "from arrays, divided", _divided
    yield "from datasets", _datasets
    yield "from folders", _folders
    yield "hold out, pool, leave out", _rearranged
    for name in sorted(at.rules()):
        for within, test, seed in itertools.product(("all", "domain"), ("deal", "alike", "personal", "whole"), (0, 3)):
            text = _rule(name, within, test)
            if text and (seed == 0 or test == "deal"):
                yield f"partition/{text}, seed {seed}", partial(_partition, text, seed)
    yield "splits", _splits
    yield "divisions of papers", _divisions
    yield from _readers()
    yield from _generated()
    for name in sorted(at.CHAINS):
        yield f"transforms/{name}", partial(_chain, name)
    for codec, quality in (("raw", None), ("png", None), ("webp", None), ("jpeg", 90)):
        yield f"packs/{codec}", partial(_packed, codec, quality)
    for who, seed in itertools.product(("all", "fixed:3", "fixed:0.25", "bernoulli:0.3"), (0, 1, 12)):
        yield f"cohorts/{who}, seed {seed}", partial(_cohorts, who, seed)
    yield "view", lambda folder: at.view(fn.federation("digits-shift", size=8)).to_dict()
    yield "preprocessing", _preprocessing


def _named(text: str, folder: Path, **options: Value) -> Value:
    import fednorms as fn

    return federation_of(fn.federation(text, **options))


def _divided(folder: Path) -> Value:
    import fednorms as fn

    sites = {"a": pictures(30, 0), "b": pictures(21, 1)}
    groups = {"a": [k // 3 for k in range(30)]}
    return [
        federation_of(fn.from_arrays(sites, val=0.2, test=0.3, seed=seed, groups=groups, channels=channels))
        for seed, channels in ((0, None), (4, 1))
    ]


def _datasets(folder: Path) -> Value:
    import torch

    import fednorms as fn

    sites = {}
    for k, name in enumerate(("a", "b")):
        x, y = pictures(20, k)
        sites[name] = torch.utils.data.TensorDataset(torch.from_numpy(x).float() / 255, torch.from_numpy(y))
    return federation_of(fn.from_datasets(sites, classes=["cat", "dog", "owl"], val=0.1, test=0.2))


def _folders(folder: Path) -> Value:
    import fednorms as fn

    folder = folder / "clinics"  # the federation's name
    for site in ("north", "south"):
        for k in range(24):
            picture(folder / site / ("cat", "dog")[k % 2] / f"p{k // 4}_{k}.png", 9 * k + len(site) * 50, (10, 8))
    plain = fn.from_folders(folder, 6, val=0.1, test=0.2)
    grouped = fn.federation(str(folder), size=5, group="(p[0-9]+)", seed=2)
    return [federation_of(plain), federation_of(grouped)]


def _rearranged(folder: Path) -> Value:
    fed = tiny()
    return [federation_of(one) for one in (fed.hold_out("a"), fed.pooled(), fed.without("b"))]


def _rule(name: str, within: str, test: str) -> str:
    """The text of a rule with few clients; empty where it has no such option."""
    known = {f.name for f in dataclasses.fields(at.RULES[name])}
    knows_classes = "alike" in vars(at.RULES[name])
    if (within == "domain" and "within" not in known) or (test == "alike" and not knows_classes):
        return ""
    wanted: dict[str, Any] = {
        "clients": 10,
        "shards": 2,
        "smallest": 2,
        "group": 5,
        "delta": 1.0,
        "within": within,
        "test": test,
    }
    options = ", ".join(f"{key}={value!r}" for key, value in wanted.items() if key in known)
    return f"{name}({options})"


def _partition(text: str, seed: int, folder: Path) -> Value:
    import fednorms as fn

    fed = fn.federation("digits-shift", size=8)
    made = at.plan(fed, text, seed)
    made.save(folder / "division.json")
    again = at.Partition.load(folder / "division.json")
    kept = {name: {"domain": domain, **dict(parts)} for name, (domain, parts) in again.clients.items()}
    return [str(made.rule), made.hash, kept, fn.partition(fed, text, seed).fingerprint()]


def _splits(folder: Path) -> Value:
    import numpy as np

    y = np.arange(97) * 7 % 5
    return [
        at.split(y, shares, seed, name, groups)
        for shares in ({"val": 0.1, "test": 0.2}, {"test": 0.5}, {"train": 0.6, "test": 0.4})
        for seed, name in ((0, ""), (1, "clinic"), (2, "é"))
        for groups in (None, (np.arange(97) // 4).tolist())
    ]


def _divisions(folder: Path) -> Value:
    import numpy as np

    y = np.arange(120) * 11 % 7
    d = at.divisions
    return [
        d.shuffled(50, "word", 3),
        d.even(53, 5, "usps"),
        d.tenth_per_class(y, 0, "photo"),
        d.greg({"a": y, "b": y[:70]}, 0.5, 0.2, 1, 0.8),
        d.stratified(y, 31, 2, "art"),
        d.sklearn_eighty_twenty(y),
        d.fractions(y, 0.1, 0.2, 3, "b"),
    ]


def picture(path: Path, value: int, size: tuple[int, int] = (6, 5)) -> None:
    """A small image whose pixels all have one value."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value % 256, value // 256 % 256, 7)).save(path)


def _class_folders(root: Path, domains: Any, classes: Any, each: int) -> None:
    value = itertools.count()
    for domain, label in itertools.product(domains, classes):
        for k in range(each):
            picture(root / domain / label / f"{k:03d}.png", next(value))


def _table(path: Path, rows: list[dict[str, Value]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _bytes(count: int, *shape: int, seed: int = 0) -> Value:
    import numpy as np

    return np.random.RandomState(seed).randint(0, 256, (count, *shape)).astype(np.uint8)


def _digits_five(root: Path) -> None:
    import numpy as np

    for i, name in enumerate(("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST_M")):
        (root / name).mkdir(parents=True)
        for part, n in (("train", 1600), ("test", 400)):
            np.savez(root / name / f"{part}.npz", x=_bytes(n, 4, 4, 3, seed=i), y=np.arange(n) % 10)


def _cifar_10(root: Path) -> None:
    import numpy as np

    for i, name in enumerate((*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")):
        rows = np.concatenate([np.arange(40, dtype=np.uint8)[:, None] % 10, _bytes(40, 3072, seed=i)], axis=1)
        (root / f"{name}.bin").write_bytes(rows.tobytes())


def _cifar_100(root: Path) -> None:
    import numpy as np

    for name, n in (("train", 400), ("test", 100)):
        labels = (np.arange(n) % 100).astype(np.uint8)
        rows = np.concatenate([np.stack([labels // 5, labels], axis=1), _bytes(n, 3072)], axis=1)
        (root / f"{name}.bin").write_bytes(rows.astype(np.uint8).tobytes())


def _cifar_10_c(root: Path) -> None:
    import numpy as np

    np.save(root / "labels.npy", np.tile(np.arange(20) % 10, 5))
    for i, name in enumerate(at.cifar.CORRUPTIONS):
        np.save(root / f"{name}.npy", _bytes(100, 32, 32, 3, seed=i))


def _pacs(root: Path) -> None:
    _class_folders(root, at.pacs_vlcs.PACS_COUNTS, at.pacs_vlcs.PACS_CLASSES, 10)


def _pacs_kfold(root: Path) -> None:
    _class_folders(root / "kfold", at.pacs_vlcs.PACS_COUNTS, at.pacs_vlcs.PACS_CLASSES, 3)
    for domain in at.pacs_vlcs.PACS_COUNTS:
        for word, numbers in (("train", (0, 2)), ("crossval", (1,))):
            named = enumerate(at.pacs_vlcs.PACS_CLASSES, start=1)
            lines = [f"{domain}/{label}/{k:03d}.png {i}" for i, label in named for k in numbers]
            (root / f"{domain}_{word}_kfold.txt").write_text("\n".join(lines) + "\n")


def _domainnet(root: Path) -> None:
    classes = sorted([*at.domainnet.TEN_CLASSES, *(f"zz_{i:03d}" for i in range(92))])
    for domain in at.domainnet.TEN_LISTS:
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for i, label in enumerate(classes):
            for k in range(6 if label in at.domainnet.TEN_CLASSES else 2):
                picture(root / domain / label / f"{k}.png", i * 10 + k)
                lines["train" if k else "test"].append(f"{domain}/{label}/{k}.png {i}")
        for part, said in lines.items():
            (root / f"{domain}_{part}.txt").write_text("\n".join(said))


def _camelyon17(root: Path) -> None:
    rows: list[dict[str, Value]] = []
    for centre, i in itertools.product(range(5), range(400)):
        patient = f"{centre * 20 + i % 5:03d}"
        rows.append(
            {"": len(rows), "patient": patient, "node": 0, "x_coord": i, "y_coord": i, "tumor": i % 2}
            | {"slide": 0, "center": centre, "split": 0}
        )
    _table(root / "metadata.csv", rows)
    for value, row in enumerate(rows):
        name = f"patient_{row['patient']}_node_0"
        picture(root / "patches" / name / f"patch_{name}_x_{row['x_coord']}_y_{row['y_coord']}.png", value)


def _fairface(root: Path) -> None:
    for word, n in (("train", 70), ("val", 14)):
        about = [
            {"file": f"{word}/{i}.jpg", "age": "20-29", "gender": ("Male", "Female")[i // 7 % 2]}
            | {"race": at.tables.RACES[i % 7], "service_test": True}
            for i in range(n)
        ]
        _table(root / f"fairface_label_{word}.csv", about)
        for i in range(n):
            picture(root / word / f"{i}.jpg", 100)


def _fed_isic2019(root: Path) -> None:
    rows = [
        {"image": f"ISIC_{i:04d}", "target": i % 8, "center": i % 6, "fold": "test" if i % 5 == 0 else "train"}
        for i in range(60)
    ]
    _table(root / "train_test_split", rows)
    for i in range(60):
        picture(root / "ISIC_2019_Training_Input" / f"ISIC_{i:04d}.jpg", 50 + i, (30, 20))


def _centres(root: Path) -> None:
    rows = []
    for centre, i in itertools.product(("oslo", "bonn"), range(20)):
        picture(root / "scans" / f"{centre}{i}.png", i)
        label, patient = ("ill", "well")[i % 2], f"{centre}{i // 4}"
        rows.append({"filename": f"{centre}{i}", "label": label, "hospital": centre, "patient": patient})
    _table(root / "study.csv", rows)


def _medmnist(root: Path) -> None:
    import numpy as np

    counts = {"train": 12, "val": 6, "test": 6}
    for name in ("organamnist", "organcmnist"):
        images = {f"{part}_images": _bytes(n, 28, 28, seed=len(part)) for part, n in counts.items()}
        labels = {f"{part}_labels": np.arange(n)[:, None] % 3 for part, n in counts.items()}
        np.savez(root / f"{name}.npz", **images, **labels)


def _npz(root: Path) -> None:
    import numpy as np

    x, y = _bytes(20, 8, 8, 3), np.arange(20) % 4
    np.savez(root / "a.npz", x=x, y=y, classes=np.array(["p", "q", "r", "s"]))
    np.savez(root / "b.npz", images_train=x[:10], labels_train=y[:10], images_test=x[10:], labels_test=y[10:])


def _huggingface(root: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as ImageFeature
    from PIL import Image

    columns = {"image": [Image.fromarray(i) for i in _bytes(20, 8, 8, 3)], "label": [i % 2 for i in range(20)]}
    columns["site"] = ["ab"[i // 2 % 2] for i in range(20)]
    features = {"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"]), "site": Value("string")}
    Dataset.from_dict(columns, Features(features)).save_to_disk(str(root))


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "digits-five": _digits_five,
    "cifar-10": _cifar_10,
    "cifar-100": _cifar_100,
    "cifar-10-c": _cifar_10_c,
    "pacs": _pacs,
    "vlcs": lambda root: _class_folders(root, at.pacs_vlcs.VLCS_COUNTS, at.pacs_vlcs.VLCS_CLASSES, 10),
    "office-home": lambda root: _class_folders(
        root, ("Art", "Clipart", "Product", "Real World"), at.office.HOME_CLASSES, 2
    ),
    "office-31": lambda root: [
        _class_folders(root / domain, ("images",), at.office.OFFICE31_CLASSES, 3)
        for domain in ("amazon", "dslr", "webcam")
    ],
    "office-caltech-10": lambda root: _class_folders(root, at.office.CALTECH_LISTS, at.office.CALTECH_CLASSES, 5),
    "domainnet": _domainnet,
    "camelyon17": _camelyon17,
    "fairface": _fairface,
    "fed-isic2019": _fed_isic2019,
    "centres": _centres,
    "medmnist": _medmnist,
    "npz": _npz,
    "huggingface": _huggingface,
}
# Divisions that need another layout than the one written here.
ELSEWHERE = {("pacs", "official")}
_made: dict[str, Path] = {}


def _root(name: str, make: Callable[[Path], Any]) -> Path:
    """The folder of a tiny data set, written once."""
    if name not in _made:
        _made[name] = Path("sets", name)  # some readers name a federation by its folder
        _made[name].mkdir(parents=True)
        make(_made[name])
    return _made[name]


def _readers() -> Iterator[Probe]:
    for name, reader in at.READERS.items():
        for protocol in reader.protocols:
            refused = " (refused)" * ((name, protocol) in ELSEWHERE)
            yield f"readers/{name}, {protocol}{refused}", partial(_read, name, protocol, name, LAYOUTS[name])
    yield "readers/pacs, official lists", partial(_read, "pacs", "official", "pacs-kfold", _pacs_kfold)


def _read(name: str, protocol: str, layout: str, make: Callable[[Path], Any], folder: Path) -> Value:
    import inspect

    import fednorms as fn

    known = inspect.signature(at.READERS[name].read).parameters
    options = {k: v for k, v in {"complete": False, "size": 8}.items() if k in known}
    made = fn.federation(name, root=_root(layout, make), protocol=protocol, **options)
    found = Several(read=federation_of(made), notes=len(made.source.get("notes", [])))
    if made.preprocessing.crop is None:  # version 0.1 cannot count images of which it cuts out the middle
        counted = at.READERS[name].counted(_root(layout, make), {"protocol": protocol, "complete": False})
        found["counted"] = {s.name: s.counts(counted.num_classes) for s in counted.sites}
    return found


def _generated() -> Iterator[Probe]:
    import torch

    def images(n: int = 6, size: int = 32) -> Value:
        x, y = pictures(n, 1, 3, size)
        return torch.from_numpy(x), torch.from_numpy(y)

    for name, severity in itertools.product(at.generate.CORRUPTIONS, (1, 3, 5)):
        yield (
            f"generate/{name}, severity {severity}",
            partial(lambda folder, n, s: at.generate.corrupt(images()[0], n, s, seed=2), n=name, s=severity),
        )
    yield (
        "generate/corrupted federation",
        lambda folder: federation_of(
            at.generate.corrupted_federation(*images(12, 8), ["a", "b", "c"], names=["fog", "snow"], test=3)
        ),
    )
    yield (
        "generate/mnist-m",
        lambda folder: at.generate.mnist_m(_bytes(5, 12, 12), [_bytes(30, 40, 3), _bytes(20, 20, 3, seed=1)], seed=1),
    )
    yield "generate/synth digits", lambda folder: at.generate.synth_digits(12, seed=1, size=16)
    for label, feature in ((0.0, 0.0), (1.0, 0.5), (0.5, 1.0)):
        yield (
            f"generate/shift {label} {feature}",
            partial(
                lambda folder, a, b: federation_of(
                    at.generate.shift(*images(40, 8), ["a", "b", "c"], clients=3, label=a, feature=b, seed=1)
                ),
                a=label,
                b=feature,
            ),
        )


def _chain(name: str, folder: Path) -> Value:
    import torch

    x = torch.from_numpy(pictures(5, 2, 3, 32)[0]).float() / 255
    with at.noise.keyed(torch.tensor([3, 4])):
        number = at.noise.stream("part augment")
        return at.CHAINS[name](x, lambda *shape: at.noise.uniform(shape, number, x), (32, 32))


def _packed(codec: str, quality: int | None, folder: Path) -> Value:
    import fednorms as fn

    file = at.pack(tiny(), folder / "tiny.fnpack", codec, quality)
    made = federation_of(fn.federation(str(file)))
    return [made, file.read_bytes() if codec == "raw" else b""]


def _cohorts(who: str, seed: int, folder: Path) -> Value:
    names = [f"site {k}" for k in range(12)]
    chosen = at.Participation.read(who)
    return [chosen.cohort(names, seed, t) for t in range(8)] + [chosen.expected(12)]


def _preprocessing(folder: Path) -> Value:
    import torch

    x = torch.from_numpy(pictures(3)[0])
    centered = getattr(at.Preprocessing, "centered", None) or at.Preprocessing.centred  # as version 0.1 spells it
    kinds = [at.Preprocessing(), centered(3), at.Preprocessing((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))]
    return [[p.to_dict(), p.unit(x), p(x) if callable(p) else None] for p in kinds]


# -- models ---------------------------------------------------------------------------------------------------------
def models() -> Iterator[Probe]:
    for name, seed in itertools.product(at.models(), (0, 3)):
        yield f"{name}, seed {seed}", partial(_built, name, seed)
    for name in ("torchvision:mobilenet_v3_small", "torchvision:resnet18", "timm:resnet10t"):
        yield name, partial(_built, name, 1)


def _built(name: str, seed: int, folder: Path) -> Value:
    import torch

    info = at.models().get(name)
    side = 64 if info is None or name.startswith("alexnet") else info.size
    model = at.build(name, 7, 3, side, seed)
    model.eval()
    with torch.no_grad():
        out = model(torch.from_numpy(pictures(2, 1, 3, side)[0]).float() / 255)
    trains = [n for n, p in model.named_parameters() if p.requires_grad]
    return Several(
        weights=dict(model.state_dict()), outputs=out, head=at.split_head(model), trains=trains, layers=_layers(model)
    )


def _layers(model: Value) -> Value:
    return [(n, type(m).__name__) for n, m in model.named_modules()]


# -- keys -----------------------------------------------------------------------------------------------------------
RECIPES: list[dict[str, Value]] = [
    {},
    {"method": "scaffold + greg(alpha=0.5) + fedfn", "rounds": 7, "training": {"lr": 0.1, "steps": 4, "clip": 1.0}},
    {"federation": "pacs", "model": "alexnet", "data": {"root": "/d", "protocol": "greg", "hold_out": ["photo"]}},
    {"federation": "x", "data": {"group": "(p[0-9]+)", "val": 0.2, "size": 32, "partition": "iid(clients=3)"}},
    {"method": "fedprox(mu=1)", "class_weights": [1.0, 2.0], "evaluate": ["global/batch:32"], "own_parts": {"a": "b"}},
    {"participation": "fixed:0.1", "engine": "graphs", "device": "cpu", "precision": "float64", "threads": 4},
]
NAMES: list[tuple[Value, ...]] = [
    ("data", 0, 3, "hospital-a"),
    ("cohort", 1, 2, 3),
    ("noise", 0, 1, "a", False),
    ("noise", 0, 1, None, True),
    ("model", 5, "lenet"),
    ("x", 1.5, -2),
    ("é", ""),
    (),
]


def keys() -> Iterator[Probe]:
    import fednorms as fn

    for name in names_of_methods():
        yield f"describe/{name}", partial(lambda folder, n: fn.describe(n).to_dict(), n=name)
    yield "describe/fedwon on resnet20", lambda folder: fn.describe("fedwon + fedfn", "resnet20").to_dict()
    yield "overview", lambda folder: [[entry.name, dict(facts)] for entry, facts in at.overview()]
    for k, values in enumerate(RECIPES):
        yield f"recipes/{k} as text", partial(lambda folder, v: _text(fn.Recipe.make(v)), v=values)
        yield f"recipes/{k} resolved", partial(lambda folder, v: _text(fn.Recipe.make(v).resolved()), v=values)
        yield f"recipes/{k} at a site", partial(lambda folder, v: at.settings.fingerprint(fn.Recipe.make(v)), v=values)
        yield f"recipes/{k} as a config", partial(lambda folder, v: at.settings.flat(fn.Recipe.make(v)), v=values)
    yield "seeds", lambda folder: [at.noise.seed_of(*names) for names in NAMES]
    yield "streams", lambda folder: [at.noise.stream(name) for name in ("", "part hbn", "features.drop")]
    yield "permutations", lambda folder: at.noise.permutation(20, "test order", "a", 20)
    yield "uniforms", _uniforms
    yield "identity/models", _identities
    for text in ("fedwon", "fednn", "fedfn + hbn", "fraug", "moon(projection=4)", "fedfa", "rbn", "sn", "frn", "pn"):
        yield f"identity/after surgery by {text}", partial(_surgery, text)
    yield "identity/loss", lambda folder: at.identity.own_loss(_loss)
    yield "identity/part", _part_identity
    yield "federation.json", _facts
    yield "public names", lambda folder: sorted(fn.__all__)
    for name in at.known_tables():
        yield f"tables/{name}", partial(_parsed, name)
    yield (
        "tables listed",
        lambda folder: [without(entry.to_dict(), {"title", "where"}) for entry in at.listing()],
    )


def _text(recipe: Value) -> str:
    return re.sub(r'(?m)^version = ".*"\n', "", recipe.to_toml())


def _uniforms(folder: Path) -> Value:
    import torch

    found = [at.noise.hashed_uniform(torch.tensor([7, 11]), 3, (5, 2), kind) for kind in (torch.float32, torch.float64)]
    with at.noise.keyed(torch.tensor([1, 2])):
        found += [at.noise.uniform((4,), 5, torch.zeros(1)) for _ in range(2)]
    return found


def _identities(folder: Path) -> Value:
    import torch
    from torch import nn

    class Own(nn.Module):
        """A custom model."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Value) -> Value:
            return self.head(torch.relu(self.body(x.flatten(1))))

    torch.manual_seed(0)
    return [at.identity.own_model(model) for model in (_model(), Own(), at.build("cnn-small", 3), at.build("lenet", 3))]


def _surgery(text: str, folder: Path) -> Value:
    import fednorms as fn

    net = at.Net(at.build("cnn-small", 3, size=8), fn.method(text), name="cnn-small")
    return [
        at.identity.own_model(net.module),
        dict(net.initial),
        {name: route.name for name, route in net.routes.items()},
        _layers(net.module),
    ]


def _part_identity(folder: Path) -> Value:
    import fednorms as fn

    if "probed" not in at.REGISTRY:
        _make_part()
    return [at.identity.own_parts(fn.method("probed + fedbn")), str(fn.method("probed(mu=2) + fedbn"))]


def _facts(folder: Path) -> Value:
    import fednorms as fn

    fn.run(federation="digits-shift", recipe=recipe("fedavg", rounds=1, data={"size": 8}), out=folder / "run")
    return json.loads((folder / "run" / "federation.json").read_bytes())


def _parsed(name: str, folder: Path) -> Value:
    table = at.open_table(name)
    plain = without(table.model_dump(exclude={"path"}), {"notes", "title", "why", "incomparable"})
    runs = {}
    for setting, row in at.pairs(table):
        chosen = {} if not row.search else {k: v[0] for k, v in row.search.items() if "." not in k}
        runs[f"{setting.name} / {row.name}"] = _text(at.recipe_for(table, setting, row, 0, chosen))
    apart = {s.name: sorted(s.incomparable) for s in table.settings}
    return [plain, apart, runs]


# -- after ----------------------------------------------------------------------------------------------------------
MINI = """
paper = "fednorms"
label = "Mini"
title = "A few digits"
seeds = 1

[recipe]
rounds = 2
model = "cnn-small"
training = { batch_size = 16 }

[[settings]]
name = "shift"
recipe.data = { size = 8, val = 0.1, test = 0.8 }
store = ["curve"]
[settings.columns]
Clean = "domain:clean"
Avg = "mean"
Worst = "worst"
Cost = "bytes"

[[rows]]
name = "FedAvg"
method = "fedavg"
published.shift = { Clean = 1.0, Avg = [100.0, 0.5] }

[[rows]]
name = "FedBN"
method = "fedbn"
published.shift = { Clean = 2.0, Avg = 0.1 }
search = { "training.lr" = [0.01, 0.05] }
"""


def after() -> Iterator[Probe]:
    for text in ("fedavg", "fedbn", "fedrdn", "hbn", "fedproto", "fedwon", "scaffold + fedper", "fedavg + finetune"):
        yield f"use/{text}", partial(_used, text)
    for name in sorted(at.ANALYSES):
        yield f"analyse/{name}", partial(_analysed, name)
    yield "compare", _compared
    yield "reproduce", _reproduced
    yield "export at a site", _at_a_site


def _images(folder: Path) -> Path:
    for k in range(12):
        picture(folder / "new" / ("cat", "dog", "owl")[k % 3] / f"{k}.png", 20 * k, (9, 9))
    return folder / "new"


def _used(text: str, folder: Path) -> Value:
    import torch

    import fednorms as fn

    fn.run(federation=tiny(), recipe=recipe(text), out=folder / "run")
    images, found = _images(folder), Several()
    scores = fn.evaluate_run(folder / "run", which="best", federation=tiny())
    found["evaluate"] = {name: told(s.to_dict()) for name, s in scores.items()}
    for site in (None, "a"):
        with contextlib.suppress(fn.BadInput):  # a method without a model for all, or without one for a site
            fn.export(folder / "run", folder / f"out {site}", site=site)
            found[f"export {site}"] = files_of(folder / f"out {site}")
            loaded = fn.load_model(folder / f"out {site}")
            found[f"logits {site}"] = loaded.logits(torch.from_numpy(pictures(5, 1)[0]))
            told_of = fn.predict(folder / "run", [images], site=site)
            found[f"predict {site}"] = [[p.label, p.probability, p.probabilities] for p in told_of]
    adapted = fn.adapt(folder / "run", images, folder / "adapted", epochs=1, test=0.3)
    found["adapt"] = [without(adapted.to_dict(), {"notes", "path"}), files_of(folder / "adapted")]
    opened = fn.open_run(folder / "run", federation=tiny())
    found["open"] = [opened.state.round, opened.state.model, sorted(opened.clients)]
    return found


def _analysed(name: str, folder: Path) -> Value:
    import fednorms as fn

    long = name == "drift-embedding"  # which looks at round 10
    return without(fn.analyse(_kept_run(11 if long else 3), name).plain(), {"words"})


def _kept_run(rounds: int) -> Path:
    """A run of which every round is kept, made once."""
    import fednorms as fn

    key = f"run of {rounds} rounds"
    if key not in _made:
        _made[key] = Path(tempfile.mkdtemp(dir=".")) / "run"
        made = recipe(
            "fedavg",
            federation="digits-shift",
            rounds=rounds,
            keep_checkpoints="all",
            data={"size": 8, "val": 0.1, "test": 0.8},
            evaluate=["global", "global/batch"],
            training={"batch_size": 32},
        )
        fn.run(recipe=made, out=_made[key])
    return _made[key]


def _compared(folder: Path) -> Value:
    import fednorms as fn

    made = fn.compare(["fedavg", "fedbn"], tiny(), recipe=recipe("fedavg"), seeds=2, out=folder / "compared")
    return [without(made.to_dict(), {"path", "files", "about"}), files_of(folder / "compared")]


def _reproduced(folder: Path) -> Value:
    import fednorms as fn

    (folder / "mini").mkdir()
    (folder / "mini" / "table.toml").write_text(MINI)
    done = fn.reproduce(folder / "mini", out=folder / "out", device="cpu")
    left_out = {"out", "files", "searches", "title", "verdict", "seconds"}
    return [without(done.to_dict(), left_out), files_of(folder / "out")]


def _at_a_site(folder: Path) -> Value:
    deployed("scaffold + fedbn", folder)
    at.export_at_site(folder / "run", "b", folder / "out", state=folder / "state" / "101")
    return files_of(folder / "out")


# -- words ----------------------------------------------------------------------------------------------------------
WRONG: list[str] = [
    "run --method fedbm",
    "run --method fedprox(mi=1)",
    "run --method fedprox(mu=-1)",
    "run --federation digit-shift",
    "run --model lenett",
    "run --participation some",
    "run --evaluate globl",
    "run --loss focall",
    "run --partition dirichlett",
    "run --augment flop",
    "run --method fedtan+fedtan",
    "run --method hbn+dplocal",
    "resume nowhere",
    "evaluate nowhere",
    "reproduce no-such-table",
    "analyse nowhere norms",
    "data check /nowhere",
    "unknown",
    "deploy init x --sites a --classes c --method fedtan",
]


def words() -> Iterator[Probe]:
    import fednorms as fn

    commands = [[], *([c] for c in ("run", "compare", "resume", "reproduce", "evaluate", "predict", "export", "adapt"))]
    commands += [["analyse"], ["data"], ["deploy"], ["list"], ["describe"]]
    commands += [["data", c] for c in ("check", "pack", "show")] + [["deploy", c] for c in ("init", "check", "export")]
    for command in commands:
        yield f"help/{' '.join(command)}", partial(_said, [*command, "--help"])
    for what in ("methods", "models", "federations", "partitions", "transforms", "analyses"):
        yield f"list/{what}", partial(_said, ["list", what])
    yield "reproduce --list", partial(_said, ["reproduce", "--list"])
    for text in WRONG:
        yield f"mistakes/{text}", partial(_said, text.split())
    for name in names_of_methods():
        yield f"describe/{name}", partial(lambda folder, n: [repr(fn.describe(n)), repr(at.what_leaves(n))], n=name)
        yield f"docstrings/{name}", partial(lambda folder, n: getattr(at.REGISTRY.get(n), "__doc__", None), n=name)
    yield "a run", _run_in_words
    yield "reproduce", _reproduced_in_words
    yield "a project", _project
    for name in at.known_tables():
        yield f"tables/{name}", partial(lambda folder, n: at.open_table(n).model_dump(exclude={"path"}), n=name)


def _said(command: list[str], folder: Path) -> Value:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(folder):
        code = at.main(command)
    here = str(folder.resolve())
    return [code, out.getvalue().replace(here, "HERE"), err.getvalue().replace(here, "HERE")]


def _run_in_words(folder: Path) -> Value:
    import fednorms as fn

    result = fn.run(federation=tiny(), recipe=recipe("fedbn"), out=folder / "run")
    fn.export(folder / "run", folder / "out", site="a")
    texts = [(folder / "out" / name).read_text() for name in ("README.txt", "model.json")]
    return [repr(result), result.notes, *texts, repr(tiny())]


def _reproduced_in_words(folder: Path) -> Value:
    _reproduced(folder)
    text = (folder / "out" / "RESULTS.md").read_text()
    return re.sub(r"\d+\.?\d* s\b|\d{4}-\d\d-\d\d|\b[0-9a-f]{10}\b|about [\d.]+ \w+", "", text)


def _project(folder: Path) -> Value:
    import fednorms as fn

    given = at.settings.Deployment(sites="a,b", classes="cat,dog")
    return [path.read_text() for path in at.write_project(folder / "p", fn.Recipe(method="fedbn"), given)]


# -- running --------------------------------------------------------------------------------------------------------
GROUPS: dict[str, Callable[[], Iterator[Probe]]] = {
    "methods": methods,
    "resume": resume,
    "privacy": privacy,
    "data": data,
    "models": models,
    "keys": keys,
    "after": after,
    "words": words,
}


def probe(thunk: Thunk) -> dict[str, str]:
    """The digests of a probe, by the names of its entries ("" if it has none)."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  a library may draw from it
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        try:
            value = thunk(Path(folder))
            parts = value if isinstance(value, Several) else {"": value}
            return {name: digest(part) for name, part in parts.items()}
        except Exception as error:
            traceback.print_exc()
            return {"": f"raised {type(error).__name__}"}


def main() -> None:
    out, *groups = [a for a in sys.argv[1:] if a != "--list"]
    digests: dict[str, str] = {}
    seconds: dict[str, float] = {}
    warnings.simplefilter("ignore")
    for group in groups:
        for name, thunk in GROUPS[group]():
            began = time.perf_counter()
            found = {"": ""} if "--list" in sys.argv else probe(thunk)
            for entry, value in found.items():
                digests[f"{group}/{name}" + (f": {entry}" if entry else "")] = value
            seconds[f"{group}/{name}"] = time.perf_counter() - began
    Path(out).write_text(json.dumps({"digests": digests, "seconds": seconds}))


if __name__ == "__main__":
    main()
