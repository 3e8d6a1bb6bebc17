"""Write docs/methods.md from the code: ideas from docstrings, facts as `describe` measures them.

python docs/make_methods_page.py
"""

from __future__ import annotations

from pathlib import Path

from fednorms.core.part import REGISTRY, SUMS
from fednorms.explain.overview import COLUMNS, MODEL, overview

PAGE = Path(__file__).with_name("methods.md")
HEAD = """\
# Methods

Written by `python docs/make_methods_page.py`; a test compares it with the code. `fednorms list methods` prints the
first table, and with `--costs` the second; `fednorms describe METHOD --model MODEL` describes one method on another
model in full. Files are in `src/fednorms/`. Methods combine with `+`; [Which pairs commute](commuting.md) lists pairs
whose order matters and pairs that are refused. [Add a method](add-a-method.md) shows how to write a new one.

## What they do
"""
LEFT_OUT = """
## What is left out

A formula comes from a paper's text or its authors' program, never from memory.

- **CCST** ([Chen et al. 2023](https://arxiv.org/abs/2210.00912)) needs an encoder and a decoder that were trained for
  style transfer, which its program downloads. `feddg`, `fedrdn` and `fedfa` exchange styles without them.
- **FedStein** ([Gupta, Jangid and Sethi 2024](https://arxiv.org/abs/2410.03499)) and **BN-SCAFFOLD** ([Quintana et al.
  2024](https://arxiv.org/abs/2410.03281)): we had only abstracts and summaries, which define neither FedStein's
  shrinkage factor nor BN-SCAFFOLD's control variates, and could read neither program.
"""
FACTS = f"""
## What they cost and where they work

Measured on the model `{MODEL}` with two clients, each method by itself, with its default options.
"""


def page() -> str:
    """The text of the page."""
    rows = [(e, facts) for e, facts in overview() if _ours(e.name)]
    ideas = [
        [e.name, e.idea, f"[{e.paper}]({e.link})" if e.link else e.paper, e.options, _file(e.name)] for e, _ in rows
    ]
    lines = [HEAD, *_table(["name", "idea", "paper", "options", "file"], ideas)]
    lines += [FACTS, *(f"- **{title}**: {meaning}" for title, (meaning, _) in COLUMNS.items()), ""]
    lines += _table(["name", *COLUMNS], [[e.name, *facts.values()] for e, facts in rows])
    return "\n".join(lines) + "\n" + LEFT_OUT


def _ours(name: str) -> bool:
    """Whether the library itself has it; a test may have registered a custom part."""
    return name not in REGISTRY or REGISTRY[name].__module__.startswith("fednorms.methods.")


def _file(name: str) -> str:
    """The file that defines a method; FedAvg is the core without parts."""
    made = SUMS.get(name) or REGISTRY.get(name)
    return f"`{made.__module__.removeprefix('fednorms.').replace('.', '/')}.py`" if made else "`core/round.py`"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[_plain(cell) for cell in row] for row in [header, *rows]]
    ruled = [cells[0], ["---"] * len(header), *cells[1:]]
    return ["| " + " | ".join(row) + " |" for row in ruled]


def _plain(cell: str) -> str:
    """Formulas are not markup."""
    for sign, written in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*")):
        cell = cell.replace(sign, written)
    return cell


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
