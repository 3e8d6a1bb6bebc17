"""The site decides: what its policy does not allow is refused with the reason, and class counts stay where they are."""

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

import json
import tomllib
from pathlib import Path

from fednorms.cli import main
from fednorms.core.errors import BadInput, RunFailed
from fednorms.explain.leaves import COUNTED, what_leaves
from fednorms.flower.policy import Policy
from fednorms.flower.settings import Deployment
from fednorms.runs.recipe import Recipe
from tests.flower.test_deploy import INIT, images
from tests.support.flower_in_process import config_of, reference, run, same_result

QUICK = {"rounds": 1, "training__steps": 2, "deploy__wait": 1.0}


def policy_file(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "site.toml").write_text(text)
    return str(folder / "site.toml")


def nodes(policy=""):
    return {100: {"site": "clean", "policy": ""}, 101: {"site": "faint", "policy": policy}}


RECIPE, TWO = Recipe(method="dplocal(clip=2.0, noise=0.5) + silobn"), Deployment(minimum=2)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({}, []),
        ({"parts": ["dplocal", "silobn"]}, []),
        ({"parts": ["dplocal"]}, ["silobn is not one of its parts"]),
        ({"parts": []}, ["dplocal is not one of its parts", "silobn is not one of its parts"]),
        ({"require": ["dplocal"]}, []),
        ({"require": ["gn"]}, ["gn is required"]),
        ({"options": {"dplocal": {"noise": {"at_least": 0.5}, "clip": {"at_most": 2.0}}}}, []),
        ({"options": {"dplocal": {"clip": {"at_most": 1.0}}}}, ["this site allows only clip at most 1"]),
        ({"options": {"dplocal": {"draws": {"one_of": ["system"]}}}}, ["this site allows only draws one of 'system'"]),
        ({"minimum_sites": 2}, []),
        ({"minimum_sites": 3}, ["a round counts with 2 sites, this site allows only 3 or more"]),
        ({"statistics": False}, []),
        ({"epsilon": 3.0}, []),
    ],
)
def test_what_a_policy_objects_to(policy, said):
    found = Policy.make(policy, "p").objections(RECIPE, TWO)
    assert len(found) == len(said)
    assert all(text in objection for text, objection in zip(said, found, strict=True))


@pytest.mark.parametrize(
    ("method", "policy", "said"),
    [
        ("fedavg", {"statistics": False}, "model sends statistics of the images"),
        ("gn", {"statistics": False}, ""),
        ("fedrdn + gn", {"statistics": False}, "fedrdn sends statistics of the images"),
        ("fedproto", {}, "fedproto sends images per class"),
        ("fedproto", {"class_counts": True}, ""),
        ("fedavg", {"epsilon": 3.0}, "epsilon is limited, which needs dplocal"),
        ("dpcentral + gn", {"epsilon": 3.0}, "epsilon is limited, which needs dplocal"),
        ("dplocal(draws=seeded) + gn", {"require": ["dplocal"]}, "noise of the seed can be computed by everybody"),
        ("fedwon", {"parts": ["fedwon"]}, ""),
        ("fedavg", {"parts": []}, ""),
    ],
)
def test_what_a_policy_objects_to_in_a_method(method, policy, said):
    found = Policy.make(policy, "p").objections(Recipe(method=method), TWO)
    assert said in "; ".join(found)
    assert bool(found) == bool(said)


def test_a_site_imports_no_code_that_a_run_names():
    (said,) = Policy().objections(Recipe(model="antigravity:Net"), Deployment())
    assert 'model "antigravity:Net" names code to import' in said
    for model in ("cnn-small", "torchvision:resnet18", "timm:resnet18", "custom:mine"):  # the last is handed over
        assert not Policy().objections(Recipe(model=model), Deployment())


