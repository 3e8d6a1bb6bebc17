"""A figure's axis over settings or rows: the right cells in the right order, as one table and as lines."""

from __future__ import annotations

import pytest

from fednorms.core.errors import BadInput
from fednorms.papers.tables.report import markdown
from fednorms.papers.tables.summary import axis_lines, axis_steps, summarize
from fednorms.papers.tables.table import Table
from tests.support.tables import found

CLIENTS = {"label": "clients", "column": "Avg", "settings": {"few": "5", "some": "10", "many": "50"}}
METHODS = {"label": "mu", "column": "Avg", "rows": {"FedProx": "0.1", "FedAvg": "0"}}
OURS = {
    ("few", "FedAvg"): [50.0, 54.0],
    ("many", "FedAvg"): [80.0],
    ("few", "FedProx"): [61.0],
    ("apart", "FedAvg"): [10.0],
}


def table(ladder=CLIENTS, **values):
    made = {
        "paper": "fednorms",
        "label": "Figure",
        "title": "A ladder",
        "ladder": ladder,
        "settings": [
            {"name": "many", "columns": {"Worst": "worst", "Avg": "mean"}},
            {"name": "few", "columns": {"Avg": "mean"}},
            {"name": "some", "columns": {"Avg": "mean"}},
            {"name": "apart", "columns": {"Avg": "mean"}},
        ],
        "rows": [
            {"name": "FedAvg", "method": "fedavg", "published": {"few": {"Avg": 51.0}}},
            {"name": "FedProx", "method": "fedprox(mu=0.1)", "settings": ["few", "many"]},
            {"name": "GN", "method": "gn"},
        ],
    }
    return Table.make(made | values)


def means(summary):
    return {name: {step: entry.ours for step, entry in line.items()} for name, line in axis_lines(summary).items()}


def test_over_settings_every_row_that_ran_is_a_line_in_the_order_of_the_ladder():
    summary = summarize(table(), found(OURS))
    assert means(summary) == {"FedAvg": {"5": 52.0, "50": 80.0}, "FedProx": {"5": 61.0, "50": None}}
    assert list(axis_lines(summary)["FedAvg"]) == ["5", "50"]
    assert axis_steps(summary) == ["5", "50"]


def test_over_rows_every_setting_that_ran_is_a_line():
    summary = summarize(table(METHODS), found(OURS))
    assert means(summary) == {
        "many": {"0.1": None, "0": 80.0},
        "few": {"0.1": 61.0, "0": 52.0},
        "apart": {"0": 10.0},
    }
    assert axis_steps(summary) == ["0.1", "0"]


def test_the_report_has_one_table_with_published_values_next_to_ours():
    text = markdown(summarize(table(), found(OURS)))
    head = text.index("## Avg over clients")
    assert head < text.index("## many")
    rows = text[head:].split("\n\n")[1].splitlines()
    assert rows[0] == "|  | 5 | 50 |"
    assert rows[2] == "| FedAvg | 52.0 ± 2.8<br>51.0 (+1.0) | 80.0 |"
    assert rows[3] == "| FedProx | 61.0 | - |"


def test_without_runs_or_with_one_setting_there_is_no_such_table():
    assert axis_lines(summarize(table(), found({}))) == {}
    assert " over clients" not in markdown(summarize(table(), found({})))
    assert " over mu" not in markdown(summarize(table(METHODS), found({("few", "FedAvg"): [50.0]})))


@pytest.mark.parametrize("ladder", [CLIENTS, METHODS])
def test_the_picture_has_the_lines_over_all_steps_and_panels_for_the_rest(ladder):
    pytest.importorskip("matplotlib")
    from fednorms.papers.tables.picture import figure

    axes = figure(summarize(table(ladder), found(OURS))).axes
    assert axes[0].get_xlabel() == ladder["label"]
    steps = list((ladder.get("settings") or ladder["rows"]).values())
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == steps
    drawn = {c.get_label(): c.lines[0].get_xydata().tolist() for c in axes[0].containers}
    where = {step: at for at, step in enumerate(steps)}
    for name, line in axis_lines(summarize(table(ladder), found(OURS))).items():
        assert drawn[name] == [[where[step], e.ours] for step, e in line.items() if e.ours is not None]
    panels = [axis.get_title().partition(":")[0] for axis in axes[1:]]
    assert panels == (["few", "apart"] if ladder is CLIENTS else ["few"])  # "few" is published, "apart" is no step


