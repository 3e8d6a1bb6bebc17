"""Find the part and hook, file and line in which an unexpected exception arose."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from fednorms.core.part import HOOKS, Part

LIBRARIES = {"fednorms", "builtins", "abc", "typing", "torch", "torchvision", "timm", "numpy", "functools"}
_NOTE = "Arose in "


def place(error: BaseException) -> str:
    """Where in a part or in a custom file an exception arose; empty if in neither.

    Only the file's name is given: stored results name no folder of the machine.
    """
    if noted := _noted(error):
        return noted
    found, who = None, culprit(error)
    for frame, line in _frames(error):
        if of_user(frame.f_globals.get("__name__", "")) or (found is None and _part(frame)):
            found = frame.f_code, line
    if found is None:
        return ""
    code, line = found
    whose = f'part "{who[0]}", hook {who[1]}' if who else code.co_qualname
    return f"{whose} ({Path(code.co_filename).name}, line {line})"


def note(error: BaseException) -> None:
    """Write the place on an exception, because its traceback is not sent between processes."""
    if not _noted(error) and (found := place(error)):
        error.add_note(_NOTE + found)


def culprit(error: BaseException) -> tuple[str, str] | None:
    """The part and the hook in which an error arose, or an error that it was raised from."""
    found: tuple[str, str] | None = None
    for frame, _ in _frames(error):
        if p := _part(frame):
            hook = next((h for h in HOOKS if getattr(getattr(type(p), h), "__code__", None) is frame.f_code), "")
            found = (p.name, hook or (found[1] if found else frame.f_code.co_name))  # or a helper of the hook's
    return found or (culprit(error.__context__) if error.__context__ else None)


def of_user(module: str) -> bool:
    """Whether a module is neither of Python nor installed.

    >>> of_user("torch.nn"), of_user("pathlib"), of_user("__main__")
    (False, False, True)
    """
    if module.partition(".")[0] in LIBRARIES:
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    homes = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return module == "__main__" or (path is not None and not path.startswith(homes))


def _noted(error: BaseException) -> str:
    notes = [str(line) for line in getattr(error, "__notes__", [])]
    return next((line.removeprefix(_NOTE) for line in notes if line.startswith(_NOTE)), "")


def _part(frame: FrameType) -> Part | None:
    who = frame.f_locals.get("self")
    return who if isinstance(who, Part) else None


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
