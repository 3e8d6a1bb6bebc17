"""Before the first run of a table: which rows can never run, and which cells stay empty, all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fednorms.core.errors import BadInput
from fednorms.papers.tables.plan import Job
from fednorms.runs.cells import opened
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session


@dataclass
class Checked:
    """What was found in the runs that are to come."""

    problems: dict[str, list[str]] = field(default_factory=dict)  # what is wrong, and the rows in which it is
    untested: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)  # setting, column, mode: rows

    def refuse(self, name: str, columns: Sequence[str]) -> None:
        """Raise one error that names everything, also what is wrong with `columns`; nothing has been written yet."""
        lines = [*columns, *(f"{', '.join(rows)}: {what}" for what, rows in self.problems.items())]
        if not lines:
            return
        listed = "\n".join(f"  - {line}" for line in lines)
        raise BadInput(
            f"{name}: nothing was started, because this can never run:\n{listed}\n"
            "Mend it in the table, or choose what runs by only (rows) and settings."
        )

    @property
    def notes(self) -> list[str]:
        """Which cells will stay empty, and why."""
        return [
            f'{setting}, column "{column}": not tested as "{mode}", so that there is no number: {", ".join(rows)}'
            for (setting, column, mode), rows in self.untested.items()
        ]


def checked(jobs: Iterable[Job]) -> Checked:
    """Open every run as it would be opened, and close it again; runs that differ in seed and rate alone, once."""
    found, seen = Checked(), set()
    for job in jobs:
        key = (job.label, _essence(job.recipe))
        if key in seen:
            continue
        seen.add(key)
        try:
            session = Session.open(_light(job.recipe), opened(job.recipe))
        except BadInput as error:
            rows = found.problems.setdefault(str(error), [])
            rows += [job.label] if job.label not in rows else []
        except Exception:  # an error in code of the user's own: the run itself says where, and the others go on
            continue
        else:
            _note_untested(found, job, session)
    return found


def _note_untested(found: Checked, job: Job, session: Session) -> None:
    modes, headline = [str(mode) for mode in session.modes], str(session.headline)
    for column, selector in job.setting.selectors.items():
        if selector.of_a_test and not selector.mode_among(modes, headline):
            rows = found.untested.setdefault((job.setting.name, column, selector.mode or headline), [])
            rows += [job.row.name] if job.row.name not in rows else []


def _light(recipe: Recipe) -> Recipe:
    """The recipe where opening it moves nothing to a device and starts no process; what fits there fits anywhere."""
    return recipe.model_copy(update={"engine": "loop", "device": "cpu"})


def _essence(recipe: Recipe) -> str:
    values = recipe.model_dump(mode="json", exclude={"training"}) | {"training": dict(vars(recipe.training))}
    return repr(values | {"seed": 0, "training": values["training"] | {"lr": 0.0}})
