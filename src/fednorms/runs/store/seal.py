"""Content hashes inside the files that they protect: JSON objects, and safetensors with a header in JSON.

A file without a hash is older than the hashes and is accepted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = "hash"


def hasher() -> hashlib.blake2b:
    """The hash of the files of runs and exports: BLAKE2b of 20 bytes."""
    return hashlib.blake2b(digest_size=20)


def hash_of(data: bytes) -> str:
    """The hash of some bytes.

    >>> hash_of(b"")[:8]
    '3345524a'
    """
    made = hasher()
    made.update(data)
    return made.hexdigest()


def hash_of_file(path: Path) -> str:
    """The hash of a file, read in chunks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, hasher).hexdigest()


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the hash of its content.

    >>> unsealed(sealed({"a": 1}))
    {'a': 1}
    """
    return {**body, KEY: _hash_of_json(body)}


def unsealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a JSON object, after checking its hash; a ValueError if it differs.

    >>> unsealed({**sealed({"a": 1}), "a": 2})
    Traceback (most recent call last):
    ValueError: its content hash differs
    """
    body = {key: value for key, value in values.items() if key != KEY}
    if KEY in values and values[KEY] != _hash_of_json(body):
        raise ValueError("its content hash differs")
    return body


def sealed_tensors(data: bytes) -> bytes:
    """The bytes of a safetensors file, with the hash of its content in its metadata."""
    header, tensors = _parts(data)
    about = dict(header.pop("__metadata__", {}))
    about.pop(KEY, None)
    found = _hash_of_tensors(header, about, tensors)
    text = json.dumps({"__metadata__": {**about, KEY: found}, **header}).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + tensors


def check_tensors(data: bytes) -> None:
    """Check the hash of what `sealed_tensors` made; a ValueError if it differs.

    >>> import torch
    >>> from safetensors.torch import load, save
    >>> data = sealed_tensors(save({"w": torch.ones(2)}, {"a": "b"}))
    >>> check_tensors(data), load(data)
    (None, {'w': tensor([1., 1.])})
    >>> check_tensors(data[:-1] + b"!")
    Traceback (most recent call last):
    ValueError: its content hash differs
    """
    header, tensors = _parts(data)
    about = dict(header.pop("__metadata__", {}))
    claimed = about.pop(KEY, None)
    if claimed is not None and claimed != _hash_of_tensors(header, about, tensors):
        raise ValueError("its content hash differs")


def has_seal(data: bytes) -> bool:
    """Whether the bytes of a safetensors file hold a hash of their content."""
    return KEY in _parts(data)[0].get("__metadata__", {})


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, data[end:]


def _hash_of_json(body: Mapping[str, Any]) -> str:
    return hash_of(json.dumps(body, sort_keys=True).encode())


def _hash_of_tensors(header: dict[str, Any], about: dict[str, Any], tensors: bytes) -> str:
    made = hasher()
    made.update(json.dumps([header, about], sort_keys=True).encode())
    made.update(tensors)
    return made.hexdigest()
