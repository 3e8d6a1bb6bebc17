"""Write the table of docs/privacy.md from the code: what each party sees of a site, as `describe` measures it.

python docs/make_privacy_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from fednorms.core.part import REGISTRY
from fednorms.explain.leaves import Leaving, SiteUploads, what_leaves
from fednorms.methods.registry import names

PAGE = Path(__file__).with_name("privacy.md")
START, END = "<!-- table: python docs/make_privacy_table.py -->", "<!-- end of table -->"
HEADER = ["methods", "the server sees of each site", "every other site sees", "stays at the site"]
_STATISTICS = "**statistics of its images**"


def table() -> str:
    """The table; methods with the same answers share a row, those that send least come first."""
    rows: dict[tuple[str, ...], list[str]] = {}
    size: dict[tuple[str, ...], int] = {}
    for name in names():
        if name in REGISTRY and not REGISTRY[name].__module__.startswith("fednorms.methods."):
            continue  # a test's own part
        found = what_leaves(name)
        row = _server(found), _others(found), _stays(found)
        rows.setdefault(row, []).append(name)
        size[row] = sum(x.nbytes for x in found.leaving)
    ordered = sorted(rows.items(), key=lambda item: (size[item[0]], item[1]))
    lines = [HEADER, ["---"] * len(HEADER), *([", ".join(who), *row] for row, who in ordered)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _server(found: SiteUploads) -> str:
    if found.pooled:
        return "**all images**: it is a baseline without privacy"
    said = [_sent(x) for x in found.leaving if x.names]
    if found.guarantee:
        noised = "each update clipped, and noised at the site" if "added at the site" in found.guarantee else ""
        said.append(noised or "each update clipped; the server adds the noise")
    if found.proxy:
        said.append("**some of its images**, with labels")
    if found.obstacle:
        said.append("does not run across machines")
    if found.individual:
        said.append("must see each update")
    if found.class_counts:
        said.append("**images per class**")
    return "; ".join(said) or "nothing but numbers of images and scores"


def _sent(x: Leaving) -> str:
    """One kind of tensors in words.

    >>> _sent(Leaving("once", "fedrdn", "measured in its pass", ("mean", "std"), 24, True, False))
    'fedrdn: mean, std, **statistics of its images** (once)'
    """
    if x.sender == "model":
        return "weights" if x.what == "weights" else "**running statistics of features**"
    when = "" if x.when == "every round" else f" ({x.when})"
    return f"{x.sender}: {_some(x.names)}{f', {_STATISTICS}' if x.statistics else ''}{when}"


def _some(names: tuple[str, ...]) -> str:
    """The kinds of tensors, by the last part of their names.

    >>> _some(("norm1.mean", "norm2.mean", "norm1.var"))
    'mean, var'
    >>> _some(tuple("abcde"))
    'a, b, c, ... (5 kinds)'
    """
    kinds = list(dict.fromkeys(re.split(r"[./]", name)[-1] for name in names))
    return ", ".join(kinds) if len(kinds) < 5 else f"{', '.join(kinds[:3])}, ... ({len(kinds)} kinds)"


def _others(found: SiteUploads) -> str:
    if found.pooled:
        return "nothing: there is one model"
    said = []
    for x in found.received:
        if x.sender == "model":
            said.append("the averaged model")
        else:
            origin = ", **of single sites**" if x.single else ", mixed for it from single sites' models" * x.mixed
            said.append(f"{x.sender}: {_some(x.names)}{origin}")
    return "; ".join(said) or "nothing"


def _stays(found: SiteUploads) -> str:
    if found.pooled:
        return "nothing"
    parts = dict.fromkeys(name.partition("/")[0] for name in found.kept if "/" in name)
    model = [name for name in found.kept if "/" not in name]
    layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in model))
    measured = all(name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked") for name in model)
    kept = [f"{'statistics of ' if measured else ''}{layers}"] if model else []
    return "; ".join(["images", *kept, *(f"state of {part}" for part in parts)])


def page(text: str) -> str:
    """The page with the current table."""
    before, rest = text.split(START)
    return f"{before}{START}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
