"""The format of a table: what it accepts, how layers of recipes merge, and one clear message for every mistake."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fednorms.core.errors import BadInput
from fednorms.papers.tables.catalog import open_table
from fednorms.papers.tables.explanations import Explanation
from fednorms.papers.tables.plan import Found, chosen_rows, recipe_for
from fednorms.papers.tables.report import markdown
from fednorms.papers.tables.summary import summarize
from fednorms.papers.tables.table import Row, Setting, Table
from fednorms.reports.table import table_page
from tests.support.tables import MINI, table

LAYERS = """
paper = "p"
label = "l"
title = "t"
[recipe]
rounds = 10
training = { lr = 0.1, batch_size = 8, epochs = 3 }
[[settings]]
name = "a"
recipe.training.lr = 0.2
recipe.training.epochs = 4
[settings.columns]
Avg = "mean"
[[settings]]
name = "b"
[settings.columns]
Avg = "mean"
[[rows]]
name = "one"
method = "fedprox(mu=0.1)"
recipe.training.lr = 0.3
at.a.training.batch_size = 16
at.a.method = "fedprox(mu=0.5)"
"""


def test_a_later_layer_wins_key_by_key(tmp_path):
    made = open_table(table(tmp_path / "t", LAYERS))
    a, b = (made.recipe_of(setting, made.rows[0], {"seed": 4}) for setting in made.settings)
    assert (a.training.lr, a.training.epochs, a.training.batch_size) == (0.3, 4, 16)
    assert (b.training.lr, b.training.epochs, b.training.batch_size) == (0.3, 3, 8)
    assert "0.5" in a.method
    assert "0.1" in b.method
    assert a.seed == 4


def test_a_run_without_a_curve_is_tested_rarely_and_one_with_a_curve_after_every_round(tmp_path):
    made = open_table(table(tmp_path / "t", LAYERS))
    rare = recipe_for(made, made.settings[0], made.rows[0], 0, {})
    assert rare.evaluate_every == rare.checkpoint_every == 2  # of 10 rounds
    curve = LAYERS.replace('name = "a"\n', 'name = "a"\nstore = ["curve"]\n')
    made = open_table(table(tmp_path / "c", curve))
    assert recipe_for(made, made.settings[0], made.rows[0], 0, {}).evaluate_every == 1
    said = LAYERS.replace("rounds = 10", "rounds = 10\nevaluate_every = 5")
    made = open_table(table(tmp_path / "s", said))
    assert recipe_for(made, made.settings[0], made.rows[0], 0, {}).evaluate_every == 5


def test_published_numbers_have_a_deviation_or_not(tmp_path):
    made = open_table(table(tmp_path / "t"))
    printed = made.rows[0].published["shift"]
    assert (printed["Clean"].mean, printed["Clean"].std) == (1.0, None)
    assert (printed["Avg"].mean, printed["Avg"].std) == (100.0, 0.5)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('label = "Mini"', 'lable = "Mini"', ['unknown key "lable"', 'did you mean "label"', '"label" is missing']),
        ('title = "Digits', 'titel = "Digits', ['setting "shift"', 'unknown key "titel"', 'did you mean "title"']),
        ('Avg = "mean"\n[settings.inc', 'Avg = "meen"\n[settings.inc', ['column "Avg"', '"meen"', '"mean"']),
        ('title = "Digits', 'ranked = "Awg"\ntitle = "Digits', ["ranked", 'no column "Awg"', 'did you mean "Avg"']),
        ('Clean = "drawn', 'Clear = "drawn', ["incomparable", 'no column "Clear"', 'did you mean "Clean"']),
        (
            "published.shift = { Clean = 2.0, Avg",
            "published.shift = { Clean = 2.0, Avq",
            ['row "FedBN"', '"Avq"', '"Avg"'],
        ),
        ("published.shift = { Clean = 2.0", "published.shft = { Clean = 2.0", ['no setting "shft"', '"shift"']),
        ("Avg = [100.0, 0.5]", 'Avg = "high"', ['row "FedAvg"', "a number, [mean, std] or", "'high'"]),
        ('method = "fedbn"', 'method = "fedbm"', ['row "FedBN"', "fedbm", "fedbn"]),
        ("rounds = 2", "round = 2", ['unknown key "round"', '"rounds"']),
        ("rounds = 2", "rounds = 0", ["rounds", "got 0"]),
        ("rounds = 2", "rounds = 2\nseed = 1", ['"seed" cannot be set in a table']),
        ("size = 8,", 'size = 8, root = "/x",', ["data.root", "--data"]),
        ('name = "FedBN"', 'name = "Fedavg"', ['share the folder "fedavg"']),
        ('method = "fedbn"', 'method = "fedbn"\nsettings = ["pictures"]', ['not part of setting "shift"']),
        ('method = "fedbn"', 'method = "fedbn"\nsearch = { "training.rl" = [1] }', ["training.rl", '"lr"']),
        ('method = "fedbn"', 'method = "fedbn"\nsearch = { "training.lr" = [] }', ['"training.lr" has no values']),
        (
            'Avg = "mean"\n[settings.inc',
            'Avg = "mean@after_local"\n[settings.inc',
            ['setting "shift": column "Avg": no row is tested as "after_local"', 'evaluate = ["auto", "after_local"]'],
        ),
        ('Avg = "mean"\n[settings.inc', 'Avg = "mean@adapted"\n[settings.inc', ['column "Avg"', '"+ finetune"']),
        ("tolerance = 3.0", "tolerance = -1", ["tolerance", "got -1"]),
        ("seeds = 1", "seeds = ", ["not valid TOML"]),
    ],
)
def test_every_mistake_is_named_with_file_place_and_known_names(tmp_path, old, new, words):
    folder = table(tmp_path / "t", change=(old, new))
    with pytest.raises(BadInput) as error:
        open_table(folder)
    for word in ["table.toml", *words]:
        assert word in str(error.value), str(error.value)


def test_a_mode_that_one_row_tests_may_have_a_column(tmp_path):
    column = ('Avg = "mean"\n[settings.inc', 'Avg = "mean"\nTuned = "mean@adapted"\n[settings.inc')
    open_table(table(tmp_path / "t", column=column, row=('method = "fedbn"', 'method = "fedbn + finetune"')))
    own = ('method = "fedbn"', 'method = "fedbn"\nrecipe.evaluate = ["auto", "after_local"]')
    open_table(table(tmp_path / "u", column=(column[0], column[1].replace("adapted", "after_local")), row=own))


def test_several_mistakes_are_in_one_message(tmp_path):
    folder = table(
        tmp_path / "t", one=('method = "fedbn"', 'method = "fedbm"'), two=('Clean = "drawn', 'Clear = "drawn')
    )
    with pytest.raises(BadInput) as error:
        open_table(folder)
    assert "fedbm" in str(error.value)
    assert "Clear" in str(error.value)


def test_an_incomparable_column_may_depend_on_the_layout_of_the_data():
    values = {"paper": "p", "label": "l", "title": "t", "rows": [{"name": "a", "method": "fedavg"}]}
    reason = {"why": "a stand-in", "when": "image sheets"}
    setting = {"name": "s", "columns": {"Avg": "mean"}, "incomparable": {"Avg": reason}}
    made = Table.make({**values, "settings": [setting]})
    assert made.settings[0].incomparable["Avg"].when == "image sheets"
    with pytest.raises(BadInput, match="expected a reason, as text"):
        Table.make({**values, "settings": [{**setting, "incomparable": {"Avg": {"wy": "x"}}}]})


def test_rows_are_found_by_name_in_any_case_and_by_folder_name(tmp_path):
    made = open_table(table(tmp_path / "t", change=('name = "FedBN"', 'name = "FedAvg + BN"')))
    assert [row.name for row in chosen_rows(made, ["fedavg + bn"])] == ["FedAvg + BN"]
    assert [row.name for row in chosen_rows(made, ["fedavg+bn", "FedAvg"])] == ["FedAvg", "FedAvg + BN"]
    with pytest.raises(BadInput, match=r'no row "FedAvq".*did you mean "FedAvg"'):
        chosen_rows(made, ["FedAvq"])


def test_the_example_of_the_documentation_is_a_table():
    page = Path(__file__).parents[3] / "docs" / "reproduce.md"
    [text] = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    made = Table.make(tomllib.loads(text))
    keys = {*Table.model_fields, *Setting.model_fields, *Row.model_fields} - {"path"}
    assert all(re.search(rf"\b{key}\b", text) for key in keys), "every key is explained"
    assert made.rows[0].search == {"training.lr": [0.01, 0.05, 0.1]}


def test_notes_come_from_the_lists_of_a_page_with_headings(tmp_path):
    folder = table(tmp_path / "t", 'notes = ["In the table."]\n' + LAYERS)
    (folder / "table.md").write_text("# Notes\n\nNo note.\n\n## One\n\n- First\n  and more.\n\n## Two\n\n- Issue #2.\n")
    assert open_table(folder).notes == ["In the table.", "First and more.", "Issue #2."]


def test_a_heading_with_a_table_is_a_section_of_its_own(tmp_path):
    folder = table(tmp_path / "t", LAYERS)
    why = "## Why A < B\n\n| change | A |\n|---|---|\n| none | 1.5 |\n\n- The rate.\n"
    (folder / "table.md").write_text(f"# Notes\n\n- First.\n\n{why}\n## Choices\n\n- Last.\n")
    found = open_table(folder)
    assert found.notes == ["First.", "Last."]
    assert found.explanations == [Explanation("Why A < B", ["change", "A"], [["none", "1.5"]], ["The rate."])]
    summary = summarize(found, Found())
    text = markdown(summary)
    assert text.index("## Why A &lt; B\n\n| change | A |") < text.index("- The rate.") < text.index("## Notes")
    page = table_page(summary).html()
    assert "Why A &lt; B" in page
    assert "The rate." in page


def test_a_folder_without_a_table_and_an_unknown_name(tmp_path):
    with pytest.raises(BadInput, match=r"has no table\.toml"):
        open_table(tmp_path)
    with pytest.raises(BadInput, match='No table "fedwon-tabel-1": did you mean "fedwon-table-1"'):
        open_table("fedwon-tabel-1")
    assert open_table(table(tmp_path / "t", MINI) / "table.toml").label == "Mini"
