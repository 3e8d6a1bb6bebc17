"""What a message may contain: one model per kind, with bounds. Whatever arrives is read through them once.

A message that breaks a rule raises `BadMessage`, whose text says which rule. The server leaves its sender out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fednorms.core.errors import BadInput, FednormsError

LONGEST_TEXT = 4 * 2**20  # characters of a card or an agreement
MOST_IMAGES = 10**9  # of one site
MOST_PIXELS = 2**26  # of one image, over all channels
MOST_CLASSES = 100_000


class BadMessage(FednormsError):
    """A message cannot be used; says why, in a few words."""


Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Count = Annotated[int, Field(ge=0, le=MOST_IMAGES)]
Share = Annotated[float, Field(ge=0, le=1)]
Side = Annotated[int, Field(ge=1, le=2**16)]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]


class _Message(BaseModel):
    """Strict: no text for a number, no number for a truth value, nothing that is not finite."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class PreprocessingText(_Message):
    """The normalization of pixels in a card."""

    mean: Annotated[list[Number], Field(min_length=1, max_length=1024)] | None = None
    std: Annotated[list[Number], Field(min_length=1, max_length=1024)] | None = None
    crop: Side | None = None


class ProtocolText(_Message):
    """A data set's protocol in a card."""

    augment: Name = "none"
    loss: Name = "cross_entropy"
    class_weights: Annotated[list[Number], Field(max_length=MOST_CLASSES)] = []
    metric: Literal["accuracy", "balanced_accuracy"] = "accuracy"


class _DataText(_Message):
    """What a card and an agreement both say about the data."""

    classes: Annotated[list[Name], Field(min_length=1, max_length=MOST_CLASSES)]
    shape: tuple[Side, Side, Side]
    dtype: Literal["uint8", "float16", "bfloat16", "float32", "float64"]
    preprocessing: PreprocessingText
    protocol: ProtocolText = ProtocolText()
    counts: Annotated[list[Count], Field(max_length=MOST_CLASSES)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if math.prod(self.shape) > MOST_PIXELS:
            raise ValueError(f"images of {'x'.join(map(str, self.shape))} have more than {MOST_PIXELS} numbers")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("a class is named twice")
        if self.counts and len(self.counts) != len(self.classes):
            raise ValueError(f"{len(self.counts)} counts for {len(self.classes)} classes")
        return self


class CardText(_DataText):
    """A site's card."""

    site: Name
    domain: Name
    train: Count
    val: Count
    test: Count
    order: Count = 0

    @model_validator(mode="after")
    def _counted(self) -> Self:
        if self.counts and sum(self.counts) != self.train:
            raise ValueError(f"the classes have {sum(self.counts)} training images, the site {self.train}")
        return self


class AgreementText(_DataText):
    """What every site is told about all of them."""

    clients: Annotated[int, Field(ge=1, le=10**6)]
    samples: Annotated[int, Field(ge=1, le=10**15)]


class AskWords(_Message):
    """What the server says with every message about a round."""

    round: Annotated[int, Field(ge=0, le=10**9)]
    accepted: Annotated[int, Field(ge=-1, le=10**9)]
    agreement: str
    score: bool = False
    part: str = ""
    when: str = ""
    tests: Annotated[list[str], Field(max_length=100)] = []


class TrainWords(_Message):
    """What a site says with its upload."""

    site: Name
    kept: Annotated[int, Field(ge=-1, le=10**9)]


class TrainMetrics(_Message):
    """How training went, where a site tells it."""

    loss: Annotated[float, Field(ge=-1e30, le=1e30)] | None = None
    steps: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    dropped: Annotated[float, Field(ge=0, le=MOST_IMAGES)] = 0.0


class ScoreRecord(_Message):
    """The scores of one test at one site; `recall` is empty unless the site's policy allows class counts."""

    accuracy: Share
    balanced_accuracy: Share
    loss: Annotated[float, Field(ge=0, le=1e30)]
    samples: Annotated[int, Field(ge=1, le=MOST_IMAGES)]
    recall: Annotated[list[Annotated[float, Field(allow_inf_nan=True)]], Field(max_length=MOST_CLASSES)] = []

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if wrong := [r for r in self.recall if not math.isnan(r) and not 0 <= r <= 1]:
            raise ValueError(f"a recall is between 0 and 1, got {wrong[0]!r}")
        return self


M = TypeVar("M", bound=BaseModel)


def read_text(kind: type[M], text: object) -> M:
    """Read a message's JSON text.

    >>> read_text(TrainWords, '{"site": "north", "kept": "5"}')
    Traceback (most recent call last):
    fednorms.flower.schema.BadMessage: kept: input should be a valid integer, got '5'
    """
    if not isinstance(text, str):
        raise BadMessage(f"text expected, got {type(text).__name__}")
    if len(text) > LONGEST_TEXT:
        raise BadMessage(f"a text of {len(text)} characters, more than {LONGEST_TEXT}")
    try:
        return kind.model_validate_json(text)
    except (ValidationError, BadInput) as error:
        raise BadMessage(problem(error)) from None


def read_values(kind: type[M], values: Mapping[str, Any]) -> M:
    """Read a message's record."""
    try:
        return kind.model_validate(dict(values))
    except (ValidationError, BadInput) as error:
        raise BadMessage(problem(error)) from None


def problem(error: Exception) -> str:
    """The first problem that pydantic found, in one line.

    >>> problem(ValueError("x" * 1000))[-5:]
    'xx...'
    """
    if not isinstance(error, ValidationError):
        return printable(str(error))
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return printable(str(first["ctx"]["error"]))
    place, said = ".".join(map(str, first["loc"])), first["msg"][0].lower() + first["msg"][1:]
    return printable(f"{place}: {said}, got {_shown(first['input'])}" if place else said)


def printable(text: object, most: int = 500) -> str:
    r"""A stranger's text for logs and files: no control characters, and not longer than a few lines.

    >>> printable("a\x1b[2J\nb"), printable(7)
    ('a?[2J b', '7')
    """
    said = text[: most + 1] if isinstance(text, str) else _shown(text)
    said = "".join(c if c.isprintable() else " " if c == "\n" else "?" for c in said)  # one line: logs have no others
    return said if len(said) <= most else said[:most] + "..."


def _shown(value: object) -> str:
    """A value in a message; nested and long ones are not written out."""
    if isinstance(value, (list, dict, tuple, bytes)):
        return f"{type(value).__name__} with {len(value)} entries"
    try:
        return repr(value)[:100]
    except ValueError:  # Python refuses to print very long integers
        return "a very large integer"
