"""Charts: well-formed SVG whose marks are where the numbers say."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from fednorms.evaluation.calibration import Bin
from fednorms.evaluation.intervals import Interval
from fednorms.reports.charts import Bar, Line, bar_chart, class_bars, confusion_matrix, line_chart, reliability_diagram
from fednorms.reports.elements import Html, joined, tag
from fednorms.reports.svg import spread, steps, whole_steps

HOSTILE = "</svg><script>alert(1)</script>&\"'\x00"
NAN = math.nan


def drawn(svg):
    """The chart as XML, which must be well-formed."""
    root = ElementTree.fromstring(svg)
    assert root.tag == "svg"
    assert root.find("title").text
    assert root.find("desc").text
    width, height = (float(root.get(side)) for side in ("width", "height"))
    assert root.get("viewBox").split()[:2] == ["0", "0"]
    assert width > 0
    assert height > 0
    return root


def of_class(root, name):
    return [mark for mark in root.iter() if name in mark.get("class", "").split()]


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    assert joined(Html("<br/>"), ["<", None], 1.0) == "<br/>&lt;1"
    assert "\x00" not in tag("p", "a\x00b")


@pytest.mark.parametrize(
    "svg",
    [
        line_chart([Line("one", [(1, 0.5)])], "One point"),
        line_chart([Line("flat", [(1, 0.5), (2, 0.5)]), Line("zero", [(1, 0.0), (2, 0.0)])], "Equal values"),
        line_chart([Line(HOSTILE, [(1, 0.1), (9, 0.9)], [(0.0, 0.2), (0.8, 1.0)])], HOSTILE),
        line_chart([Line("loss", [(1, 2.3), (5, 1e-4)])], "Loss", scale=1),
        bar_chart({"": [Bar(HOSTILE, Interval(0.5, 0.4, 0.6), note=HOSTILE)]}, HOSTILE),
        bar_chart({HOSTILE: [Bar("a", Interval(0.0, NAN, NAN)), Bar("b", Interval(1.0, 0.9, 1.0))]}, "Ends"),
        confusion_matrix([[3, 1], [0, 2]], [HOSTILE, "b" * 80], HOSTILE),
        confusion_matrix([[0] * 40 for _ in range(40)], [str(c) for c in range(40)], "Nothing predicted"),
        reliability_diagram([Bin(0.0, 0.5, 0, NAN, NAN), Bin(0.5, 1.0, 4, 0.8, 0.75)], HOSTILE),
        class_bars({"train": [0, 5], "test": [1, 0]}, [HOSTILE, "b"], HOSTILE),
        class_bars({"train": [0] * 100}, [str(c) for c in range(100)], "No image"),
    ],
)
def test_charts_are_well_formed_whatever_names_and_numbers(svg):
    root = drawn(svg)
    assert not list(root.iter("script"))
    assert "nan" not in svg.lower()


def test_without_numbers_there_is_no_chart():
    assert line_chart([], "a") == line_chart([Line("a", [])], "a") == ""
    assert bar_chart({}, "a") == bar_chart({"group": []}, "a") == ""
    assert reliability_diagram([Bin(0, 1, 0, NAN, NAN)], "a") == ""


def test_a_line_goes_through_its_points():
    values = [0.1, 0.4, 0.3, 0.8]
    root = drawn(line_chart([Line("a", list(enumerate(values, 1)))], "Accuracy"))
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in of_class(root, "hit")]
    xs, ys = zip(*places, strict=True)
    gaps = [b - a for a, b in pairwise(xs)]
    assert max(gaps) - min(gaps) < 0.1  # rounds are equally far apart
    per_point = [(ys[0] - y) / (v - values[0]) for y, v in list(zip(ys, values, strict=True))[1:]]
    assert max(per_point) - min(per_point) < 1  # heights are proportional to values, higher is more
    assert min(per_point) > 0


def test_long_runs_stay_small_and_keep_their_last_round():
    lines = [Line(f"method {i}", [(t, t / 5000) for t in range(1, 5001)]) for i in range(10)]
    svg = line_chart(lines, "Long")
    assert len(svg) < 300_000
    assert "method 9, 5000: 100" in svg


def test_bars_are_as_long_as_their_shares():
    shares = [0.25, 0.5, 1.0]
    root = drawn(bar_chart({"": [Bar(str(s), Interval(s, s - 0.1, s)) for s in shares]}, "Shares"))
    lengths = [float(bar.get("width")) for bar in of_class(root, "bar")]
    assert [round(length / lengths[-1], 3) for length in lengths] == shares
    assert len(of_class(root, "whisker")) == 3


def test_a_confusion_matrix_has_a_square_for_every_count():
    counts = [[5, 0, 1], [0, 0, 0], [2, 0, 7]]
    root = drawn(confusion_matrix(counts, ["a", "b", "c"], "Confusion"))
    said = sorted(tip.text for square in root.iter("rect") for tip in square.iter("title"))
    assert said == [
        "a predicted as a: 5 of 6 (83.3 %)",
        "a predicted as c: 1 of 6 (16.7 %)",
        "c predicted as a: 2 of 9 (22.2 %)",
        "c predicted as c: 7 of 9 (77.8 %)",
    ]
    assert "12 of 15" in root.find("desc").text


def test_a_calibrated_model_lies_on_the_line():
    root = drawn(reliability_diagram([Bin(0, 0.5, 5, 0.25, 0.25), Bin(0.5, 1, 5, 0.75, 0.75)], "Calibration"))
    (x0, y0), (x1, y1) = ((float(c.get("cx")), float(c.get("cy"))) for c in root.iter("circle"))
    start, end = of_class(root, "ideal")[0].get("d").removeprefix("M").split("L")
    (a, b), (c, d) = (tuple(map(float, place.split())) for place in (start, end))
    for x, y, share in ((x0, y0, 0.25), (x1, y1, 0.75)):
        assert x == pytest.approx(a + share * (c - a), abs=0.2)
        assert y == pytest.approx(b + share * (d - b), abs=0.2)


def test_small_bars_stack_the_splits():
    root = drawn(class_bars({"train": [6, 3], "test": [2, 1]}, ["a", "b"], "Site"))
    assert len(list(root.iter("path"))) == 2
    assert [tip.text for r in of_class(root, "hit") for tip in r] == ["a: 6 train, 2 test", "b: 3 train, 1 test"]


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 100.0), (37.2, 41.9), (99.9, 100.0), (0.0, 0.0), (1e-5, 3e-5), (2, 900)]
)
def test_axes_cover_their_range_with_few_steps(low, high):
    found = steps(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8
    assert found == sorted(set(found))


@pytest.mark.parametrize("last", [1, 2, 7, 30, 99, 1000, 12345])
def test_rounds_on_an_axis_are_whole_and_have_both_ends(last):
    found = whole_steps(1, last)
    assert found[0] == 1
    assert found[-1] == last
    assert len(found) <= 11


def test_labels_that_would_overlap_are_moved_apart_in_order():
    places = [50.0, 51.0, 49.0, 10.0, 90.0]
    found = spread(places, 15, 0, 100)
    order = sorted(range(len(places)), key=places.__getitem__)
    ranked = [found[i] for i in order]
    assert all(b - a >= 15 - 1e-9 for a, b in pairwise(ranked))
    assert min(found) >= 0
    assert max(found) <= 100
