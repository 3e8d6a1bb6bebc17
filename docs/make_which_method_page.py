"""Write the table of docs/which-method.md from docs/results/advise*.json.

python docs/make_which_method_page.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.make_advise_page import QUESTIONS, stored
from fednorms.core.markup import markdown_table

PAGE = Path(__file__).with_name("which-method.md")
SKEWED = 0.2  # label skew (total variation) from which labels count as different
DIFFERENT = 0.05  # feature shift within classes from which images count as different
SHOWN = 3  # methods per cell


def table(federations: Sequence[Mapping[str, Any]]) -> str:
    """Per situation and question: the methods that lose least on average, and what `advise` loses."""
    rows = [row(federations, skewed, different) for skewed in (False, True) for different in (False, True)]
    header = ["labels", "images", "federations"]
    for words in ("sites may have their own models", "one model for all"):
        header += [f"{words}: points lost", "advise"]
    return markdown_table(header, rows, numbers_from=len(header))


def row(federations: Sequence[Mapping[str, Any]], skewed: bool, different: bool) -> list[str]:
    """The line of a situation."""
    here = [f for f in federations if situation(f["measures"]) == (skewed, different)]
    about = ["differ" if skewed else "alike", "differ" if different else "alike", str(len(here))]
    return [*about, *(cell for question in QUESTIONS for cell in _cells(here, question))]


def situation(measures: Mapping[str, float | None]) -> tuple[bool, bool] | None:
    """Whether labels and images differ between sites; None if a measure is missing, as with very few images.

    >>> situation({"label_tv": 0.3, "feature_w2_class": 0.01}), situation({"label_tv": None, "feature_w2_class": 0.1})
    ((True, False), None)
    """
    labels, images = measures["label_tv"], measures["feature_w2_class"]
    return None if labels is None or images is None else (labels >= SKEWED, images >= DIFFERENT)


def _cells(federations: Sequence[Mapping[str, Any]], question: str) -> list[str]:
    asked = [f[question] for f in federations]
    arms = [arm for arm in asked[0]["always"] if all(arm in q["always"] for q in asked)]
    lost = sorted((fmean(q["always"][arm] for q in asked), arm) for arm in arms)
    return [
        ", ".join(f"{arm} {points:.1f}" for points, arm in lost[:SHOWN]),
        f"{fmean(q['advice'] for q in asked):.1f}",
    ]


def page(text: str) -> str:
    r"""The text of the page with its table made anew.

    >>> page("a <!-- situations --> old <!-- end --> b").startswith("a <!-- situations -->\n| labels | images |")
    True
    """
    federations = [f for suite in stored().values() for f in suite["federations"]]
    known = [f for f in federations if situation(f["measures"]) is not None]
    alone = sum(f["any"]["winner"] == "standalone" for f in federations)
    said = textwrap.fill(
        f"{len(known)} of the {len(federations)} federations of [the benchmark](results/advise.md) count here; the "
        f"others are too small to measure. `standalone`, every site for itself, was best in {alone} of all.",
        width=120,
    )
    before, mark, rest = text.partition("<!-- situations -->")
    after = rest.partition("<!-- end -->")[2]
    return f"{before}{mark}\n{table(known)}\n\n{said}\n<!-- end -->{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
