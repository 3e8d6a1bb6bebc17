"""Checkpoints: round trips, damage and recovery, and a crash between any two system calls."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorms.core.errors import RunFailed
from fednorms.core.states import ClientState, ServerState
from fednorms.core.tree import Tree
from fednorms.runs.store import checkpoint
from fednorms.runs.store.atomic import write_atomic
from fednorms.runs.store.checkpoint import load, load_best, save, save_best
from fednorms.runs.store.packing import pack_client, pack_server, unpack_client, unpack_server
from tests.support.system_calls import Calls, Killed
from tests.support.waiting import HANG

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def same_tree(a: Tree, b: Tree) -> bool:
    """Names in the same order; equal dtypes, shapes and bits (including NaN)."""
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype
        and a[k].shape == b[k].shape
        and a[k].contiguous().flatten().view(torch.uint8).equal(b[k].contiguous().flatten().view(torch.uint8))
        for k in a
    )


def same_trees(a: dict[str, Tree], b: dict[str, Tree]) -> bool:
    return list(a) == list(b) and all(same_tree(a[k], b[k]) for k in a)


def same_server(a: ServerState, b: ServerState) -> bool:
    return (a.round, a.seed) == (b.round, b.seed) and same_tree(a.model, b.model) and same_trees(a.parts, b.parts)


def same_client(a: ClientState, b: ClientState) -> bool:
    trees = same_tree(a.local, b.local) and same_tree(a.velocity, b.velocity) and same_trees(a.parts, b.parts)
    return a.round == b.round and trees


def server(round: int, fill: float | None = None) -> ServerState:
    value = float(round) if fill is None else fill
    model = Tree({"z": torch.full((3, 2), value), "a.b/c": torch.tensor(round)})
    return ServerState(round, model, {"scaffold": Tree(c=torch.full((2,), value)), "fedavg": Tree()}, seed=2**62 + 1)


def client(round: int, fill: float = 0.0) -> ClientState:
    return ClientState(round, Tree(w=torch.full((2,), fill)), {"fedbn": Tree()}, Tree(w=torch.ones(2)))


def holds(found: checkpoint.Checkpoint | None, state: ServerState, clients: dict[str, ClientState]) -> bool:
    return (
        found is not None
        and same_server(found.server, state)
        and list(found.clients) == sorted(clients)
        and all(same_client(found.clients[name], clients[name]) for name in clients)
    )


def files(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}


# --- round trips ---

tensors = st.builds(
    lambda dtype, shape, value: torch.full(shape, value).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.sampled_from([0.0, 1.0, 2.5, -0.0]),
)
trees = st.dictionaries(st.text(max_size=6), tensors, max_size=4).map(Tree)
parts = st.dictionaries(st.one_of(st.text(max_size=6), st.sampled_from(["a/b", "a%2Fb", ".", ""])), trees, max_size=3)


@given(trees, parts, st.integers(0, 10**7), st.integers(0, 2**63 - 1))
def test_server_round_trip(model, own, number, seed):
    state = ServerState(number, model, own, seed)
    assert same_server(unpack_server(pack_server(state)), state)


@given(trees, parts, trees)
def test_client_round_trip(local, own, velocity):
    state = ClientState(4, local, own, velocity)
    assert same_client(unpack_client(pack_client(state)), state)


def test_names_that_could_be_confused_stay_apart():
    state = ServerState(
        0,
        Tree({"": torch.ones(1)}),
        {"a": Tree({"b/c": torch.zeros(1)}), "a/b": Tree({"c": torch.ones(2)})},
        0,
    )
    assert same_server(unpack_server(pack_server(state)), state)


def test_special_bits_views_and_shared_memory_survive():
    bits = torch.tensor([0x7FC00001, 0x7F800000, 0x00000001, -0x80000000], dtype=torch.int32).view(torch.float32)
    big = torch.arange(24.0).reshape(4, 6)
    model = Tree(nan=bits, view=big[1:3, ::2], transposed=big.t(), again=big, whole=big, wide=torch.ones(1).expand(5))
    model["needs gradient"] = torch.ones(2, requires_grad=True)
    back = unpack_server(pack_server(ServerState(0, model, {}, 0))).model
    assert same_tree(back, model.detach())
    assert not back["needs gradient"].requires_grad
    assert len({t.untyped_storage().data_ptr() for t in back.values()}) == len(back)
    assert all(t.data_ptr() % 64 == 0 for t in back.values())


def test_memory_format_survives():
    conv = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    back = unpack_client(pack_client(ClientState(0, Tree(w=conv), {}))).local["w"]
    assert back.equal(conv)
    assert back.stride() == conv.stride()


def test_packing_is_deterministic_and_does_not_touch_the_state():
    state = server(3)
    versions = [t._version for t in state.model.values()]
    assert pack_server(state) == pack_server(state)
    assert [t._version for t in state.model.values()] == versions


ODD_NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "a\\b",
    "A",
    "a",
    "病院 1",
    "é" * 300,
    "x" * 500,
    "con",
    "a@000003",
    "\udcff",
    "\0",
]


def test_client_names_of_any_kind(tmp_path):
    clients = {name: client(i, float(i)) for i, name in enumerate(ODD_NAMES)}
    save(tmp_path, server(3), clients, {})
    assert holds(load(tmp_path), server(3), clients)
    names = [p.name for p in (tmp_path / "clients").iterdir()]
    assert len({name.lower() for name in names}) == len(ODD_NAMES)
    assert all(len(name.encode()) < 120 for name in names)


def test_extra_and_layout(tmp_path):
    extra = {
        "best": {"round": 3, "val": 0.1 + 0.2},
        "worst": float("-inf"),
        "list": [1, None, "é"],
        "flag": True,
    }
    save(
        tmp_path,
        server(12),
        {"a": client(12), "stateless": ClientState(12, Tree(), {"fedavg": Tree()})},
        extra,
    )
    found = load(tmp_path)
    assert found.extra == extra
    assert found.notes == []
    assert same_client(found.clients["stateless"], ClientState(12, Tree(), {"fedavg": Tree()}))
    expected = {"round-000012/manifest.json", "round-000012/server.safetensors"}
    (client_file,) = files(tmp_path) - expected  # and none for the client without tensors
    assert client_file.startswith("clients/a-")
    assert client_file.endswith("@000012.safetensors")
    manifest = json.loads((tmp_path / "round-000012/manifest.json").read_text())
    assert (manifest["version"], manifest["round"], manifest["seed"]) == (1, 12, 2**62 + 1)


def test_extra_that_is_not_json_writes_nothing(tmp_path):
    with pytest.raises(TypeError):
        save(tmp_path, server(1), {}, {"x": object()})
    assert files(tmp_path) == set()


# --- several checkpoints ---


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert load(tmp_path) is None
    assert load(tmp_path / "missing") is None
    (tmp_path / "round-000001").mkdir()  # a first save that was killed
    (tmp_path / "round-000001" / "server.safetensors").write_bytes(b"half")
    assert load(tmp_path) is None


def test_only_changed_clients_are_written_and_two_checkpoints_stay(tmp_path):
    now: dict[str, ClientState] = {}
    history = []
    for number in range(1, 7):
        name = "ab"[number % 2] if number < 5 else "c"
        now = {**now, name: client(number, float(number))}
        save(tmp_path, server(number), {name: now[name]}, {"n": number})
        history.append(now)
        assert holds(load(tmp_path), server(number), now)
    folders = sorted(p.name for p in tmp_path.glob("round-*"))
    assert folders == ["round-000005", "round-000006"]
    assert sorted(p.name.split("-")[0] + p.name[-19:-12] for p in (tmp_path / "clients").iterdir()) == [
        "a@000004",
        "b@000003",
        "c@000005",
        "c@000006",
    ]
    (tmp_path / "round-000006" / "manifest.json").unlink()
    assert holds(load(tmp_path), server(5), history[4])


def test_rounds_are_ordered_as_numbers(tmp_path):
    save(tmp_path, server(999_999), {}, {})
    save(tmp_path, server(1_000_000), {}, {})
    assert load(tmp_path).server.round == 1_000_000


def test_client_states_are_read_when_asked_for(tmp_path, monkeypatch):
    save(tmp_path, server(1), {name: client(1) for name in "abc"}, {})
    reads = []
    original = checkpoint.unpack_client
    monkeypatch.setattr(checkpoint, "unpack_client", lambda *args: reads.append(1) or original(*args))
    found = load(tmp_path)
    assert len(found.clients) == 3
    assert reads == []
    assert found.clients["b"].round == 1
    assert len(reads) == 1
    assert found.clients.get("d") is None


# --- damage ---


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [_truncate, _empty, _flip, _not_text, _a_folder, Path.unlink]


@pytest.fixture
def two(tmp_path):
    save(tmp_path, server(10), {"a": client(10), "b": client(9)}, {})
    save(tmp_path, server(12), {"a": client(12)}, {})
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("which", ["server", "client", "manifest"])
def test_a_damaged_checkpoint_falls_back_and_says_so(two, damage, which):
    paths = {"server": "round-000012/server.safetensors", "manifest": "round-000012/manifest.json"}
    path = two / paths[which] if which in paths else next((two / "clients").glob("a-*@000012.safetensors"))
    damage(path)
    found = load(two)
    assert holds(found, server(10), {"a": client(10), "b": client(9)})
    if which == "manifest" and damage is Path.unlink:
        assert found.notes == []  # without a manifest it looks like one that was never finished
    elif which == "server" and damage is _flip:
        assert found.notes == [
            "The checkpoint of round 12 is damaged (server.safetensors: hash differs); continuing from round 10."
        ]
    else:
        (note,) = found.notes
        assert note.startswith(f"The checkpoint of round 12 is damaged ({path.name}: ")
        assert note.endswith("; continuing from round 10.")


def test_every_single_flipped_byte_of_a_manifest_is_noticed(two):
    path = two / "round-000012" / "manifest.json"
    whole = path.read_bytes()
    body = json.loads(whole)
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        found = load(two)
        if found.notes == []:  # white space, the only bytes without meaning
            assert json.loads(path.read_bytes()) == body


def test_all_damaged_is_one_clear_error(two):
    for path in two.glob("round-*/server.safetensors"):
        _flip(path)
    with pytest.raises(RunFailed, match=r"Every checkpoint in .* is damaged: round 12 \(server.*round 10 \(server"):
        load(two)


def test_a_newer_format_is_not_misread(two):
    path = two / "round-000012" / "manifest.json"
    body = json.loads(path.read_text())
    del body["hash"]
    body["version"] = 2
    path.write_text(json.dumps({"hash": checkpoint.hash_of(json.dumps(body).encode()), **body}))
    assert "format 2, this version of fednorms reads 1" in load(two).notes[0]


@pytest.mark.parametrize("fresh_process", [True, False])
@pytest.mark.parametrize("next_round", [11, 12, 13])
def test_saving_after_a_fallback_builds_on_the_sound_checkpoint(two, next_round, fresh_process):
    # b changed in the damaged round 12 only: what is saved next must hold b of round 9.
    save(two, server(12), {"b": client(12, 5.0)}, {})
    _flip(two / "round-000012" / "server.safetensors")
    if fresh_process:
        checkpoint._trusted.clear()
    assert load(two).server.round == 10
    save(two, server(next_round, fill=0.5), {"a": client(11, 7.0)}, {})
    clients = {"a": client(11, 7.0), "b": client(9)}
    assert holds(load(two), server(next_round, fill=0.5), clients)
    assert sorted(p.parent.name for p in two.glob("round-*/manifest.json")) == sorted(
        {"round-000010", f"round-{next_round:06d}"}  # the sound one stays, the damaged one goes
    )
    _flip(next((two / f"round-{next_round:06d}").glob("server*.safetensors")))
    assert holds(load(two), server(10), {"a": client(10), "b": client(9)})


def test_saving_the_same_round_again(two):
    save(two, server(12, fill=0.25), {}, {"again": True})
    assert holds(load(two), server(12, fill=0.25), {"a": client(12), "b": client(9)})
    before = files(two)
    save(two, server(12, fill=0.25), {"a": client(12)}, {"again": True})
    assert len(files(two)) == len(before)


def test_a_client_file_that_vanishes_later_is_one_clear_error(two):
    found = load(two)
    for path in (two / "clients").iterdir():
        path.unlink()
    with pytest.raises(RunFailed, match=r"Cannot read .*No such file"):
        found.clients["a"]


# --- crashes ---


def _until_it_ends(tmp_path, work, check, error=None):
    """Do `work(folder)` once for every system call k, which fails, and `check(folder, finished)` after each."""
    for k in range(1, 200):
        folder = tmp_path / str(k)
        prepared = work(folder)
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch, k, error)
            try:
                prepared()
                finished = True
            except (Killed, RunFailed):
                finished = False
        check(folder, finished)
        if calls.count < k:
            assert k > 10
            return
    raise AssertionError("never ended")


OLD = {"a": client(10), "b": client(9)}
NEW = {"a": client(12, 3.0), "b": client(9), "c": client(12, 4.0)}
FAILURES = [None, errno.ENOSPC]


@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize("again", [False, True], ids=["next round", "same round again"])
def test_a_failure_at_any_system_call_leaves_the_old_or_the_new_checkpoint(tmp_path, error, again):
    number = 10 if again else 12
    state = server(number, fill=0.5)

    def work(folder):
        save(folder, server(8), OLD, {})
        save(folder, server(10), {}, {"old": True})
        return lambda: save(folder, state, {"a": NEW["a"], "c": NEW["c"]}, {"old": False})

    def check(folder, finished):
        checkpoint._trusted.clear()  # a new process
        found = load(folder)
        assert found.notes == []
        assert holds(found, state, NEW) if found.extra == {"old": False} else holds(found, server(10), OLD)
        assert found.extra == {"old": False} or not finished
        if error:
            left = [name for name in files(folder) if name.endswith(".tmp")]
            assert left == []
        work_on = server(13)
        save(folder, work_on, {"a": client(13)}, {})
        current = NEW if found.extra == {"old": False} else OLD
        assert holds(load(folder), work_on, {**current, "a": client(13)})
        # Whatever the crash left is gone: two manifests, two servers, and what they name.
        named = set()
        for path in folder.glob("round-*/manifest.json"):
            body = json.loads(path.read_text())
            named |= {path.relative_to(folder).as_posix(), body["server"]["path"]}
            named |= {entry["path"] for entry in body["clients"].values()}
        assert files(folder) == named
        assert len(list(folder.iterdir())) == 3

    _until_it_ends(tmp_path, work, check, error)


@pytest.mark.parametrize("error", FAILURES)
def test_a_failure_in_the_very_first_save(tmp_path, error):
    def work(folder):
        return lambda: save(folder, server(1), OLD, {})

    def check(folder, finished):
        found = load(folder)
        assert holds(found, server(1), OLD) if found else not finished

    _until_it_ends(tmp_path, work, check, error)


@pytest.mark.parametrize("error", FAILURES)
def test_the_best_model_is_replaced_all_at_once(tmp_path, error):
    def work(folder):
        save_best(folder, server(10), OLD, {"old": True})
        return lambda: save_best(folder, server(12), NEW, {"old": False})

    def check(folder, finished):
        found = load_best(folder)
        assert holds(found, server(10), OLD) if found.extra["old"] else holds(found, server(12), NEW)
        assert not (finished and found.extra["old"])
        save_best(folder, server(14), OLD, {})
        assert holds(load_best(folder), server(14), OLD)
        assert len(files(folder)) == 2 + len(OLD)

    _until_it_ends(tmp_path, work, check, error)


def test_the_best_model_is_complete_and_apart_from_the_checkpoints(tmp_path):
    assert load_best(tmp_path) is None
    save(tmp_path, server(8), OLD, {})
    save_best(tmp_path, server(8), OLD, {"val": 0.5})
    for number in (9, 10, 11):
        save(tmp_path, server(number), {name: client(number) for name in OLD}, {})
    found = load_best(tmp_path)
    assert holds(found, server(8), OLD)
    assert found.extra == {"val": 0.5}
    save_best(tmp_path, server(10), {"b": client(10)}, {})  # complete: it has only the given clients
    assert list(load_best(tmp_path).clients) == ["b"]
    _flip(next((tmp_path / "best").glob("server*")))
    with pytest.raises(RunFailed, match=r"best model in .* is damaged"):
        load_best(tmp_path)
    save_best(tmp_path, server(11), OLD, {})
    assert holds(load_best(tmp_path), server(11), OLD)


# --- messages ---


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "the disk is full.*Free space.*continue with `fednorms resume "),
        (errno.EFBIG, "limit.*free space.*continue with `fednorms resume "),
        (errno.EACCES, "not writable.*continue with `fednorms resume "),
        (errno.EROFS, "not writable.*continue with `fednorms resume "),
        (errno.EIO, "continue with `fednorms resume "),
    ],
)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_disk_errors_are_one_clear_message_and_leave_the_old_file(tmp_path, monkeypatch, code, words, call):
    (tmp_path / "recipe.toml").write_text("")
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*_args, **_keywords):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(RunFailed, match=words) as caught:
            write_atomic(path, b"new")
    assert str(caught.value).startswith(f"Cannot write {path}: ")
    assert f"fednorms resume {tmp_path}`" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == {"file", "recipe.toml"}


def test_a_file_size_limit_stops_the_run_but_loses_nothing(tmp_path):
    pytest.importorskip("resource")
    save(tmp_path, server(1), OLD, {})
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    script = """
        import resource, sys, torch
        from pathlib import Path
        from fednorms.core.errors import RunFailed
        from fednorms.runs.store.checkpoint import save
        from fednorms.core.states import ServerState
        from fednorms.core.tree import Tree
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            save(Path(sys.argv[1]), ServerState(2, Tree(w=torch.zeros(10_000)), {}, 0), {}, {})
        except RunFailed as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    assert "server.safetensors: the file would be larger than" in done.stdout
    assert "fednorms resume" in done.stdout
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before
    assert holds(load(tmp_path), server(1), OLD)


def test_files_get_the_permissions_of_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
