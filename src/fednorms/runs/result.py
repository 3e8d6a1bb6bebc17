"""Result: what a run found, with a readable repr."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.markup import html_page, html_table, latex_table, markdown_table
from fednorms.core.optional import new_frame
from fednorms.core.states import ServerState
from fednorms.engines.devices import numerics
from fednorms.evaluation.scores import Scores
from fednorms.runs.differences import Answers, Tested
from fednorms.runs.last_predictions import predict_now, predicted_modes
from fednorms.runs.recipe import Recipe
from fednorms.runs.run_names import short
from fednorms.runs.session import Session
from fednorms.runs.store import predictions as store
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.use.choose import choose

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Row = dict[str, Any]


@dataclass
class Result:
    """A run's history and scores.

    `history` holds one row of plain values per round, as metrics.jsonl does; `scores` reads a row's scores. `headline`
    names the scores by which the method is judged (model/statistics). Two rounds are reported: the last one, and the
    one with the best validation accuracy. The best round on test data is never reported.

    >>> from fednorms.runs.driver import run
    >>> result = run("fedavg", rounds=1)
    >>> 0 <= result.accuracy <= 1, sorted(result.domains) == ["clean", "faint", "foggy", "negative", "poster"]
    (True, True)
    """

    method: str
    recipe: Recipe
    headline: str
    history: list[Row]
    best: Row | None = None  # round and accuracy of the best validation
    notes: list[str] = field(default_factory=list)
    path: Path | None = None
    privacy: Row | None = None  # epsilon, delta and what they mean, for a method with differential privacy
    domain_of: Mapping[str, str] = field(default_factory=dict)  # of each site
    _session: Session | None = None
    _state: ServerState | None = None

    def __fspath__(self) -> str:
        """The run's directory: a result can be given wherever a run's path is asked for."""
        if self.path is None:
            raise BadInput("This run was not stored, so it cannot be opened again. Run it with out=, a folder.")
        return str(self.path)

    @classmethod
    def of(cls, session: Session, history: list[Row], best: Row | None, notes: list[str], path: Path | None) -> Result:
        """The result at the start of a run, or where one is continued."""
        recipe, done = session.recipe, int(history[-1]["round"]) if history else 0
        privacy = session.guarantee.to_dict(done) if session.guarantee else None
        domains = session.facts.domain_of
        return cls(recipe.method, recipe, str(session.headline), history, best, notes, path, privacy, domains)

    def add(self, row: Row, best: Row | None) -> None:
        """Add one more round."""
        self.history.append(row)
        self.best = best
        if self.privacy:
            self.privacy["epsilon"] = row["epsilon"]

    def close(self, session: Session, state: ServerState) -> None:
        """Keep the models at the end of the run."""
        self._session, self._state = session, state

    # -- reading ------------------------------------------------------------------------------------------------
    @property
    def rounds(self) -> int:
        """The number of rounds done."""
        return int(self.history[-1]["round"]) if self.history else 0

    def scores(self, label: str | None = None, *, split: str = "test", which: str = "last") -> Scores:
        """Scores of a mode ("personal/own"; default: the headline) in the last or the best-validation round."""
        name = f"{label or self.headline}/{split}"
        rows = [r for r in self.history if name in r["scores"]]
        if which == "best":
            rows = [r for r in rows if self.best and r["round"] == self.best["round"]]
        if not rows:
            known = sorted({k for r in self.history for k in r["scores"]})
            raise BadInput(
                f'No scores "{name}" in the {which} round of this run. It has: {", ".join(known) or "none"}.'
            )
        return Scores.from_dict(rows[-1]["scores"][name], self.domain_of)

    def tested(self, at: int) -> dict[str, Scores]:
        """All scores of a round, by mode and split ("personal/own/test"); empty if it was not tested."""
        rows = [r for r in self.history if r["round"] == at]
        return Scores.in_row(rows[-1], self.domain_of) if rows else {}

    @property
    def accuracy(self) -> float:
        """Mean test accuracy over sites in the last round (headline mode)."""
        return self.scores().mean

    @property
    def domains(self) -> dict[str, float]:
        """Test accuracy per domain in the last round (headline mode)."""
        return self.scores().domains

    def curve(self, label: str | None = None, *, split: str = "test") -> list[tuple[int, float]]:
        """Mean accuracy after each evaluated round."""
        name = f"{label or self.headline}/{split}"
        return [(r["round"], r["scores"][name]["mean"]) for r in self.history if name in r["scores"]]

    def model(self, site: str | None = None, *, averaged: bool = False) -> nn.Module:
        """The trained model as a plain module in eval mode: the server's, or a site's own.

        If clients keep tensors, as in FedBN, there is none for all sites; `averaged` takes the mean over clients.
        Input: images scaled to [0, 1] and normalized as the recipe and the federation say; output: logits.
        """
        if self._session is None or self._state is None:
            raise BadInput("This result was read from disk. Export its model with fednorms.export(path, out).")
        return site_model(self._session, self._state, site, averaged)

    def answers(self) -> dict[str, Tested]:
        """What each test image was taken for in the last round, by mode; those that the run kept, if it has a folder.

        Nothing across machines, or if the recipe keeps no predictions.
        """
        session, state = self._session, self._state
        if session is None or state is None or session.data is None or self.recipe.keep_predictions is False:
            return {}
        found: dict[str, Tested] = {}
        for mode in predicted_modes(session):
            if self.path is not None:
                said = store.read(RunDirectory(self.path), state.round, str(mode)) or {}
            else:
                with numerics(self.recipe.precision, self.recipe.deterministic):
                    said = predict_now(session, state, mode)
            if said:
                found[str(mode)] = {site: Answers.of(p) for site, p in said.items()}
        return found

    def to_dict(self) -> Row:
        """Everything but the models, as plain values."""
        last = self.history[-1] if self.history else {}
        best_row = next((r for r in self.history if self.best and r["round"] == self.best["round"]), None)
        return {
            "method": self.method,
            "headline": self.headline,
            "rounds": self.rounds,
            "last": last.get("scores", {}),
            "best_validation": None if best_row is None else {**(self.best or {}), "scores": best_row["scores"]},
            "seconds": sum(r["seconds"] for r in self.history),
            "bytes_up": sum(r["bytes_up"] for r in self.history),
            "bytes_down": sum(r["bytes_down"] for r in self.history),
            "diverged": sum(len(r["diverged"]) for r in self.history),
            **({"privacy": self.privacy} if self.privacy else {}),
            "notes": self.notes,
            "recipe": self.recipe.to_dict(),
        }

    # -- showing ------------------------------------------------------------------------------------------------
    def plot(self) -> Figure:
        """The run as a matplotlib figure: accuracy per domain and training loss, over rounds from 1.

        A notebook shows it; elsewhere, `result.plot().savefig("run.png")`. Needs the extra "report".
        """
        from fednorms.runs.picture import result_figure

        return result_figure(self)

    def to_frame(self, by: Literal["round", "site"] = "round") -> DataFrame:
        """The history as a pandas DataFrame: one line per round, or per round, mode, split and site.

        Accuracies are fractions; by round, they are those of the headline mode. Needs the extra "frame".
        """
        if by not in ("round", "site"):
            raise BadInput(f'to_frame: by= must be "round" or "site", got "{by}".')
        return new_frame(list(self._by_round() if by == "round" else self._by_site()))

    def to_markdown(self) -> str:
        """The scores of the last round as a Markdown table, in percent."""
        return markdown_table(*self._table(), numbers_from=2)

    def to_latex(self) -> str:
        """The scores of the last round as a LaTeX tabular, in percent; it needs the package booktabs."""
        return latex_table(*self._table(), numbers_from=2)

    def _by_round(self) -> Iterator[Row]:
        for row in self.history:
            plain = {k: row[k] for k in ("round", "lr", "clients", "train_loss", "bytes_up", "bytes_down", "seconds")}
            plain |= {"epsilon": row["epsilon"]} if "epsilon" in row else {}
            tested = Scores.in_row(row, self.domain_of)
            for split in ("val", "test"):
                s = tested.get(f"{self.headline}/{split}")
                plain[f"{split}_accuracy"] = None if s is None else s.mean
                plain[f"{split}_balanced_accuracy"] = None if s is None else s.balanced_accuracy
                plain[f"{split}_loss"] = None if s is None else s.loss
            yield plain

    def _by_site(self) -> Iterator[Row]:
        for row in self.history:
            for s in Scores.in_row(row, self.domain_of).values():
                for site, score in s.sites.items():
                    yield {
                        "round": row["round"],
                        "mode": s.label,
                        "split": s.split,
                        "site": site,
                        "domain": self.domain_of[site],
                        "accuracy": score.accuracy,
                        "balanced_accuracy": score.balanced_accuracy,
                        "loss": score.loss,
                        "images": score.samples,
                    }

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """The last round in percent: a line per mode, a column per domain."""
        tested = {name: self.scores(name.rpartition("/")[0], split=name.rpartition("/")[2]) for name in self._shown()}
        domains = list(dict.fromkeys(d for s in tested.values() for d in s.domains))
        metric = self.recipe.metric
        balanced = metric == "balanced_accuracy"
        over_sites = ["mean", "accuracy"] if balanced else ["mean", "std over sites"]
        header = ["model/statistics", "split", *domains, *over_sites]
        rows = []
        for s in tested.values():
            by_domain = s.judged_domains(metric)
            per_domain = [f"{100 * by_domain[d]:.1f}" if d in by_domain else "-" for d in domains]
            over = [100 * s.judged(metric), 100 * (s.mean if balanced else s.std)]
            rows.append([s.label, s.split, *per_domain, *(f"{x:.1f}" for x in over)])
        return header, rows

    def _title(self) -> str:
        plural = "s" * (self.rounds != 1)
        about = f"{self.method} on {short(self.recipe.federation)}, {short(self.recipe.model)}"
        return f"{about}, {self.rounds} round{plural}, seed {self.recipe.seed}"

    def _remarks(self) -> list[str]:
        """Lines below the scores."""
        shown = self._shown()
        lines = [] if shown else ["not tested: there are no test images"]
        if self.privacy:
            lines.append("epsilon {epsilon:.3g} at delta {delta:g}: {neighbours}".format(**self.privacy))
        if self.best and f"{self.headline}/test" in shown:
            best = self.scores(which="best").judged(self.recipe.metric)
            lines.append(f"at the best validation (round {self.best['round']}): {100 * best:.1f} %")
        return lines

    def __repr__(self) -> str:
        if not self.history:
            return f"Result({self.method}: no round yet)"
        scores = [line for name in self._shown() for line in self._lines(name)]
        return "\n".join([self._title(), *scores, *(f"  {remark}" for remark in self._remarks())])

    def _repr_html_(self) -> str:
        if not self.history:
            return html_page(repr(self))
        what = "Balanced accuracy" if self.recipe.metric == "balanced_accuracy" else "Accuracy"
        remarks = [f"{what} in percent, last round.", *self._remarks(), *(f"Note: {note}" for note in self.notes)]
        return html_page(self._title(), html_table(*self._table(), numbers_from=2), notes=remarks)

    def _shown(self) -> list[str]:
        """The tests of the run, the headline's first; without any, those on validation images."""
        found = dict.fromkeys(name for row in self.history for name in row["scores"])
        tests = [n for n in found if n.endswith("/test")] or [n for n in found if n.endswith("/val")]
        return sorted(tests, key=lambda name: not name.startswith(f"{self.headline}/"))

    def _lines(self, name: str) -> list[str]:
        label, _, split = name.rpartition("/")
        s = self.scores(label, split=split)
        where = "test" if split == "test" else "validation"
        domains = s.judged_domains(self.recipe.metric)
        domain, worst = min(domains.items(), key=lambda item: item[1])
        balanced = self.recipe.metric == "balanced_accuracy"
        spread = [f"std over sites {100 * s.std:.1f}"] if len(s.sites) > 1 and not balanced else []
        spread += [f"worst {domain} {100 * worst:.1f}"] if len(domains) > 1 else []
        found = f" ({', '.join(spread)})" if spread else ""
        if balanced:
            found += f", accuracy {100 * s.mean:.1f} %"
            where = f"{where} balanced"
        return [
            f"  {label} {where} accuracy {100 * s.judged(self.recipe.metric):.1f} %{found}",
            "  " + "  ".join(f"{d} {100 * a:.1f}" for d, a in domains.items()),
        ]


def site_model(session: Session, state: ServerState, site: str | None, averaged: bool = False) -> nn.Module:
    """The server's model (site=None) or the model of one client, as a new module in eval mode."""
    task, engine = session.task, session.engine
    sent = engine.test_broadcast(state, session.cohort(max(state.round - 1, 0)))
    return task.net.plain(choose(task, session.facts, sent, engine.store, site, averaged=averaged).tensors)
