"""Advice: the answer of `advise`, with all of its evidence."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from fednorms._version import __version__
from fednorms.advice.arms import ALONE, Arm
from fednorms.advice.budget import Budget
from fednorms.advice.certainty import Difference
from fednorms.advice.measures import Measure
from fednorms.advice.tournament import Rungs, Trial
from fednorms.core.counted import counted
from fednorms.core.markup import html_page, html_table, markdown_table
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.runs.store.atomic import clear_errors, write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["clear", "no difference", "alone", "untested"]
WIDTH = 80
RECIPE = "advised.toml"


@dataclass(frozen=True)
class Finalist:
    """A method that reached the last rung that was played: its values, its scores, and how far it is behind the best.

    Scores are shares; `behind` is the difference between the best finalist and this one, in points.
    """

    trial: Trial
    scores: list[float]
    rounds: int
    behind: Difference | None = None

    @property
    def mean(self) -> float:
        """Mean validation score over seeds."""
        return fmean(self.scores)


@dataclass
class Advice:
    """Which method to take for a federation, how sure that is, what it costs, and how to run it.

    `verdict` is "clear", "no difference" (that these validation images can show between the best two), "alone" (each
    site alone does better than any federated method) or "untested" (there was no time, so only measures speak).
    `finished` is False for what is known while a tournament still runs. The repr is the answer; `to_dict` has all
    evidence.
    """

    recipe: Recipe
    question: Mapping[str, Any]
    measures: list[Measure]
    arms: list[Arm]
    excluded: Mapping[str, str]
    rungs: list[Rungs]
    finalists: list[Finalist]
    budget: Budget
    planned: int = 0  # rungs
    notes: list[str] = field(default_factory=list)
    path: Path | None = None
    files: list[Path] = field(default_factory=list)
    retrained: Result | None = None

    @property
    def finished(self) -> bool:
        """Whether all rungs were played."""
        return len(self.rungs) == self.planned

    @property
    def arm(self) -> Arm:
        """The recommended method with its reason and costs."""
        if not self.finalists:
            return self.arms[0]
        return next(arm for arm in self.arms if arm.name == self.finalists[0].trial.arm)

    @property
    def method(self) -> str:
        """The recommended method."""
        return self.arm.name

    @property
    def lr(self) -> float:
        """Its learning rate."""
        values = self.finalists[0].trial.values if self.finalists else {}
        return float(values.get("lr", self.arm.rates[len(self.arm.rates) // 2]))

    @property
    def runner_up(self) -> str | None:
        """The second best method; None if only one was tried to the end."""
        return self.finalists[1].trial.arm if len(self.finalists) > 1 else None

    @property
    def difference(self) -> Difference | None:
        """By how many points the recommendation is ahead of the runner-up."""
        return self.finalists[1].behind if len(self.finalists) > 1 else None

    @property
    def verdict(self) -> Verdict:
        """How sure the answer is."""
        if not self.finalists:
            return "untested"
        if self.difference is not None and not self.difference.clear:
            return "no difference"
        return "alone" if self.method == ALONE and self.difference is not None else "clear"

    @property
    def sentence(self) -> str:
        """The answer in one or two sentences."""
        if self.verdict == "untested":
            why = "Every run failed." if self.rungs else "Nothing was trained, because there was no time."
            return f"{why} From the measures, {self.method} is expected to do best, but nothing has shown that."
        ahead = (
            f", {self.difference} ahead of {self.runner_up}" if self.difference else "; nothing was compared with it"
        )
        on = f"on {counted(self.images, 'validation image')}"
        unfinished = "" if self.finished else " The tournament has not ended: this is the best so far."
        score = f"{100 * self.finalists[0].mean:.1f} %"
        if self.verdict == "no difference":
            return (
                f"{self.method} (lr {self.lr:g}) has the best score, {score} {on}, but these data show no difference "
                f"to {self.runner_up}: {self.difference}.{self._cheaper()}{unfinished}"
            )
        if self.verdict == "alone":
            return (
                f"Each site alone does better than any federated method that was tried: {score} {on}{ahead}."
                f"{unfinished}"
            )
        return f"Take {self.method} with lr {self.lr:g}: {score} {on}{ahead}.{unfinished}"

    def _cheaper(self) -> str:
        """Which of the best two costs less, if one does."""
        second = next(arm for arm in self.arms if arm.name == self.runner_up)
        prices = [(a.cost.bytes_up + a.cost.bytes_down, a.cost.client_state, a.passes) for a in (self.arm, second)]
        if prices[0] == prices[1]:
            return ""
        if all(a <= b for a, b in zip(*prices, strict=True)):
            return f" {self.method} also costs less."
        if all(a >= b for a, b in zip(*prices, strict=True)):
            return f" {second.name} costs less."
        return ""

    @property
    def images(self) -> int:
        """Validation images that decided."""
        played = self.rungs[-1].played if self.rungs else []
        return max((sum(n for _, n in p.sites.values()) for p in played), default=0)

    @property
    def command(self) -> str:
        """How to run the recommendation for real."""
        if self.path is not None and not self.recipe.federation.startswith("custom:") and "@" not in self.recipe.model:
            return f"fednorms run {shlex.quote(str(self.path / RECIPE))}"
        return (
            f'fn.run("{self.method}", federation, model, rounds={self.recipe.rounds}, lr={self.lr:g}, '
            f"batch_size={self.recipe.training.batch_size})"
        )

    @property
    def cost(self) -> str:
        """What the recommendation costs."""
        d = self.arm.cost
        kept = f"{_size(d.client_state)} kept at each site" if d.client_state else "nothing kept at sites"
        return (
            f"{_size(d.bytes_up)} up and {_size(d.bytes_down)} down per site and round, {kept}, "
            f"{'one pass' if self.arm.passes == 1 else f'{self.arm.passes:.2g} passes'} over the data"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values: scores as shares, differences in points."""
        return {
            "kind": "advice",
            "version": __version__,
            "finished": self.finished,
            "federation": self.recipe.federation,
            "model": self.recipe.model,
            "answer": {
                "method": self.method,
                "lr": self.lr,
                "verdict": self.verdict,
                "sentence": self.sentence,
                "runner_up": self.runner_up,
                "difference": self.difference.to_dict() if self.difference else None,
                "images": self.images,
                "command": self.command,
                "cost": self.cost,
            },
            "question": dict(self.question),
            "measures": [m.to_dict() for m in self.measures],
            "arms": [arm.to_dict() for arm in self.arms],
            "excluded": dict(self.excluded),
            "finalists": [
                {
                    "arm": f.trial.arm,
                    "method": f.trial.method,
                    "values": dict(f.trial.values),
                    "mean": f.mean,
                    "scores": f.scores,
                    "rounds": f.rounds,
                    "behind": f.behind.to_dict() if f.behind else None,
                }
                for f in self.finalists
            ],
            "rungs": [rung.to_dict() for rung in self.rungs],
            "curves": {name: [list(p) for p in points] for name, points in self.curves().items()},
            "budget": self.budget.to_dict(),
            "recipe": self.recipe.to_dict(),
            "notes": self.notes,
            "path": None if self.path is None else str(self.path),
            "files": [str(f) for f in self.files],
            "retrained": None if self.retrained is None else self.retrained.to_dict(),
        }

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Validation accuracy over rounds of every trial (seed 0), as far as it was trained."""
        found: dict[str, list[tuple[int, float]]] = {}
        for rung in self.rungs:
            for p in rung.played:
                if p.seed == rung.rung.seeds[0] and p.curve:
                    found[p.trial.name] = list(p.curve)
        return found

    # -- showing ------------------------------------------------------------------------------------------------
    def _score_table(self) -> tuple[list[str], list[list[str]]]:
        """Every arm that was tried: its best rate, how far it was trained, its score, and how far it is behind."""
        rows: dict[str, list[str]] = {}
        for f in self.finalists:
            gap = "best" if f is self.finalists[0] else "" if f.behind is None else points(-f.behind.mean)
            if f.behind is not None and not f.behind.clear:
                gap += " (within noise)"
            rows[f.trial.arm] = [f.trial.arm, _values(f.trial), str(f.rounds), f"{100 * f.mean:.1f}", gap]
        for rung in reversed(self.rungs):
            last = rung is self.rungs[-1] and self.finalists
            for trial, score in rung.ranking:
                gap = points(100 * (score - self.finalists[0].mean)) if last else "out"
                rows.setdefault(
                    trial.arm, [trial.arm, _values(trial), str(rung.rung.rounds), f"{100 * score:.1f}", gap]
                )
            for p in rung.played:
                rows.setdefault(p.trial.arm, [p.trial.arm, "", str(rung.rung.rounds), "failed", "out"])
        return ["method", "values", "rounds", "validation (%)", "points"], list(rows.values())

    def _measure_table(self) -> tuple[list[str], list[list[str]]]:
        rows = [[m.says, "-" if m.value is None else f"{m.value:.3g}"] for m in self.measures]
        return ["measure", "value"], rows

    def __repr__(self) -> str:
        lines = [f"Advice: {self.method}, lr {self.lr:g}", *_wrapped(self.sentence)]
        header, rows = self._score_table()
        if rows:
            lines += ["", *_aligned([header, *rows])]
        if self.measures:
            lines += ["", "How the sites differ:", *_aligned(self._measure_table()[1])]
        if self.excluded:
            lines += ["", "Left out:"]
            lines += [line for name, why in self.excluded.items() for line in _wrapped(f"{name}: {why}")]
        lines += ["", *_wrapped(f"It costs {self.cost}."), "", "Run it:", f"  {self.command}"]
        lines += [line for note in self.notes for line in _wrapped(f"Note: {note}")]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_page(
            f"Advice: {self.method}, lr {self.lr:g}",
            f"<p>{self.sentence}</p>",
            html_table(*self._score_table(), numbers_from=2),
            html_table(*self._measure_table()),
            notes=[*(f"{name}: {why}" for name, why in self.excluded.items()), f"Run it: {self.command}", *self.notes],
        )

    def to_markdown(self) -> str:
        """The page advice.md."""
        budget = f"{self.budget.rounds:g} rounds"
        if self.budget.minutes is not None and self.budget.seconds is not None:
            budget += f" ({self.budget.minutes:g} minutes; a round took {self.budget.seconds:.3g} s)"
        lines = [
            f"# Advice: {self.method}, lr {self.lr:g}",
            "",
            self.sentence,
            "",
            f"- Run it: `{self.command}`",
            f"- It costs {self.cost}.",
            f"- Data: {self.recipe.federation}; model: {self.recipe.model}; budget: {budget}.",
            "- All scores are on validation images. Test images were not read.",
            "",
            "## Methods that were tried",
            "",
            markdown_table(*self._score_table(), numbers_from=2),
            "",
            '"Out" means that it did not reach the last rung. Differences are in points.',
            "",
            "## How the sites differ",
            "",
            markdown_table(
                ["measure", "value", "what a site reveals for it"],
                [[m.says, "-" if m.value is None else f"{m.value:.3g}", m.reveals] for m in self.measures],
                numbers_from=99,
            ),
            "",
            "## Why these methods",
            "",
            *(f"- **{arm.name}**: {arm.reason}{_expected(arm)}." for arm in self.arms),
            *(f"- {name} was left out. {why}" for name, why in self.excluded.items()),
        ]
        if self.notes:
            lines += ["", "## Notes", "", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def plot(self) -> Figure:
        """The validation curves of all trials and the finalists' scores, as a matplotlib figure (extra "report")."""
        from fednorms.advice.picture import advice_figure

        return advice_figure(self)

    def write(self, folder: Path) -> None:
        """Write advice.md, advice.json, the recipe of the recommendation and, with matplotlib, curves.png."""
        with clear_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.path = folder
        self.files = [folder / name for name in ("advice.md", "advice.json", RECIPE)]
        write_atomic(folder / RECIPE, self.real_recipe().to_toml().encode())
        picture = _picture(self)
        if picture:
            self.files.append(folder / "curves.png")
            write_atomic(folder / "curves.png", picture)
        write_atomic(folder / "advice.md", self.to_markdown().encode())
        write_atomic(folder / "advice.json", (json.dumps(self.to_dict(), indent=2) + "\n").encode())

    def real_recipe(self) -> Recipe:
        """The recipe of the recommendation: all rounds, and tested at the end."""
        training = vars(self.recipe.training) | {"lr": self.lr}
        return Recipe.make(self.recipe.model_dump() | {"method": self.arm.method, "training": training})


def points(difference: float) -> str:
    """A difference in points.

    >>> points(-0.04), points(3.14)
    ('+0.0', '+3.1')
    """
    return f"{round(difference, 1) + 0.0:+.1f}"


def _picture(advice: Advice) -> bytes | None:
    import io

    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    buffer = io.BytesIO()
    advice.plot().savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _expected(arm: Arm) -> str:
    if arm.prior is None:
        return ""
    return f"; on federations like this one it lost {arm.prior:.1f} points to the best"


def _values(trial: Trial) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in trial.values.items()
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A table of at most 80 columns: the first column is shortened if need be."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    widths[0] = min(widths[0], WIDTH - 2 - sum(w + 2 for w in widths[1:]))
    shown = [[textwrap.shorten(row[0], widths[0], placeholder="..."), *row[1:]] for row in table]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in shown]


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
