"""Read pickled NumPy arrays with an unpickler that can create nothing else."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.option_names import flag
from fednorms.data.pickle_cost import DEEPEST, MOST_VALUES, check_cost, too_large

# Numbers, strings and lists of plain values (O); no structured or subclassed types.
_CODE = re.compile(r"[<>|=]?(?:[?]|[biufc](?:1|2|4|8|16)|[SU]\d{1,6}|O8?|b|B|bool|object)")


def load_pickle(path: str | Path, allow_pickle: bool = False, encoding: str = "ASCII") -> Any:  # noqa: ANN401
    """Read a pickle of NumPy arrays in tuples, lists and dictionaries of plain values.

    A pickle is a program. This one may only build arrays, numbers, strings and containers. Any other name is refused
    before anything is called, and arrays are rebuilt here from checked shapes and bytes.

    Args:
        path: the file.
        allow_pickle: must be True: no pickle is opened by accident.
        encoding: of strings that Python 2 wrote ("bytes" leaves them as bytes).

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "train.pkl")
    ...     _ = path.write_bytes(pickle.dumps((np.eye(2), [1, 2])))
    ...     load_pickle(path, allow_pickle=True)
    (array([[1., 0.],
           [0., 1.]]), [1, 2])
    """
    path = Path(path)
    if not allow_pickle:
        raise BadInput(
            f"{path.name} is a pickled archive. {flag('allow_pickle')} opens it; only NumPy arrays and plain values "
            "are accepted."
        )
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise BadInput(f"{path.name} cannot be read: {problem.strerror or problem}.") from None
    return loads(data, path.name, encoding)


def loads(data: bytes, name: str = "the pickle", encoding: str = "ASCII") -> Any:  # noqa: ANN401
    """Read a pickle from bytes.

    >>> loads(pickle.dumps({"x": np.arange(3)}))
    {'x': array([0, 1, 2])}
    >>> loads(pickle.dumps(print))
    Traceback (most recent call last):
    fednorms.BadInput: the pickle asks for builtins.print, but only NumPy arrays and plain values are accepted.
    """
    try:
        check_cost(data)
        return _Plain().of(_Unpickler(io.BytesIO(data), name, encoding).load())
    except BadInput as problem:
        text = str(problem)
        raise BadInput(text if text.startswith(name) else f"{name} is not accepted: {text}") from None
    except RecursionError:
        raise BadInput(f"{name} is nested too deeply.") from None
    except Exception as problem:  # broken pickles raise almost anything
        raise BadInput(f"{name} is not a pickle of NumPy arrays, or is damaged: {problem}.") from problem


def to_npz(path: str | Path, out: str | Path | None = None) -> Path:
    """Convert a pickle of a pair (images, labels), or of a dictionary of arrays, to an .npz file next to it.

    The pair is stored as x and y. The result opens everywhere without pickle.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "train.pkl")
    ...     _ = path.write_bytes(pickle.dumps((np.zeros((2, 4, 4)), np.arange(2))))
    ...     np.load(to_npz(path))["y"]
    array([0, 1])
    """
    path = Path(path)
    target = path.with_suffix(".npz") if out is None else Path(out)
    data = load_pickle(path, allow_pickle=True)
    if isinstance(data, tuple | list) and len(data) == 2:
        data = dict(zip(("x", "y"), data, strict=True))
    if not isinstance(data, Mapping):
        raise BadInput(f"{path.name} contains {type(data).__name__}; expected a pair or a dictionary of arrays.")
    arrays = {str(name): np.asarray(value) for name, value in data.items()}
    for name, array in arrays.items():
        if array.dtype.kind == "O":
            raise BadInput(f'{path.name}: "{name}" is not an array of numbers or strings.')
    np.savez_compressed(target, **arrays)  # type: ignore[arg-type]
    return target


class _Dtype:
    """Replaces numpy.dtype: accepts only a type code and a byte order."""

    def __init__(self, code: object, align: object = False, copy: object = False) -> None:
        text = code.decode("ascii") if isinstance(code, bytes) else code
        if not isinstance(text, str) or not _CODE.fullmatch(text):
            raise BadInput(f'an array of type "{text}" is not accepted.')
        self.dtype = np.dtype(text)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # (version, byte order, subarray, names, fields, size, alignment, flags): flags are ignored.
        if any(entry is not None for entry in state[2:5]):
            raise BadInput("a structured array is not accepted.")
        if self.dtype.kind in "SU" and self.dtype.itemsize == 0 and isinstance(state[5], int):
            self.dtype = np.dtype(f"{self.dtype.kind}{state[5] // (4 if self.dtype.kind == 'U' else 1)}")
        if state[1] in (">", b">"):
            self.dtype = self.dtype.newbyteorder(">")
        elif state[1] in ("<", b"<"):
            self.dtype = self.dtype.newbyteorder("<")


class _Array:
    """Replaces an array while it is rebuilt."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        shape, dtype, fortran, content = state[-4:]
        self.value = _array(content, dtype, shape, "F" if fortran else "C")


