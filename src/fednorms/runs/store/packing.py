"""Server and client states as safetensors bytes and back, bit for bit and in the same order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors.torch import load, save
from torch import Tensor

from fednorms.core.states import ClientState, ServerState
from fednorms.core.tree import Tree

_KEY = "fednorms"  # in the metadata, because safetensors stores neither empty trees nor the order of names


def pack_server(state: ServerState) -> bytes:
    """Pack the server's state as the bytes of a safetensors file, with tensors model/NAME and part/PART/NAME.

    >>> state = ServerState(3, Tree(w=torch.ones(2)), {"scaffold": Tree()}, seed=7)
    >>> again = unpack_server(pack_server(state))
    >>> again.round, again.model, again.parts
    (3, {'w': tensor([1., 1.])}, {'scaffold': {}})
    """
    trees = {"model": state.model, **_parts(state.parts)}
    return _pack(trees, {"kind": "server", "round": state.round, "seed": state.seed})


def unpack_server(data: bytes, device: torch.device | str = "cpu") -> ServerState:
    """Unpack what `pack_server` packed, onto `device`.

    >>> unpack_server(pack_server(ServerState(0, Tree(), {}, seed=7))).seed
    7
    """
    about, trees = _unpack(data, device)
    return ServerState(about["round"], trees.pop("model"), _unparts(trees), about["seed"])


def pack_client(state: ClientState) -> bytes:
    """Pack a client's state as the bytes of a safetensors file: local/NAME, velocity/NAME and part/PART/NAME.

    >>> state = ClientState(3, Tree(), {"scaffold": Tree({"a/b": torch.ones(2)})})
    >>> list(unpack_client(pack_client(state)).parts["scaffold"])
    ['a/b']
    """
    trees = {"local": state.local, "velocity": state.velocity, **_parts(state.parts)}
    return _pack(trees, {"kind": "client", "round": state.round})


def unpack_client(data: bytes, device: torch.device | str = "cpu") -> ClientState:
    """Unpack what `pack_client` packed, onto `device`.

    >>> unpack_client(pack_client(ClientState(3, Tree(), {}))).round
    3
    """
    about, trees = _unpack(data, device)
    return ClientState(about["round"], trees.pop("local"), velocity=trees.pop("velocity"), parts=_unparts(trees))


def _parts(parts: Mapping[str, Tree]) -> dict[str, Tree]:
    # Quoted, so a slash in a part's name is not taken for the separator.
    return {"part/" + quote(name, safe=""): tree for name, tree in parts.items()}


def _unparts(trees: Mapping[str, Tree]) -> dict[str, Tree]:
    return {unquote(prefix.removeprefix("part/")): tree for prefix, tree in trees.items()}


def _pack(trees: Mapping[str, Tree], about: dict[str, Any]) -> bytes:
    named = {f"{prefix}/{key}": t.detach() for prefix, tree in trees.items() for key, t in tree.items()}
    about["trees"] = {prefix: list(tree) for prefix, tree in trees.items()}
    about["channels_last"] = [name for name, t in named.items() if _channels_last(t)]
    storages: set[int] = set()
    for name, t in named.items():
        named[name] = t = t.to("cpu").contiguous()
        if (storage := t.untyped_storage().data_ptr()) in storages:
            named[name] = t.clone()  # safetensors refuses names that share memory
        storages.add(storage)
    return save(named, {_KEY: json.dumps(about)})


def _unpack(data: bytes, device: torch.device | str) -> tuple[dict[str, Any], dict[str, Tree]]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about = json.loads(header["__metadata__"][_KEY])
    named, channels_last = load(data), set(about["channels_last"])
    for name in list(named):
        # Copy into torch's own aligned memory: some matrix kernels round differently on other alignments, and a
        # resumed run must not.
        form = torch.channels_last if name in channels_last else torch.contiguous_format
        named[name] = named[name].to(device).clone(memory_format=form)
    return about, {p: Tree({key: named[f"{p}/{key}"] for key in keys}) for p, keys in about["trees"].items()}


def _channels_last(t: Tensor) -> bool:
    return t.ndim == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)
