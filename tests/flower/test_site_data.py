"""The recipe's options for data apply to a folder at a site, or are refused with a reason."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import fednorms as fn
from fednorms.core.preprocessing import Preprocessing
from fednorms.flower.settings import Deployment
from fednorms.flower.site import AT_THE_SITES, open_site

DEPLOYMENT = Deployment(sites="north,south", classes="benign,malignant")


@pytest.fixture
def folder(tmp_path):
    """Ten images of each class, of which the first two are equal, and a file that is not an image."""
    random = np.random.default_rng(0)
    for label in ("benign", "malignant"):
        (tmp_path / label).mkdir()
        for i in range(9):
            picture = Image.fromarray(random.integers(0, 255, (12, 16, 3), dtype=np.uint8))
            picture.save(tmp_path / label / f"p{i}.png")
        (tmp_path / label / "p9.png").write_bytes((tmp_path / label / "p0.png").read_bytes())
    return tmp_path


def opened(folder, **data):
    recipe = fn.Recipe(federation=AT_THE_SITES, data={"val": 0.1, "test": 0.3, **data})
    return open_site(recipe, DEPLOYMENT, {"site": "north", "data": str(folder)})


def images(federation):
    return sum(len(split) for split in federation.sites[0].splits.values())


def test_height_and_width(folder):
    assert opened(folder, size="12x16").shape == (3, 12, 16)


def test_a_subset_keeps_a_fraction_of_each_split(folder):
    whole, half = opened(folder), opened(folder, subset=0.5)
    for part, split in half.sites[0].splits.items():
        assert len(split) == pytest.approx(len(whole.sites[0].splits[part]) / 2, abs=1)


def test_copies_are_dropped(folder):
    assert images(opened(folder)) == 20
    assert images(opened(folder, copies="drop")) == 18


@pytest.mark.parametrize("seed", range(6))
def test_copies_stay_together(folder, seed):
    homes = {}
    for part, split in opened(folder, copies="together", seed=seed).sites[0].splits.items():
        for image in split.x:
            homes.setdefault(image.numpy().tobytes(), set()).add(part)
    assert all(len(parts) == 1 for parts in homes.values())


def test_normalization_reaches_the_card(folder):
    assert opened(folder, normalize="imagenet").preprocessing == Preprocessing.imagenet()


def test_broken_files_are_an_error_or_left_out(folder):
    (folder / "benign" / "torn.png").write_bytes(b"no image")
    with pytest.raises(fn.BadInput, match="torn"):
        opened(folder)
    made = opened(folder, skip_broken=True)
    assert images(made) == 20
    assert "torn.png" in made.source["left_out"][0]


@pytest.mark.parametrize(
    "data", [{"group_across": True}, {"hold_out": ["south"]}, {"proxy": "0.1"}, {"partition": "dirichlet(beta=1)"}]
)
def test_what_needs_several_sites_is_refused(folder, data):
    with pytest.raises(fn.BadInput, match=f"data.{next(iter(data))}, which cannot apply"):
        opened(folder, **data)
