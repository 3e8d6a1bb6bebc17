"""A federation in a notebook: its table, and images of every site and class."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fednorms as fn
from fednorms.data import Federation, Site, Split
from fednorms.data.show import _PIXELS


def flat(shade: float, labels: list[int]) -> Split:
    """Images of one shade per class: class c has shade + c / 10."""
    y = torch.tensor(labels)
    return Split((shade + y.view(-1, 1, 1, 1) / 10).expand(-1, 1, 8, 8).contiguous().float(), y)


@pytest.fixture
def federation():
    sites = [
        Site("north", "n", flat(0.1, [0, 1, 1])),
        Site("south", "s", flat(0.5, [1, 0, 0])),
        Site("new", "x", test=flat(0.8, [0])),
    ]
    return Federation("shades", sites, ["cat", "dog"])


def shown(figure):
    """The shade in the middle of every tile."""
    [image] = figure.axes[0].get_images()
    pixels = np.asarray(image.get_array())
    return pixels[_PIXELS // 2 :: _PIXELS, _PIXELS // 2 :: _PIXELS, 0]


def test_show_has_a_row_per_site_and_a_column_per_class(federation):
    pytest.importorskip("matplotlib")
    figure = federation.show()
    assert shown(figure) == pytest.approx(np.array([[0.1, 0.2], [0.5, 0.6], [0.8, 1.0]]))  # "new" has no dog: white
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["north", "south", "new"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_show_takes_names_of_sites_and_classes(federation):
    pytest.importorskip("matplotlib")
    assert shown(federation.show(sites=["south"], classes=["dog"])) == pytest.approx(np.array([[0.6]]))
    with pytest.raises(fn.BadInput, match='no class "dgo": did you mean "dog"'):
        federation.show(classes=["dgo"])
    with pytest.raises(fn.BadInput, match='no site "east"'):
        federation.show(sites=["east"])


def test_the_html_has_the_numbers_of_the_text(federation):
    html = federation._repr_html_()
    for word in ("north", "south", "1x8x8", "3 sites"):
        assert word in html
        assert word in repr(federation)
    assert html.count("<tr>") == 4


def test_many_sites_are_cut_short():
    many = Federation("many", [Site(f"s{k}", "d", flat(0.1, [0, 1])) for k in range(30)], ["cat", "dog"])
    assert "... and 10 more sites" in many._repr_html_()
    assert shown(many.show()).shape == (12, 2)