def test_the_number_of_sites_that_the_server_claims_counts_too():
    policy = Policy(minimum_sites=2)
    assert policy.objections(RECIPE, TWO, clients=2) == []
    assert policy.objections(RECIPE, TWO, clients=1) != []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class_count = true", 'unknown key "class_count": did you mean "class_counts"?'),
        ('class_counts = "yes"', "class_counts: input should be a valid boolean, got 'yes'"),
        ('parts = ["fedproxx"]', 'Unknown method "fedproxx": did you mean "fedprox"?'),
        ("[options.dplokal]\nnoise = {at_least = 1.0}", 'unknown part "dplokal" in options: did you mean "dplocal"?'),
        ("[options.dplocal]\nnose = {at_least = 1.0}", 'dplocal has no option "nose": did you mean "noise"?'),
        ("[options.dplocal]\nnoise = {more_than = 1.0}", "options.dplocal.noise.more_than"),
        ("epsilon = -1.0", "epsilon: input should be greater than 0, got -1.0"),
        ("epsilon =", "is not valid TOML"),
    ],
)
def test_a_mistake_in_a_policy_is_an_error(text, said, tmp_path):
    with pytest.raises(BadInput) as error:
        Policy.of({"policy": policy_file(tmp_path, text)})
    assert said in str(error.value)
    assert "site.toml" in str(error.value)


def test_a_policy_that_is_missing_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="Cannot read the policy"):
        Policy.of({"policy": str(tmp_path / "none.toml")})
    monkeypatch.setenv("FEDNORMS_POLICY", policy_file(tmp_path, "scores = false"))
    assert not Policy.of({}).scores
    monkeypatch.delenv("FEDNORMS_POLICY")
    assert Policy.of({}) == Policy()


def test_a_site_refuses_a_run_before_it_says_anything_about_its_data(tmp_path):
    told = []

    def listen(site, message, reply):
        told.append((site, message.metadata.message_type, dict(reply.content["about"])))
        return reply

    ours, _ = run("scaffold", tmp_path, nodes=nodes(policy_file(tmp_path, 'parts = ["fedbn"]')), fault=listen, **QUICK)
    said = "This site's policy refuses the run: scaffold is not one of its parts."
    assert ours.history[0]["lost"] == {"faint": "not connected", "node 101": said}
    assert [(kind, list(words)) for site, kind, words in told if site == "faint"] == [
        ("query.hello", ["error", "reason"])
    ]


def test_a_server_that_skips_the_greeting_is_refused_too(tmp_path):
    """The policy changes while the run goes on: the next message is judged by the new one."""
    path = policy_file(tmp_path, "")

    def fault(site, message, reply):
        if site == "faint":
            policy_file(tmp_path, 'require = ["dplocal"]')
        return reply

    ours, _ = run("fedavg", tmp_path, nodes=nodes(path), fault=fault, **QUICK)
    assert ours.history[0]["lost"] == {"faint": "This site's policy refuses the run: dplocal is required."}


def test_class_counts_leave_no_site_that_does_not_allow_it(tmp_path):
    seen = []

    def listen(site, message, reply):
        seen.extend((site, label, dict(r)) for label, r in reply.content.metric_records.items() if label != "metrics")
        if "card" in reply.content["about"]:
            assert json.loads(reply.content["about"]["card"])["counts"] == []
        return reply

    given = {**QUICK, "evaluate": '["global", "after_local"]'}
    policy = policy_file(tmp_path, "class_counts = true")
    ours, _ = run("fedavg", tmp_path, nodes=nodes(policy), fault=listen, **given)
    assert {site: len(score["recall"]) for site, _, score in seen} == {"clean": 0, "faint": 10}
    assert {label for _, label, _ in seen} == {"after_local", "global/global/test", "global/global/val"}
    sites = ours.history[0]["scores"]["global/global/test"]["sites"]
    assert sites["clean"]["recall"] == []
    theirs = reference(config_of("fedavg", tmp_path, **given), tmp_path).history[0]["scores"]["global/global/test"]
    for name, score in sites.items():  # everything else is as in the loop
        assert score == theirs["sites"][name] | {"recall": score["recall"]}


