"""Where data sets are published: every reader says it, on the page and where data are missing."""

import pytest

from fednorms import BadInput, federation, reproduce
from fednorms.cli import main
from fednorms.data.readers import READERS

CUSTOM = {"centres", "npz", "huggingface"}


@pytest.mark.parametrize("reader", READERS.values(), ids=lambda reader: reader.name)
def test_every_reader_says_what_it_reads_and_where_it_is_published(reader):
    assert reader.published.what.endswith(".")
    assert reader.expected
    assert (reader.name in CUSTOM) == (not reader.published.links)
    assert bool(reader.published.license) == bool(reader.published.links)
    assert all(link.startswith("http") for link in reader.published.links.values())


@pytest.mark.parametrize("name", [name for name in READERS if name not in CUSTOM])
def test_missing_data_are_answered_with_where_to_get_them(name):
    with pytest.raises(BadInput, match="needs root=FOLDER") as caught:
        federation(name)
    for link in READERS[name].published.links.values():
        assert link in str(caught.value)
    assert READERS[name].published.license in str(caught.value)


@pytest.mark.parametrize(
    "args", [["data", "check", "pacs"], ["data", "pack", "pacs", "x.fnpack"], ["data", "show", "pacs"]]
)
def test_the_command_line_asks_for_a_folder_in_its_own_words(args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    said = capsys.readouterr().err
    assert (
        "needs --root FOLDER" if "show" in args else '"pacs" is the name of a data set; expected its folder'
    ) in said
    assert "http" in said


def test_a_folder_without_the_data_set_is_answered_likewise(tmp_path):
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BadInput) as caught:
            federation("camelyon17", root=root)
        assert READERS["camelyon17"].expected in str(caught.value)
        assert "CC0" in str(caught.value)


def test_counts_are_those_that_the_reader_checks():
    assert READERS["pacs"].published.counts == {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    assert sum(READERS["office-home"].published.counts.values()) == 15_588


def test_a_table_without_its_data_says_where_to_get_them(tmp_path):
    with pytest.raises(BadInput, match="needs data that were not found") as caught:
        reproduce("fedwon-table-3", out=tmp_path / "out")
    assert READERS["digits-five"].published.where in str(caught.value)
    assert READERS["digits-five"].expected in str(caught.value)
    assert not (tmp_path / "out").exists()
