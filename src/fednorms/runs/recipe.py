"""Recipe: everything that determines a run, in a text form that reproduces it.

The command line's help shows the fields of a recipe, so what needs torch is imported where a value is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fednorms._version import __version__
from fednorms.core.errors import BadInput
from fednorms.core.options import did_you_mean, nearest, quoted, shortened
from fednorms.core.paths import given_path
from fednorms.core.precision import Precision
from fednorms.core.training import CUSTOM, Training
from fednorms.runs.option_names import key, recipe_file
from fednorms.runs.toml import dumps, loads

if TYPE_CHECKING:
    from fednorms.core.method import Method
    from fednorms.data.facts import Facts
    from fednorms.data.protocol import Protocol


class Data(BaseModel):
    """How a named federation or a folder of images becomes sites with training, validation and test splits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: str = ""
    """Folder of the data set that the federation names, such as "digits-five" (nothing is downloaded)."""
    protocol: str = ""
    """Which paper's split of the data set, such as "fedwon" (default: the first; see `fednorms data check ROOT`)."""
    complete: bool = True
    """Fail if image counts differ from the published ones."""
    allow_pickle: bool = False
    """Open a data set's pickled archives; only NumPy arrays are accepted in them."""
    size: int | str | None = None
    """Resize images to this many pixels, or to height and width as in "72x96" (default: keep their size; digits-shift:
    16)."""
    seed: int | None = None
    """Seed of the split into training, validation and test data (default 0)."""
    val: float | None = Field(default=None, ge=0, lt=1)
    """Fraction of each site's images for validation."""
    test: float | None = Field(default=None, ge=0, lt=1)
    """Fraction of each site's images for testing."""
    group: str = ""
    """For folders: a regular expression that finds in a file name what stays together, such as "(patient[0-9]+)"."""
    channels: int | None = None
    """For folders: 3 (RGB, the default), 1 (gray) or 4 (RGBA)."""
    group_across: bool = False
    """With a group: ids mean the same at all sites, so a patient stays in one split across sites, too."""
    copies: Literal["keep", "drop", "together"] = "keep"
    """Equal images: keep all, drop all but one (a test image stays), or keep them together in one split (folders)."""
    skip_broken: bool = False
    """Leave out image files that cannot be read; the run records which."""
    subset: float | None = Field(default=None, gt=0, le=1)
    """Keep this fraction of every split of every site, for quick trials (default: all)."""
    normalize: str = ""
    """Mean and standard deviation of the input: "imagenet", "half" (pixels in [-1, 1]), "none", or numbers as in
    "0.5/0.25" (default: those of the data set)."""
    hold_out: list[str] = []
    """Sites or domains that do not train and are tested as unseen."""
    proxy: str = ""
    """Labeled images for the server, which some methods need (fedlaw): a fraction of each client's training images,
    such as "0.05", or a site, which then takes no part. They leave their sites."""
    augment: str = "auto"
    """Transforms of training images: a chain such as "flip_rotate" (see `fednorms list transforms`), "none", or "auto"
    (those of the data set's papers)."""
    partition: str = ""
    """Partition the training sites, such as "dirichlet(beta=0.3, clients=100)" or "file:PATH" (default: keep them)."""

    @field_validator("size", mode="before")
    @classmethod
    def _sized(cls, size: object) -> object:
        from fednorms.data.sizes import as_written

        return None if size is None else as_written(size)

    @field_validator("proxy", mode="before")
    @classmethod
    def _written(cls, proxy: object) -> object:
        return str(proxy) if isinstance(proxy, float) else proxy

    @field_validator("normalize")
    @classmethod
    def _known(cls, text: str) -> str:
        from fednorms.core.preprocessing import Preprocessing

        if text:
            Preprocessing.read(text, 1)
        return text

    @field_validator("partition")
    @classmethod
    def _readable(cls, text: str) -> str:
        from fednorms.data.rules import rule

        return str(rule(text)) if text and not text.startswith("file:") else text

    @field_validator("augment")
    @classmethod
    def _chain(cls, name: str) -> str:
        from fednorms.transforms.chains import CHAINS

        known = ("auto", "none", *CHAINS)
        if name not in known:
            raise BadInput(f'Unknown chain of transforms "{name}" in data.augment: {nearest(name, known)}.')
        return name