def test_a_single_step_is_not_a_line():
    pytest.importorskip("matplotlib")
    from fednorms.papers.tables.picture import figure

    axes = figure(summarize(table(), found({("many", "FedAvg"): [80.0]}))).axes
    assert [axis.get_title() for axis in axes] == ["many: ours (%)"]


def test_long_names_of_columns_are_wrapped_and_colors_explained_where_there_are_some():
    pytest.importorskip("matplotlib")
    from fednorms.papers.tables.picture import figure

    name, row = "Domain mean, best round", {"name": "FedAvg", "method": "fedavg", "published": {"few": {"Avg": 51.0}}}
    settings = [{"name": "few", "columns": {"Avg": "mean", name: "worst"}, "incomparable": {"Avg": "other images"}}]
    for judged in (False, True):
        if judged:
            del settings[0]["incomparable"]
        summary = summarize(table(None, settings=settings, rows=[row]), found(OURS))
        (heat,) = figure(summary).axes
        assert ("purple better" in heat.get_title().replace("\n", " ")) == judged
        labels = [tick.get_text() for tick in heat.get_xticklabels()]
        assert [label.split() for label in labels] == [["Avg"], name.split()]
        assert max(map(len, labels[1].splitlines())) <= 15


def test_a_ranking_is_drawn_next_to_its_heat_map_in_the_same_order():
    pytest.importorskip("matplotlib")
    from fednorms.papers.tables.picture import figure

    settings = [{"name": "few", "columns": {"Avg": "mean"}, "ranked": "Avg"}]
    rows = [
        {"name": "FedAvg", "method": "fedavg", "published": {"few": {"Avg": 51.0}}},
        {"name": "GN", "method": "gn"},
    ]
    ours = {("few", "FedAvg"): [50.0, 54.0], ("few", "GN"): [70.0, 72.0]}
    heat, ranking = figure(summarize(table(None, settings=settings, rows=rows), found(ours))).axes
    assert [tick.get_text() for tick in heat.get_yticklabels()] == ["GN", "FedAvg"]
    assert ranking.get_ylim() == heat.get_ylim()
    assert [c.lines[0].get_xydata().tolist() for c in ranking.containers] == [[[71.0, 0.0]], [[52.0, 1.0]]]
    rings = [line for line in ranking.lines if line.get_markerfacecolor() == "none"]
    assert [line.get_xydata().tolist() for line in rings] == [[[51.0, 1.0]]]  # published


def test_a_row_looks_the_same_in_the_curves_of_all_settings():
    pytest.importorskip("matplotlib")
    from fednorms.papers.tables.picture import figure

    ran = found({("many", "GN"): [80.0], ("few", "FedAvg"): [50.0], ("few", "GN"): [70.0]})
    for record in ran.every:
        record["curve"] = {"global": [[1, 0.3], [2, 0.4]]}
    axes = figure(summarize(table(None), ran)).axes
    colors = {}
    for line in (line for axis in axes for line in axis.lines if line.get_label() in ("FedAvg", "GN")):
        colors.setdefault(line.get_label(), []).append(line.get_color())
    assert len(colors["GN"]) == 2
    assert len(set(colors["GN"])) == 1
    assert colors["FedAvg"] != colors["GN"][:1]


@pytest.mark.parametrize(
    ("ladder", "words"),
    [
        (CLIENTS | {"settings": {"fev": "5", "many": "50"}}, ['ladder: no setting "fev"', 'did you mean "few"']),
        (METHODS | {"rows": {"FedAwg": "0", "GN": "1"}}, ['ladder: no row "FedAwg"', 'did you mean "FedAvg"']),
        (CLIENTS | {"column": "Awg"}, ['setting "few" has no column "Awg"', 'did you mean "Avg"']),
        (CLIENTS | {"rows": METHODS["rows"]}, ["ladder: expected either settings or rows"]),
        ({"label": "clients", "column": "Avg"}, ["ladder: expected either settings or rows"]),
        (CLIENTS | {"settings": {"few": "5", "many": "5"}}, ["ladder: two of its steps have the same name"]),
        (CLIENTS | {"colum": "Avg"}, ['ladder: unknown key "colum"', 'did you mean "column"']),
        ({"column": "Avg"}, ['ladder: "label" is missing']),
    ],
)
def test_mistakes_are_named(ladder, words):
    with pytest.raises(BadInput) as caught:
        table(ladder)
    assert all(word in str(caught.value) for word in words), str(caught.value)
