"""Damage a random file of every kind: what is read afterwards is an error of ours, or exactly what was written."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

import fednorms as fn
from fednorms.core.errors import FednormsError
from fednorms.core.states import ClientState
from fednorms.core.tree import Tree
from fednorms.data.pack import pack
from fednorms.data.packed import unpacked
from fednorms.runs.store.checkpoint import load, load_best
from fednorms.runs.store.packing import pack_client, unpack_client
from fednorms.runs.store.seal import check_tensors, sealed_tensors
from tests.campaign.kills import RUN
from tests.campaign.scene import Budget, Outcome, command, damaged, options, scene

Reading = Callable[[Path], object]


def campaign(seconds: float, seed: int) -> Outcome:
    found, draw = Outcome("corruption"), random.Random(seed)
    with scene() as root:
        assert command(root, "run", *options(root, *RUN), "--out", root / "run").code == 0
        fn.export(root / "run", root / "model", averaged=True)
        site = fn.from_folders(root / "images", cache=root / "decoded")
        (root / "packs").mkdir()
        pack(site, root / "packs" / "raw.fnpack")
        pack(site, root / "packs" / "png.fnpack", "png")
        (root / "state").mkdir()
        state = pack_client(ClientState(1, Tree(w=torch.arange(50.0)), {}))
        (root / "state" / "round-000001.safetensors").write_bytes(sealed_tensors(state))
        kinds: dict[str, Reading] = {
            "run": _run,
            "model": lambda folder: _same(fn.load_model(folder)),
            "packs": lambda folder: [unpacked(folder / f"{c}.fnpack").fingerprint() for c in ("raw", "png")],
            "decoded": lambda folder: fn.from_folders(root / "images", cache=folder).fingerprint(),
            "state": lambda folder: _state(folder / "round-000001.safetensors"),
        }
        expected = {name: read(root / name) for name, read in kinds.items()}
        for _ in Budget(seconds):
            kind = draw.choice(list(kinds))
            copy = Path(shutil.copytree(root / kind, root / "copy"))
            file = draw.choice(sorted(p for p in copy.rglob("*") if p.is_file()))
            data = file.read_bytes()
            file.write_bytes(damaged(data, draw)) if draw.random() < 0.9 else file.unlink()
            found.tries += 1
            problem = ""
            try:
                if kinds[kind](copy) != expected[kind] and file.name not in (".lock", "README.txt"):
                    problem = "another result"
            except FednormsError:
                pass
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                found.bad.append(f"{file.relative_to(root)}: {problem}")
            shutil.rmtree(copy)
    return found


def _run(folder: Path) -> object:
    """What is read of a run: its facts, its last checkpoint with all clients, its metrics and its best model."""
    opened = fn.open_run(folder)
    found = load(folder / "checkpoints")
    assert found is not None
    note = opened.directory.check_metrics(found.extra.get("metrics"))
    best = load_best(folder / "checkpoints")
    rows = [] if note else [row["scores"] for row in opened.directory.metrics()[: found.server.round]]
    states = [found.server.model, *(c.local for c in found.clients.values()), *([best.server.model] if best else [])]
    if found.notes or opened.notes or note or best is None:
        raise FednormsError("it says that it is damaged")
    return opened.facts, opened.recipe, rows, [{k: v.tolist() for k, v in tree.items()} for tree in states]


def _same(model: fn.load_model) -> object:  # type: ignore[valid-type]
    images = torch.arange(3 * 8 * 8, dtype=torch.uint8).view(1, 3, 8, 8)
    return model(images).tolist(), model.classes


def _state(file: Path) -> object:
    data = file.read_bytes() if file.exists() else b""
    try:
        check_tensors(data)
        return unpack_client(data).local["w"].tolist()
    except Exception as error:  # `Generations` names the file; the deployment's tests cover that
        raise FednormsError(str(error)) from error
