"""The unpickler: NumPy arrays in every protocol, and nothing else."""

from __future__ import annotations

import os
import pickle
import struct
from collections import OrderedDict

import numpy as np
import pytest

from fednorms.core.errors import BadInput
from fednorms.data.pickles import load_pickle, loads, to_npz
from tests.support.layouts import pickled

ARRAYS = [
    np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(4, dtype=">i4"),
    np.array(["amazon/mug/1.jpg", "é"]),
    np.array([b"ab", b"c"]),
    np.array(["a", "bb", 3, None], dtype=object),
    np.zeros((0, 3), np.float32),
    np.array(True),
    np.array([1 + 2j]),
]


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_come_back_in_every_protocol(protocol):
    for array in ARRAYS:
        back = loads(pickle.dumps((array, [1, "two"], {"three": 3.0}), protocol))
        assert back[1:] == ([1, "two"], {"three": 3.0})
        assert back[0].dtype == array.dtype
        assert back[0].shape == array.shape
        np.testing.assert_array_equal(back[0], array)
    assert loads(pickle.dumps(np.float64(2.5), protocol)) == 2.5
    assert loads(pickle.dumps(b"bytes", protocol)) == b"bytes"


def test_a_batch_as_python_2_wrote_it():
    # The opcodes that Python 2's pickle (protocol 2) writes for {"data": array, "labels": [3]}.
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87R"
        b"(K\x01K\x01K\x02\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89U\x02\x07\xfftb"
    )
    data = b"\x80\x02}(U\x04data" + array + b"U\x06labels]K\x03au."
    back = loads(data, encoding="latin1")
    assert back["labels"] == [3]
    assert back["data"].tolist() == [[7, 255]]


class Hostile:
    def __init__(self, call, args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_does_nothing(tmp_path, protocol):
    trap = tmp_path / "trap"
    for call, args in (
        (os.system, (f"touch {trap}",)),
        (os.mkdir, (str(trap),)),
        (eval, (f"open({str(trap)!r}, 'w')",)),
        (np.save, (str(trap), 1)),
        (np.lib.format.open_memmap, (str(trap),)),
    ):
        evil = pickle.dumps((np.arange(3), Hostile(call, args)), protocol)
        with pytest.raises(BadInput, match=r"asks for .*only NumPy arrays and plain values"):
            loads(evil, "train.pkl")
        assert not trap.exists()
    path = tmp_path / "train.pkl"
    path.write_bytes(pickle.dumps(Hostile(os.mkdir, (str(trap),)), protocol))
    with pytest.raises(BadInput, match=r"train.pkl asks for .*mkdir"):
        load_pickle(path, allow_pickle=True)
    assert not trap.exists()


@pytest.mark.parametrize(
    "value",
    [OrderedDict(a=1), {1, 2}, slice(1), np.ma.array([1], mask=[True]), np.zeros(1, "i4,f4"), np.datetime64("now")],
)
def test_other_objects_are_refused(value):
    with pytest.raises(BadInput):
        loads(pickle.dumps(value))


def build(dtype_code, flags, content):
    """A pickle of an array whose dtype and content do not fit."""
    raw = pickle.dumps(content, 2)[2:-1]
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        b"(K\x01K\x01\x85cnumpy\ndtype\nX" + struct.pack("<I", len(dtype_code)) + dtype_code + b"K\x00K\x01\x87R"
        b"(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK" + bytes([flags]) + b"tb\x89" + raw + b"tb."
    )


def test_arrays_are_rebuilt_from_checked_bytes():
    assert loads(build(b"i8", 0, bytes(8))).tolist() == [0]
    for evil in (
        build(b"i8", 0, bytes(4)),  # too short for its shape
        build(b"O8", 0, bytes(8)),  # an address taken for an object
        build(b"V8", 0, bytes(8)),
        build(b"i8", 0, [1]),
    ):
        with pytest.raises(BadInput):
            loads(evil)


