"""One place assembles tasks: a session, an opened run and bare facts give the same one."""

from dataclasses import fields

import pytest
import torch

import fednorms as fn
from fednorms.data import Federation
from fednorms.data.facts import Facts
from fednorms.runs.assemble import assemble
from fednorms.runs.driver import execute
from fednorms.runs.option_names import command_line, flag, option
from fednorms.runs.session import Session
from fednorms.runs.use.open import open_run
from tests.support.after import federation, recipe


def settings(task):
    return {f.name: getattr(task, f.name) for f in fields(task) if f.name not in ("net", "loss")}


@pytest.mark.parametrize("method", ["fedavg", "centralised", "scaffold + fedbn"])
def test_facts_are_enough_for_the_task_of_a_session(method):
    session = Session.open(recipe(method, class_weights="balanced", participation="all"), federation())
    task = assemble(session.recipe, Facts.from_dict(session.facts.to_dict()))
    assert settings(task) == settings(session.task)
    assert task.net.initial.keys() == session.task.net.initial.keys()
    assert all(torch.equal(task.net.initial[k], t) for k, t in session.task.net.initial.items())
    logits, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 2])
    assert torch.equal(task.loss(logits, y), session.task.loss(logits, y))


def test_an_opened_run_and_its_session_share_one_task(tmp_path):
    data = federation()
    execute(recipe("fedbn", rounds=1), out=tmp_path / "run", federation=data)
    opened = open_run(tmp_path / "run", federation=data)
    assert opened.session.task is opened.task
    other = open_run(tmp_path / "run", federation=data.without("c"))
    assert other.session.task is not other.task
    assert (other.session.task.clients, other.task.clients) == (2, 3)


def test_a_model_by_name_takes_images_that_are_not_square_or_says_so():
    x, y = torch.zeros(4, 3, 32, 36), torch.tensor([0, 1, 0, 1])
    wide = Federation("wide", [fn.Site("a", "a", fn.Split(x, y))], ["cat", "dog"])
    assert assemble(fn.Recipe(model="cnn-small"), Facts.of(wide)).net.module(x.float()).shape == (4, 2)
    with pytest.raises(fn.BadInput, match=r'"wide" has 32x36.*size='):
        assemble(fn.Recipe(model="lenet"), Facts.of(wide))


def test_messages_name_options_as_the_interface_does():
    assert (option("hold_out"), flag("skip_broken")) == ("hold_out=", "skip_broken=True")
    with command_line():
        assert (option("hold_out"), flag("skip_broken")) == ("--hold-out", "--skip-broken")
    with pytest.raises(fn.BadInput, match="hold_out="):
        Session.open(recipe("fedavg", evaluate=["unseen"]), federation(unseen=False))