class Recipe(BaseModel):
    """A run: method, federation, model, rounds, and how clients train and are tested.

    >>> recipe = Recipe(method="fedbn", rounds=3, training={"lr": 0.1})
    >>> recipe.training.lr, Recipe.from_toml(recipe.to_toml()) == recipe
    (0.1, True)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = "fedavg"
    """Parts joined by +, as in "scaffold + greg(alpha=1.0) + fedfn"."""
    federation: str = "digits-shift"
    """A name (see `fednorms list federations`) or a folder of site/class/image."""
    model: str = "cnn-small"
    """A name (see `fednorms list models`), torchvision:NAME, timm:NAME, or a custom model, mymodule:Net."""
    rounds: int = Field(default=30, ge=1)
    """Rounds of federated training."""
    seed: int = 0
    """Seed of model, batches, cohorts and all randomness in training."""
    participation: str = "all"
    """"all", "fixed:10" (clients), "fixed:0.1" (a fraction) or "bernoulli:0.4"."""
    weighting: Literal["auto", "size", "uniform"] = "auto"
    """Weights of client models: by data size, equal, or auto (as in the method's paper)."""
    training: Training = Training()
    data: Data = Data()
    loss: str = "auto"
    """Base loss: cross_entropy, focal (gamma 2), or auto (that of the data set's papers, by default cross_entropy)."""
    class_weights: list[float] | Literal["auto", "none", "balanced"] = "auto"
    """Weight of each class in the loss; balanced: n / (classes * n_c) over all training data; auto: those of the data
    set's papers, with their loss."""
    metric: Literal["auto", "accuracy", "balanced_accuracy"] = "auto"
    """The score that chooses the best validation round and is reported first; auto: that of the data set's papers."""
    head: list[str] = []
    """Names of the classifier's layers, if they cannot be found."""
    pretrained: bool = False
    """Start a torchvision or timm model from its published weights (downloads them)."""
    weights: str = ""
    """Start the model from this safetensors or torch file."""
    evaluate: list[str] = ["auto"]
    """Evaluation modes, such as "personal", "global/batch" or "global/batch:32"; auto: those that fit the method."""
    evaluate_every: int = Field(default=1, ge=1)
    """Test every this many rounds, and after the last."""
    validate_every: int | None = Field(default=None, ge=1)
    """Between tests, validate every this many rounds, and test a round that is the best so far (default: never)."""
    patience: int | None = Field(default=None, ge=1)
    """Stop when the validation score has not improved for this many rounds (default: train all rounds)."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Write a checkpoint every this many rounds, and after the last."""
    keep_checkpoints: Literal["newest", "all", "resume"] = "newest"
    """Which checkpoints to keep: newest, the last two and the best model; all, every one, to analyze rounds later;
    resume, the last two only, which saves time with large models."""
    keep_predictions: bool | None = None
    """Keep the test predictions of the last and the best round, to compare runs (default: up to 64 MB per mode)."""
    on_divergence: Literal["stop", "skip"] = "stop"
    """What to do when a client's update or loss is not finite."""
    engine: Literal["auto", "loop", "graphs", "workers"] = "auto"
    """How clients run: loop, one after the other; graphs, as CUDA graphs on streams; workers, in processes, one
    per core or GPU; auto: graphs on a GPU; on a CPU loop, or workers if threads=1 and they prove faster."""
    workers: int = Field(default=0, ge=0)
    """Worker processes (0: one per core or GPU)."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu or cuda."""
    precision: Precision = "float32"
    """float32, float64, tf32 (float32 with short products on a GPU) or bfloat16 (autocast)."""
    deterministic: bool = True
    """Repeat bit for bit on one device; false lets cuDNN choose the fastest algorithm."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per client; more help only large networks. Results repeat bit for bit with equal threads."""
    memory: float | None = Field(default=None, gt=0)
    """GPU memory to take, as a share (up to 1) or in bytes (default: what is free when it is needed)."""
    state_limit_mb: int = Field(default=1024, ge=0)
    """Client states beyond this many megabytes are stored on disk."""
    version: str = __version__
    """The library's version."""
    fingerprint: str = ""
    """Hash of the federation's data, recorded by a run; a run does not resume on other data."""
    own_parts: dict[str, str] = {}
    """Custom parts of the method, each with a hash of its code; recorded by a run."""

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **values: object) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                problems = "; ".join(_problem(e).rstrip(".") for e in error.errors())
                raise BadInput(problems + "." * (not problems.endswith("?"))) from None

    @model_validator(mode="before")
    @classmethod
    def _of_older_versions(cls, values: object) -> object:
        if not isinstance(values, dict) or "version" not in values:
            return values
        from fednorms.runs.history import as_then_meant  # needs torch, which help and mistyped options do without

        return as_then_meant(values)

    @field_validator("method")
    @classmethod
    def _canonical(cls, text: str) -> str:
        return str(_method(text))

    @field_validator("participation")
    @classmethod
    def _readable(cls, text: str) -> str:
        from fednorms.core.sampling import Participation

        Participation.read(text)
        return text

    @field_validator("evaluate")
    @classmethod
    def _known(cls, modes: list[str]) -> list[str]:
        from fednorms.evaluation.modes import Mode

        for text in modes:
            if text != "auto":
                Mode.read(text)
        return modes

    def resolved(self) -> Recipe:
        """Replace what depends on the machine or on other settings by its value, to record it."""
        from fednorms.engines.base import PROVIDES
        from fednorms.engines.devices import pick_device
        from fednorms.runs.identity import named_model, own_parts

        device = pick_device(self.device)
        engine = self.engine
        if engine == "auto":
            own = self.training.optimizer.startswith(CUSTOM)  # only the loop runs one
            fast = not own and all(p.requires <= PROVIDES["graphs"] for p in _method(self.method).parts)
            measured = device == "cpu" and self.threads == 1  # the choice changes no bit, so it need not be recorded
            engine = "graphs" if device.startswith("cuda") and fast else "auto" if measured else "loop"
        mine = own_parts(_method(self.method))
        model = named_model(self.model)
        update = {"device": device, "engine": engine, "own_parts": mine, "model": model}
        return self.model_copy(update=update).settled()

    def settled(self) -> Recipe:
        """Replace options of the method that depend on the rest of the recipe by their values, to record them.

        >>> Recipe(method="fedprox(mu=0.1) + fednova").settled().method
        'fedprox(mu=0.1) + fednova(mu=0.1)'
        """
        return self.model_copy(update={"method": str(_method(self.method).settled(self.training))})

    def adopting(self, protocol: Protocol) -> Recipe:
        """Replace every "auto" that the data set decides by its value, to record it.

        >>> from fednorms.data.protocol import Protocol
        >>> Recipe().adopting(Protocol("flip")).data.augment, Recipe().adopting(Protocol()).loss
        ('flip', 'cross_entropy')
        """
        augments = any(p.name == "augment" for p in _method(self.method).parts)
        augment = protocol.augment if self.data.augment == "auto" and not augments else self.data.augment
        loss = protocol.loss if self.loss == "auto" else self.loss
        weights = self.class_weights
        if weights == "auto":  # weights belong to their loss
            weights = list(protocol.class_weights) if protocol.class_weights and loss == protocol.loss else "none"
        return self.model_copy(
            update={
                "data": self.data.model_copy(update={"augment": "none" if augment == "auto" else augment}),
                "loss": loss,
                "class_weights": weights,
                "metric": protocol.metric if self.metric == "auto" else self.metric,
            }
        )

    def whole_method(self) -> Method:
        """The method as it trains: with the part `augment` first if `data.augment` names a chain.

        >>> str(Recipe(method="fedbn", data={"augment": "flip"}).whole_method())
        "augment(chain='flip') + fedbn"
        """
        chosen, chain = _method(self.method), self.data.augment
        if chain in ("auto", "none"):
            return chosen
        if any(p.name == "augment" for p in chosen.parts):
            raise BadInput(
                f'Images would be augmented twice: by data.augment = "{chain}" and by the method "{chosen}". '
                "Leave out one of them."
            )
        return _method(f"augment(chain='{chain}')") + chosen

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; keys that version 0.1 did not have only where they are set."""
        training = {k: v for k, v in vars(self.training).items() if v is not None or k not in _LATER}
        data = {k: v for k, v in self.data.model_dump(mode="json").items() if k not in _LATER_DATA or v != _OF_DATA[k]}
        values = self.model_dump(mode="json") | {"training": training, "data": data}
        return {k: v for k, v in values.items() if v is not None or k not in _LATER}

    def across_machines(self, facts: Facts | None) -> bool:
        """Whether a stored run's images are at its sites: nobody could take their fingerprint."""
        from fednorms.data.facts import ACROSS_MACHINES

        return not self.fingerprint and facts is not None and facts.name == ACROSS_MACHINES

    def to_toml(self) -> str:
        """The complete recipe as TOML."""
        return dumps(self.to_dict())

    @classmethod
    def from_toml(cls, text: str, where: str = "The recipe") -> Recipe:
        """Read a recipe; every problem is reported at once, with the nearest known name for unknown ones."""
        values = loads(text, where)
        if "version" in values:  # recorded by a run; without a device by one of version 0.1, on the CPU
            values.setdefault("device", "cpu")
        return cls.make(values, where)

    @classmethod
    def make(cls, values: dict[str, Any], where: str = "") -> Recipe:
        """A recipe from plain values, with all problems in one message.

        `where` says which file the values come from. Without it, messages name the options of the interface in use.
        """
        try:
            with recipe_file() if where else nullcontext():
                _refuse_unwritable(values)
                return cls(**values)
        except BadInput as error:
            raise BadInput(f"{where}: {error}" if where else str(error)) from None
        except RecursionError:
            raise BadInput(f"{where or 'The recipe'} is nested too deeply.") from None

    @classmethod
    def given(cls, recipe: object, training: object) -> Recipe:
        """What was passed as recipe=, or a recipe of defaults for None; both arguments are checked."""
        if not isinstance(training, Training | None):
            raise BadInput(f"training= must be fednorms.Training(...), got {quoted(training)}.")
        if recipe is None or isinstance(recipe, Recipe):
            return recipe or cls()
        fix = f". To read a file: fednorms.Recipe.read({quoted(str(recipe))})" if isinstance(recipe, str | Path) else ""
        raise BadInput(f"recipe= must be a fednorms.Recipe, got {quoted(recipe)}{fix}.")

    @classmethod
    def read(cls, path: Path | str) -> Recipe:
        """Read a recipe from a file."""
        path = given_path("path", path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise BadInput(f'Cannot read the recipe "{path}": {what}.') from None
        return cls.from_toml(text, str(path))


_LATER = ("patience", "keep_predictions", "memory", "warmup", "client_epochs")
_LATER_DATA = ("group_across", "copies", "skip_broken", "subset", "normalize")
_OF_DATA = Data().model_dump(mode="json")


def _method(text: str) -> Method:
    from fednorms.methods.registry import method

    return method(text)


def _refuse_unwritable(value: object, path: str = "") -> None:
    """Refuse what a TOML file cannot hold, whatever the interface: integers of more than 64 bits, and bad UTF-8."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _refuse_unwritable(inner, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_unwritable(inner, path)
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        shown = shortened(value.encode("ascii", "backslashreplace").decode())
        raise BadInput(f'{key(path)} must be UTF-8, got "{shown}". Rename the file or folder.')
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BadInput(f"{key(path)} must be an integer of at most 64 bits, got one of {value.bit_length()} bits.")


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "list": "a list",
    "dict": "a table of keys and values",
    "bool": "true or false",
    "model": "a table of keys and values",
    "dataclass": "a table of keys and values",
    "finite": "a finite number",
}


def _problem(error: object) -> str:
    """What is wrong with one key, in one sentence without an end."""
    assert isinstance(error, dict)
    kind, place, more = error["type"], error["loc"], error.get("ctx", {})
    within = 2 if place and place[0] in ("training", "data") else 1  # what follows are positions, and types of a union
    path = ".".join(map(str, place[:within]))
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        inside = {"training": [f.name for f in fields(Training)], "data": list(Data.model_fields)}
        known = inside.get(str(place[0]), []) if len(place) > 1 else list(Recipe.model_fields)
        return f'unknown key "{path}": {nearest(str(place[-1]), known)}'
    if kind == "value_error":
        return str(more["error"])
    want = _WANTED.get(kind.partition("_")[0], "")
    for bound, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if bound in more:
            want = f"{sign} {more[bound]}"
    if path == "participation":
        want += ', such as "fixed:10", "fixed:0.1" or "bernoulli:0.4"'
    if kind == "list_type" and isinstance(error["input"], str):
        want += f", as in [{quoted(error['input'])}]"
    near = ""
    if kind == "literal_error":
        want = more["expected"].replace("'", '"')
        near = did_you_mean(str(error["input"]), want.replace('"', "").replace(" or ", ", ").split(", "))
    said = f"must be {want}" if want else error["msg"][:1].lower() + error["msg"][1:]
    return f"{key(path)} {said}, got {quoted(error['input'])}{f'; {near.strip()}' if near else ''}"
