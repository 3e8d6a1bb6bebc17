"""The combinations that the papers themselves use, by name."""

import pytest

from tests.support.tiny import play, same, tiny_data

USED = [
    # FedNN as a module of the optimization methods
    "scaffold + fednn",
    "scaffold(variant=feddc) + fednn",
    "feddyn + fednn",
    "feddyn(form=code) + fednn",
    "feddc + fednn",
    "feddc(variant=author) + fednn",
    "fedprox + fednn",
    # GReg on top of others
    "greg + fedprox",
    "greg + fedrdn",
    "greg + fedfa(after='pool')",
    "greg + fedplvm",
    # feature normalization
    "fedfn + scaffold",
    "fedfn + scaffold(variant=fedntd)",
    "fedfn + fedexp",
]
NULLS = ["fedprox(mu=0)", "fedavgm(beta=0)", "agc(clip=inf)", "fedfr(mu=0)", "greg(alpha=0, rho=1)"]
SETTINGS = {"momentum": 0.5, "weight_decay": 0.01, "clip": 10.0, "schedule": "exp"}


@pytest.mark.parametrize("text", USED)
def test_trains_two_rounds_with_part_of_the_clients(text):
    run = play(text, tiny_data(8, 6, 7), n=2, cohorts=["abc", "ac"], **SETTINGS)
    assert run.model.finite()
    assert all(tree.finite() for tree in run.server.parts.values())
    assert all(tree.finite() for state in run.states.values() for tree in state.parts.values())


def _pairs():
    for text in USED:
        for null in NULLS:
            if null.split("(")[0] not in [term.split("(")[0] for term in text.split(" + ")]:
                yield text, null


@pytest.mark.parametrize(("text", "null"), list(_pairs()))
def test_an_additional_neutral_part_changes_nothing(text, null):
    data = tiny_data(7, 6)
    alone = play(text, data, n=2, **SETTINGS)
    for both in (play(f"{text} + {null}", data, n=2, **SETTINGS), play(f"{null} + {text}", data, n=2, **SETTINGS)):
        assert same(alone.model, both.model)
        for name, state in alone.states.items():
            for p, tree in state.parts.items():
                assert same(tree, both.states[name].parts[p])


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("greg(alpha=0, rho=1) + fedrdn", "fedrdn"),
        ("greg(alpha=0, rho=1) + fedprox", "fedprox"),
        ("greg + fedprox(mu=0)", "greg"),
    ],
)
def test_the_neutral_half_of_a_pair_leaves_the_other(text, plain):
    data = tiny_data(7, 6)
    assert same(play(text, data, n=3, **SETTINGS).model, play(plain, data, n=3, **SETTINGS).model)
