"""Images that the server itself holds: where they come from, and that no site keeps them."""

import numpy as np
import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.data import Federation, Site, Split
from fednorms.data.pack import pack
from fednorms.data.partition import partition
from tests.support.after import federation


def rows(split):
    """The images of a split, as a set."""
    return {x.numpy().tobytes() for x in split.x}


@pytest.mark.parametrize("share", [0.25, "0.25"])
def test_a_fraction_of_every_class_leaves_every_client(share):
    before = federation()
    after = before.with_proxy(share)
    left = [rows(s.train) for s in after.clients]
    taken = rows(after.proxy)
    for old, new, images in zip(before.clients, after.clients, left, strict=True):
        assert not images & taken
        assert len(old.train) - len(new.train) == round(len(old.train) / 4)
        assert rows(old.train) <= images | taken
        assert new.val is old.val
        assert new.test is old.test
    counts = torch.bincount(after.proxy.y)
    assert int(counts.max() - counts.min()) <= 1
    assert [s.name for s in after.unseen] == ["u"]


def test_the_fraction_depends_on_the_seed_and_not_on_other_sites():
    one, again, other = (federation().with_proxy(0.25, seed) for seed in (0, 0, 1))
    assert rows(one.proxy) == rows(again.proxy) != rows(other.proxy)
    fewer = federation().without("c").with_proxy(0.25)
    assert rows(fewer.site("a").train) == rows(one.site("a").train)


def test_patients_stay_together():
    y = torch.arange(40) % 2
    patients = np.array([f"p{i // 4}" for i in range(40)])
    split = Split(torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1), y, patients)
    made = Federation("one", [Site("a", "a", split)], ["x", "y"]).with_proxy(0.2)
    at_server, at_site = ({int(x) // 4 for x in s.x.flatten()} for s in (made.proxy, made.site("a").train))
    assert len(at_server) == 2
    assert not at_server & at_site


@pytest.mark.parametrize("name", ["b", "domain b", "u"])
def test_a_site_may_give_all_its_images(name):
    before, after = federation(), federation().with_proxy(name)
    who = name[-1]
    given = before.site(who).train or before.site(who).test
    assert torch.equal(after.proxy.x, given.x)
    assert sorted(s.name for s in after.sites) == sorted(set("abcu") - {who})


def test_test_images_of_a_site_that_is_held_out_do_not_become_the_servers():
    with pytest.raises(BadInput, match="b cannot both be held out and give the server its images"):
        federation().hold_out("b").with_proxy("b")
    assert [s.name for s in federation().hold_out("b").with_proxy("c").sites] == ["a", "b", "u"]


def test_the_server_may_have_images_of_its_own():
    own = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2, 0]))
    made = federation().with_proxy(own)
    assert made.proxy is own
    assert [len(s.train) for s in made.clients] == [12, 13, 16]
    with pytest.raises(BadInput, match="the server"):
        federation().with_proxy(Split(own.x, own.y + 3))
    with pytest.raises(BadInput, match="the server"):
        federation().with_proxy(Split(own.x[..., :4], own.y))


def test_the_fingerprint_covers_them_and_is_otherwise_unchanged():
    plain = federation()
    one, other = (plain.with_proxy(0.25, seed) for seed in (0, 1))
    own = [plain.with_proxy(Split(plain.site("a").train.x, plain.site("a").train.y + k)) for k in (0, 0)]
    assert len({f.fingerprint() for f in (plain, one, other, own[0])}) == 4
    assert own[0].fingerprint() == own[1].fingerprint()


def test_other_changes_keep_them():
    made = federation().with_proxy(0.25)
    for changed in (made.without("c"), made.hold_out("c"), made.pooled(), partition(made, "iid(clients=2)")):
        assert changed.proxy is made.proxy


@pytest.mark.parametrize(
    ("of", "says"),
    [("1.5", "fraction between 0 and 1"), ("0", "fraction between 0 and 1"), ("clinic", 'no site or domain "clinic"')],
)
def test_mistakes_are_named(of, says):
    with pytest.raises(BadInput, match=says):
        federation().with_proxy(of)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"proxy=0\.001 leaves no image for the server"):
        federation().with_proxy(0.001)
    made = federation().with_proxy(0.25)
    with pytest.raises(BadInput, match="has 10 images already"):
        made.with_proxy(0.25)
    with pytest.raises(BadInput, match="10 images to the server, which a pack cannot hold"):
        pack(made, tmp_path / "p.fnpack")