def test_the_placeholders_cannot_be_called_or_changed():
    for evil in (
        b"cnumpy\nndarray\n(K\x01tR.",  # numpy.ndarray(1)
        b"cnumpy\nndarray\n.",  # the class itself
        b"cnumpy.core.multiarray\n_reconstruct\n}X\x04\x00\x00\x00callK\x01sb.",  # write to the function
        b"cnumpy.core.multiarray\n_reconstruct\nN}X\x04\x00\x00\x00callK\x01s\x86b.",
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x06\x00\x00\x00rot_13tR.",
        b"(X\x01\x00\x00\x00aios\nsystem\n.",
        b"Pname\n.",  # a persistent object
    ):
        with pytest.raises(BadInput):
            loads(b"\x80\x02" + evil)
    assert loads(pickle.dumps(np.arange(2))).tolist() == [0, 1], "and nothing was changed"


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", pickle.dumps(np.arange(100))[:-20], b"\x80\x04]\x94h\x00a."])
def test_damaged_files_are_reported_as_such(data):
    with pytest.raises(BadInput):
        loads(data, "x.pkl")


def shared(levels, make):
    """2**levels values in a few bytes."""
    value = make(["x"])
    for _ in range(levels):
        value = make([value, value])
    return value


def from_the_top(levels):
    """The same with lists that are filled after they were put into each other."""
    top = inner = []
    for _ in range(levels):
        inner += [[]] * 2
        inner = inner[0]
    return top


def in_an_array(levels):
    array = np.empty(2, dtype=object)
    array[0] = shared(levels, list)
    return array


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "make",
    [
        lambda: shared(60, tuple),
        lambda: shared(60, list),
        lambda: shared(60, lambda pair: dict(enumerate(pair))),
        lambda: from_the_top(60),
        lambda: in_an_array(60),
    ],
    ids=["tuples", "lists", "dictionaries", "from the top", "in an array"],
)
def test_shared_containers_do_not_explode(protocol, make):
    data = pickle.dumps(make(), protocol)  # no value is kept: pytest would print it
    assert len(data) < 5000
    with pytest.raises(BadInput, match=r"train.pkl is not accepted: it builds more than 20,000,000 values"):
        loads(data, "train.pkl")


def test_keys_that_take_forever_to_hash_are_refused():
    key = pickle.dumps(shared(60, tuple), 2)[2:-1]
    for data in (b"}" + key + b"Ns.", b"(" + key + b"Nd.", b"\x8f(" + key + b"\x90."):
        with pytest.raises(BadInput, match="it builds more than"):
            loads(b"\x80\x04" + data)


def test_depth_and_numbers_of_values_are_bounded():
    with pytest.raises(BadInput, match="more than 100 containers inside each other"):
        loads(b"\x80\x02" + 102 * b"]" + 101 * b"a" + b".")
    with pytest.raises(BadInput, match="numbered"):
        loads(b"\x80\x02Nr\xff\xff\xff\x7f.")  # the unpickler would reserve 34 GB
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(BadInput, match="inside each other"):
        loads(pickle.dumps(cycle))


def test_what_is_shared_a_few_times_is_read_and_stays_shared():
    row = [1, 2, np.arange(2)]
    back = loads(pickle.dumps({"a": [row, row], "b": (row,)}))
    assert back["a"][0] is back["a"][1] is back["b"][0]
    assert back["a"][0][:2] == [1, 2]
    assert back["a"][0][2].tolist() == [0, 1]


def test_only_behind_the_flag(tmp_path):
    path = pickled(tmp_path / "train.pkl", (np.arange(2), np.arange(2)))
    with pytest.raises(BadInput, match=r"train.pkl is a pickled archive.* allow_pickle=True"):
        load_pickle(path)
    with pytest.raises(BadInput, match="cannot be read"):
        load_pickle(tmp_path / "no.pkl", allow_pickle=True)


def test_to_npz(tmp_path):
    x = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    made = to_npz(pickled(tmp_path / "train.pkl", (x, [1, 2])))
    assert made == tmp_path / "train.npz"
    with np.load(made, allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["x"], x)
        assert arrays["y"].tolist() == [1, 2]
    with pytest.raises(BadInput, match="not an array of numbers"):
        to_npz(pickled(tmp_path / "o.pkl", (np.array([None, "a"], dtype=object), [1, 2])))
    with pytest.raises(BadInput, match="expected a pair"):
        to_npz(pickled(tmp_path / "i.pkl", 3))
