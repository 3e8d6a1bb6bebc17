"""The header of a pack: which keys it has, and in which ranges. A file from a stranger is checked before it is used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.folders.decode import MOST_PIXELS
from fednorms.data.protocol import Protocol

_Count = Annotated[int, Field(ge=0, lt=2**62, strict=True)]
_Side = Annotated[int, Field(ge=1, le=MOST_PIXELS, strict=True)]


class _Site(BaseModel):
    name: str
    domain: str
    attributes: dict[str, Any]
    splits: dict[Literal["train", "val", "test"], tuple[_Count, _Count]]


class _Header(BaseModel):
    name: str
    classes: list[str]
    preprocessing: dict[str, Any]
    source: dict[str, Any]
    shape: tuple[_Side, _Side, _Side]
    dtype: Literal["|u1", "<f4", "<f8"]
    codec: Literal["raw", "png", "webp", "jpeg"]
    quality: int | None
    images: _Count
    blocks: dict[str, tuple[_Count, _Count]]
    data_hash: str
    sites: list[_Site]
    protocol: dict[str, Any] = {}
    covered: _Count = 0  # from here on: not in packs of version 0.1
    hashes_hash: str = ""


def check_header(header: object, where: str) -> None:
    """Refuse a header that `pack` cannot have written.

    >>> check_header({"name": "x"}, 'Pack "x.fnpack"')
    Traceback (most recent call last):
    fednorms.BadInput: Pack "x.fnpack": its header is not one that fednorms writes (classes: field required); create ...
    """

    def wrong(what: str) -> BadInput:
        return BadInput(f"{where}: its header is not one that fednorms writes ({what}); create it again.")

    try:
        found = _Header.model_validate(header)
        Preprocessing.from_dict(found.preprocessing)
        Protocol.from_dict(found.protocol)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise wrong(f"{place}: {first['msg'][0].lower() + first['msg'][1:]}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise wrong(f"{type(error).__name__}: {error}") from None
    channels, height, width = found.shape
    if channels > 4096 or height * width > MOST_PIXELS:
        raise wrong(f"images of {channels} x {height} x {width}")
    if missing := {"images", "labels", "rows"} - found.blocks.keys():
        raise wrong(f"blocks: {', '.join(sorted(missing))} is missing")
    if found.codec != "raw" and (found.dtype != "|u1" or channels not in (1, 3, 4)):
        raise wrong(f"{found.codec} with {channels} channels of {found.dtype}")
