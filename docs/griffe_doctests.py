"""Show the doctests of docstrings as code: without a fence, Markdown takes `>>>` for a quotation."""

from __future__ import annotations

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fence the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:  # noqa: ANN401
        """Called by griffe for each object that it reads."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    r"""Put each example, from `>>>` to the next empty line, between fences.

    >>> fenced("Add.\n\n>>> 1 + 1\n2\n\nMore.").splitlines()
    ['Add.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'More.']
    """
    lines: list[str] = []
    indent: str | None = None  # of the example that is open
    for line in text.splitlines():
        if indent is None and line.lstrip().startswith(">>>"):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines if indent is None else [*lines, f"{indent}```"])