class _Admitted:
    """A function that a pickle may call; it has no attributes that the pickle could write to."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: object) -> Any:  # noqa: ANN401
        return self.call(*args)

    def __setstate__(self, state: object) -> NoReturn:
        raise BadInput("it tries to change how arrays are built.")


def _not_called(*args: object) -> NoReturn:
    raise BadInput("numpy.ndarray is called directly.")


def _array(content: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:  # noqa: ANN401
    if not isinstance(dtype, _Dtype):
        raise BadInput("an array without a type.")
    shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    if dtype.dtype.kind == "O":
        if not isinstance(content, list):
            raise BadInput("an array of objects that are not listed.")
        flat = np.empty(len(content), dtype=object)
        plain = _Plain()
        flat[:] = [plain.of(entry) for entry in content]
        return flat.reshape(shape, order="F" if order == "F" else "C")
    if isinstance(content, str):  # Python 2 bytes
        content = content.encode("latin1")
    flat = np.frombuffer(bytes(content), dtype=dtype.dtype)
    return flat.reshape(shape, order="F" if order == "F" else "C").copy()


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    if kind is not _NDARRAY:
        raise BadInput("an array of a kind that is not numpy.ndarray.")
    return _Array()


def _scalar(dtype: object, content: object = b"") -> Any:  # noqa: ANN401
    if not isinstance(dtype, _Dtype) or dtype.dtype.kind == "O":
        raise BadInput("a number without a type.")
    return _array(content, dtype, (1,), "C")[0]


def _frombuffer(content: object, dtype: object, shape: object, order: object) -> _Array:
    made = _Array()
    made.value = _array(content, dtype, shape, "F" if order == "F" else "C")
    return made


def _encode(text: object, encoding: object = "latin1") -> bytes:
    # How protocol 2 writes bytes.
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise BadInput("an encoding that is not accepted.")
    return text.encode("latin1")


def _no_bytes(*args: object) -> bytes:
    # How protocol 2 writes the empty bytes; bytes(10**12) would fill the memory.
    if args:
        raise BadInput("bytes made by a call.")
    return b""


_NDARRAY = _Admitted(_not_called)
_ADMITTED: dict[tuple[str, str], _Admitted] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Admitted(_Dtype),
    ("_codecs", "encode"): _Admitted(_encode),
    **{(module, "bytes"): _Admitted(_no_bytes) for module in ("builtins", "__builtin__")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Admitted(_reconstruct) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Admitted(_scalar) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Admitted(_frombuffer) for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, name: str, encoding: str) -> None:
        super().__init__(stream, encoding=encoding)
        self.name = name

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        found = _ADMITTED.get((module, name))
        if found is None:
            self._refuse(f"{module}.{name}")
        return found

    def persistent_load(self, pid: object) -> NoReturn:
        self._refuse(f"a persistent object ({pid!r})")

    def _refuse(self, what: str) -> NoReturn:
        raise BadInput(f"{self.name} asks for {what}, but only NumPy arrays and plain values are accepted.")


class _Plain:
    """Replaces the placeholders in containers by arrays; what is shared stays shared, and is counted each time."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, int]] = {}  # by identity: the value, and how many values it is made of
        self._kept: list[object] = []  # so no identity is used twice

    def of(self, value: Any) -> Any:  # noqa: ANN401
        """The value with its arrays."""
        return self._made(value, 0)[0]

    def _made(self, value: Any, depth: int) -> tuple[Any, int]:  # noqa: ANN401
        if isinstance(value, _Array):
            if value.value is None:
                raise BadInput("an array without content.")
            return value.value, 1
        plain = str | bytes | bytearray | int | float | complex | bool | None | np.ndarray | np.generic
        if isinstance(value, plain):
            return value, 1
        if not isinstance(value, list | tuple | dict):
            raise BadInput(f"a value of type {type(value).__name__} is not accepted.")
        if id(value) not in self._done:
            if depth > DEEPEST:
                raise too_large()
            entries = [e for pair in value.items() for e in pair] if isinstance(value, dict) else value
            made = [self._made(entry, depth + 1) for entry in entries]
            parts, count = [part for part, _ in made], 1 + sum(n for _, n in made)
            if count > MOST_VALUES:
                raise too_large()
            pairs = zip(parts[::2], parts[1::2], strict=True)
            self._kept.append(value)
            self._done[id(value)] = dict(pairs) if isinstance(value, dict) else type(value)(parts), count
        return self._done[id(value)]
