"""Whether starting a process would run the user's script again."""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def unguarded_script() -> str:
    """Path of the running script if a new process, which imports it, would run it again; otherwise empty.

    Such a script has no `if __name__ == "__main__":` at its top level. New processes do not import a prompt, a notebook
    or the package of `python -m`.

    >>> unguarded_script()
    ''
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    if path is None or (spec is not None and spec.name.endswith("__main__")):
        return ""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # a frozen program, a notebook's kernel
        return ""
    guards = (ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If))
    return "" if any("__name__" in test and "__main__" in test for test in guards) else str(path)