def test_balanced_weights_need_class_counts(tmp_path):
    with pytest.raises(RunFailed, match='class_weights = "balanced" asks for images per class; class_counts is false'):
        run("fedavg", tmp_path, nodes=nodes(), class_weights="balanced", **QUICK)


def test_a_site_that_tells_no_scores_still_trains(tmp_path):
    policy = policy_file(tmp_path, "scores = false\nclass_counts = true")
    ours, _ = run("fedavg", tmp_path, nodes={100: {"site": "clean"}, 101: {"site": "faint", "policy": policy}}, **QUICK)
    assert "lost" not in ours.history[0]
    assert list(ours.history[0]["scores"]["global/global/test"]["sites"]) == ["clean"]
    theirs = reference(config_of("fedavg", tmp_path, **QUICK), tmp_path)
    assert all((a == b).all() for a, b in zip(ours._state.model.values(), theirs._state.model.values(), strict=True))


def test_messages_are_counted_on_the_sites_disk(tmp_path):
    """Training and testing of a round are two messages of different rounds; a repeated run asks again."""
    path = policy_file(tmp_path, "messages_per_round = 1\nclass_counts = true")
    both = {100: {"site": "clean"}, 101: {"site": "faint", "policy": path}}
    ours, _ = run("fedavg", tmp_path, nodes=both, **QUICK)
    same_result(ours, reference(config_of("fedavg", tmp_path, **QUICK), tmp_path))
    again, _ = run("fedavg", tmp_path, nodes=both, deploy__out=str(tmp_path / "again"), **QUICK)
    said = "This site answers 1 message per round, and this is message 2 for the model after 0 rounds."
    assert again.history[0]["lost"] == {"faint": said}


def test_check_reports_what_the_policy_refuses(tmp_path, capsys):
    assert main(["deploy", "init", str(tmp_path / "p"), *INIT, "--method", "fedavg"]) == 0
    check = ["deploy", "check", str(tmp_path / "p"), "--site", "north", "--data", str(images(tmp_path / "north"))]
    capsys.readouterr()
    assert main([*check, "--policy", policy_file(tmp_path, 'require = ["dplocal"]\nminimum_sites = 3')]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "This site's policy refuses the run: dplocal is required; a round counts with 2 sites" in said
    assert main([*check, "--policy", policy_file(tmp_path, "statistics = true")]) == 0
    assert "allows what the project asks for" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("method", "counts"), [("fedavg", True), ("fedavg", False), ("dplocal(noise=0.1) + gn", False)]
)
def test_the_audit_lists_every_key_of_a_sites_messages(method, counts, tmp_path):
    """What `describe --privacy` says that a site tells, and the keys of all its replies, are the same."""
    seen, needed = set(), {"card", "site", "kept"}  # which say who answers, and the round that the server knows

    def listen(site, message, reply):
        for record in (*reply.content.config_records.values(), *reply.content.metric_records.values()):
            seen.update(key for key in record if key not in needed and record[key] != [])
            if "card" in record:
                seen.update(key for key, value in json.loads(record["card"]).items() if value != [])
        return reply

    allowed = policy_file(tmp_path, f"class_counts = {str(counts).lower()}")
    both = {100: {"site": "clean", "policy": allowed}, 101: {"site": "faint", "policy": allowed}}
    more = {"class_weights": "balanced", "evaluate": '["global", "after_local"]'} if counts else {}
    run(method, tmp_path, nodes=both, fault=listen, **more, **QUICK)
    said = {key for told in what_leaves(method).told for key in told.keys if told is not COUNTED or counts}
    assert seen == said


def test_the_documented_policy_is_a_policy_that_sets_every_key():
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    policy = Policy.make(tomllib.loads(text), "docs/privacy.md")
    assert set(tomllib.loads(text)) == set(Policy.model_fields)
    assert policy.objections(Recipe(method="dplocal + fedbn"), Deployment(minimum=3)) == []
    assert len(policy.objections(Recipe(method="dplocal(noise=0.1) + fedavg"), Deployment(minimum=3))) == 2
