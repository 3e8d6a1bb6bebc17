"""Successive halving, budgets and remarks: properties on made-up scores."""

import random
from itertools import product

import pytest

from fednorms.advice.arms import Question, propose
from fednorms.advice.budget import Budget, cost, schedule
from fednorms.advice.remarks import at_edge, remarks, still_rising
from fednorms.advice.tournament import Played, Rung, Trial, ladder, tournament


def trials(arms, rates):
    return [Trial(a, a, {"lr": r}) for a, r in product(arms, rates)]


def play_by(score):
    def play(jobs, rounds):
        return [Played(t, seed, rounds, score(t, seed, rounds)) for t, seed in jobs]

    return play


@pytest.mark.parametrize("number", range(20))
def test_a_trial_that_is_best_all_along_wins(number):
    r = random.Random(number)
    field = trials("abcdef", (1, 2, 3))
    quality = {t.name: r.random() for t in field}
    rungs = ladder(r.randint(1, 30), 6, 3, range(r.randint(1, 3)))
    done = tournament(field, rungs, play_by(lambda t, seed, rounds: quality[t.name] + rounds))
    assert done[-1].ranking[0][0].name == max(quality, key=quality.get)


@pytest.mark.parametrize(
    ("rounds", "arms", "rates", "seeds"), [(1, 2, 1, 1), (2, 9, 3, 3), (30, 1, 4, 2), (9, 4, 3, 1)]
)
def test_rungs_grow_in_rounds_and_shrink_in_trials(rounds, arms, rates, seeds):
    rungs = ladder(rounds, arms, rates, range(seeds))
    assert rungs[-1].rounds == rounds
    assert len(rungs[-1].seeds) == seeds
    assert [r.rounds for r in rungs] == sorted(r.rounds for r in rungs)
    assert [r.trials for r in rungs] == sorted((r.trials for r in rungs), reverse=True)
    assert rungs[0].trials == arms * rates
    assert all(r.seeds[0] == rungs[0].seeds[0] for r in rungs)


def test_each_rung_plays_only_what_it_has_room_for():
    asked = []

    def play(jobs, rounds):
        asked.append(([t.name for t, _ in jobs], rounds))
        return [Played(t, seed, rounds, sum(map(ord, t.name)) % 7) for t, seed in jobs]

    rungs = [Rung(1, 6, 3), Rung(2, 3, 1), Rung(4, 2, 1, (0, 1))]
    tournament(trials("abc", (1, 2)), rungs, play)
    assert [len(names) for names, _ in asked] == [6, 3, 4]
    assert len({name.partition(",")[0] for name in asked[1][0]}) == 3


def test_what_fails_is_out_and_all_failing_ends_it():
    field = trials("ab", (1,))
    done = tournament(field, [Rung(1, 2, 1), Rung(2, 2, 1)], play_by(lambda t, s, r: None if t.arm == "a" else 0.1))
    assert [t.arm for t, _ in done[-1].ranking] == ["b"]
    done = tournament(field, [Rung(1, 2, 1), Rung(2, 2, 1)], play_by(lambda t, s, r: None))
    assert len(done) == 1
    assert done[0].ranking == []


def test_a_seed_that_fails_counts_against_a_trial():
    done = tournament(trials("ab", (1,)), [Rung(1, 2, 1, (0, 1))], play_by(lambda t, s, r: None if t.arm == s else 0.5))
    assert len(done[0].ranking) == 2
    bad = play_by(lambda t, s, r: None if (t.arm, s) == ("a", 1) else 0.5)
    assert [t.arm for t, _ in tournament(trials("ab", (1,)), [Rung(1, 2, 1, (0, 1))], bad)[0].ranking] == ["b"]


def test_played_survives_its_dictionary():
    played = Played(Trial("a", "fedavg", {"lr": 0.1}), 1, 4, 0.5, [(2, 0.4), (4, 0.5)], {"x": (3, 6)}, 1.5, "")
    assert Played.from_dict(played.to_dict()) == played


@pytest.fixture(scope="module")
def arms():
    question = Question("cnn-small", classes=10, shape=(3, 8, 8), sites=5, rounds=20)
    return propose(question, {}, {"fedavg": 1.0, "ditto": 2.0, "gn": 3.0}, ["fedavg", "ditto", "gn"]).arms


@pytest.mark.parametrize("budget", [0, 1, 5, 17, 40, 90, 200, 1000, 10_000])
def test_a_schedule_keeps_its_budget(arms, budget):
    chosen = schedule(arms, budget, rounds=20)
    spent = {}  # by brute force: the dearest trials always survive
    passes = {arm.name: arm.passes for arm in chosen.arms}

    def play(jobs, rounds):
        for t, seed in jobs:
            spent[t.name, seed] = rounds * passes[t.arm]
        return [Played(t, seed, rounds, passes[t.arm]) for t, seed in jobs]

    tournament([Trial(a.name, a.method, {"lr": r}) for a in chosen.arms for r in a.rates], chosen.rungs, play)
    assert sum(spent.values()) <= chosen.cost + 1e-9 <= budget + 1e-9 or not chosen.rungs
    assert cost(chosen.arms, chosen.rungs) == pytest.approx(chosen.cost)


def test_a_small_budget_drops_the_arm_of_which_least_is_expected(arms):
    chosen = schedule(arms, 13, rounds=20)
    assert [arm.name for arm in chosen.arms] == ["fedavg", "ditto"]
    assert list(chosen.left_out) == ["gn"]
    assert not schedule(arms, 2, rounds=20).rungs
    assert len(schedule(arms, 10_000, rounds=20).rungs[-1].seeds) == 3


def test_minutes_become_rounds():
    assert Budget.of_minutes(2, seconds=0.5).rounds == 240
    assert Budget.of_minutes(2, seconds=0.5, jobs=3).rounds == 720


def test_remarks_name_edges_and_rising_curves():
    assert at_edge({"lr": 0.1, "how": "a"}, {"lr": [0.03, 0.1, 0.3], "how": ["a", "b"]}) == []
    assert at_edge({"lr": 0.3}, {"lr": [0.3]}) == []
    assert still_rising([(t, t / 10) for t in range(1, 9)])
    assert not still_rising([(1, 0.5)])
    said = remarks(Trial("fedbn", "fedbn", {"lr": 0.3}), {"lr": [0.1, 0.3]}, [(1, 0.1), (4, 0.9)])
    assert "edge" in said[0]
    assert "rises" in said[1]
