"""Tables fit their terminal: words never break, columns go in the given order, blocks repeat the first column."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console

from fednorms.cli.grid import grid

HEADER = ["name", "idea", "paper", "link"]
ROWS = [
    [
        "fedavg",
        "average the models of all clients, weighted by data size",
        "McMahan et al. 2017",
        "https://example.org/a",
    ],
    ["fedbn", "normalization layers stay local", "Li et al. 2021", ""],
]


def drawn(width, *args, **kwargs):
    console = Console(width=width, highlight=False)
    with console.capture() as said:
        console.print(grid(*args, **kwargs))
    return said.get().splitlines()


def words(text):
    return set(text.split())


def test_a_table_that_fits_has_a_line_per_row_and_no_trailing_spaces():
    lines = drawn(1000, HEADER, ROWS)
    assert len(lines) == 3
    assert all(line == line.rstrip() for line in lines)
    assert lines[2].split("  ")[0] == "fedbn"


def test_words_never_break_at_any_width_that_the_longest_word_fits():
    every = set().union(*(words(cell) for row in [HEADER, *ROWS] for cell in row))
    for width in range(45, 140):
        lines = drawn(width, HEADER, ROWS)
        assert max(map(cell_len, lines)) <= width
        assert words(" ".join(lines)) == every, width


def test_columns_are_left_out_in_order_and_named():
    said = " ".join(drawn(45, HEADER, ROWS, optional=["link", "paper"]))
    assert "example.org" not in said
    assert "McMahan" in said
    assert "(link: the column does not fit 45 characters)" in said
    said = " ".join(drawn(24, HEADER, ROWS, optional=["link", "paper"]))
    assert "McMahan" not in said
    assert "(link, paper: the columns do not fit 24 characters)" in " ".join(said.split())


def test_numbers_stay_whole_and_come_in_blocks_with_the_first_column():
    names = [f"site{i}" for i in range(12)]
    rows = [["fedavg", *("81.5 ± 0.3" for _ in names)], ["fedbn", *("7.0" for _ in names)]]
    lines = drawn(40, ["method", *names], rows, numbers_from=1)
    assert max(map(cell_len, lines)) <= 40
    assert sum(line.startswith("fedavg") for line in lines) == 6
    assert " ".join(lines).count("81.5 ± 0.3") == len(names)
    assert [name for line in lines for name in line.split() if name.startswith("site")] == names
    assert len(drawn(1000, ["method", *names], rows, numbers_from=1)) == 3


def test_blocks_repeat_as_many_columns_as_tell_the_rows_apart():
    names = [f"site{i}" for i in range(6)]
    rows = [["fednn", mode, *("81.5" for _ in names)] for mode in ("global/global", "global/batch")]
    lines = drawn(40, ["method", "mode", *names], rows, numbers_from=2)
    assert sum(line.startswith("fednn   global/batch") for line in lines) == 3
    other = [["fedbn", "personal/own", *("81.5" for _ in names)], rows[0]]
    lines = drawn(40, ["method", "mode", *names], other, numbers_from=2)
    assert sum(line.startswith("fedbn") for line in lines) == 2
    assert " ".join(lines).count("personal/own") == 1


def test_a_word_wider_than_the_terminal_folds_and_loses_nothing():
    lines = drawn(20, ["file", "class"], [["x" * 50, "cat"]])
    assert max(map(cell_len, lines)) <= 20
    assert "".join(lines).count("x") == 50
