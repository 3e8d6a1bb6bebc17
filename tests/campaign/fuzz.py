"""Random texts, recipes, packs, pickles and weights: an answer or an error of ours, within seconds."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import fednorms as fn
from fednorms.core.errors import FednormsError
from fednorms.core.sampling import Participation
from fednorms.data.pack import pack
from fednorms.data.packed import unpacked
from fednorms.data.pickles import loads
from fednorms.models.weights import read_state_dict
from fednorms.runs.recipe import Recipe
from tests.campaign.scene import Budget, Outcome, damaged, scene

LONGEST = 20.0  # seconds of one try, on a busy machine
WORDS = [
    *("fedavg", "fedbn", "scaffold", "greg(alpha=1.0)", "fedprox(mu=0.1)", "1e400", "nan", "inf", "9", "é", "\0"),
    *"+(),=.-'\"[]",
    chr(0xD800),
]


def campaign(seconds: float, seed: int) -> Outcome:
    found, draw = Outcome("fuzz"), random.Random(seed)
    with scene() as root:
        made = pack(fn.from_folders(root / "images", cache=False), root / "data.fnpack").read_bytes()
        torch.save({"w": torch.ones(3), "b": torch.zeros(2)}, root / "w.pt")
        weights, recipe = (root / "w.pt").read_bytes(), Recipe(method="fedbn", rounds=3).to_toml()
        array = pickle.dumps({"data": np.arange(20), "labels": [1, 2]}, 2)
        kinds: list[Callable[[], object]] = [
            lambda: fn.method(_text(draw)),
            lambda: Participation.read(draw.choice(["fixed:", "bernoulli:", ""]) + _text(draw)[:30]),
            lambda: Recipe.from_toml(_edited(recipe, draw)),
            lambda: Recipe.from_toml(damaged(recipe.encode(), draw).decode("utf-8", "replace")),
            lambda: unpacked(_pack(root / "fuzzed.fnpack", made, draw)).fingerprint(),
            lambda: loads(damaged(array, draw)),
            lambda: read_state_dict(_written(root / "fuzzed.pt", damaged(weights, draw))),
        ]
        for number in Budget(seconds):
            work, before, state = kinds[number % len(kinds)], time.monotonic(), draw.getstate()
            found.tries += 1
            try:
                work()
            except FednormsError:
                pass
            except Exception as error:
                found.bad.append(f"kind {number % len(kinds)}, {hash(state)}: {type(error).__name__}: {error}"[:300])
            if time.monotonic() - before > LONGEST:
                found.bad.append(f"kind {number % len(kinds)} took {time.monotonic() - before:.0f} s")
    return found


def _text(draw: random.Random) -> str:
    if draw.random() < 0.05:
        return draw.choice(WORDS) * draw.choice([400, 1200, 10**5])
    return "".join(draw.choice(WORDS) + draw.choice(["", " "]) for _ in range(draw.randrange(12)))


def _edited(recipe: str, draw: random.Random) -> str:
    lines = recipe.splitlines()
    at = draw.randrange(len(lines))
    value = draw.choice(
        ["1e400", "9" * 400, "[]", "{}", "true", "-1", '""', "nan", "[" * 2000, json.dumps("é\t"), "{a=1}"]
    )
    lines[at] = f"{lines[at].partition('=')[0]} = {value}" if draw.random() < 0.8 else _text(draw)
    return "\n".join(lines)


def _pack(path: Path, whole: bytes, draw: random.Random) -> Path:
    """A pack whose header has one value replaced, with the right hash; or simply a damaged one."""
    if draw.random() < 0.3:
        return _written(path, damaged(whole, draw))
    at, length = struct.unpack("<QQ", whole[16:32])
    header = json.loads(whole[at : at + length])
    place = header
    while isinstance(place, dict | list) and place:
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
        if not isinstance(place[key], dict | list) or draw.random() < 0.3:
            place[key] = draw.choice([None, -1, 0, 10**30, 1.5, "x", [], {}, [-1, 5], [[1]], True])
            break
        place = place[key]
    text = json.dumps(header).encode()
    start = whole[:16] + struct.pack("<QQ", at, len(text)) + hashlib.blake2b(text, digest_size=16).digest()
    return _written(path, start + whole[len(start) : at] + text)


def _written(path: Path, data: bytes) -> Path:
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path
