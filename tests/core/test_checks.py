"""Mistakes in custom parts: the error names part, hook, what was expected and found, the same in every engine."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import nn

import fednorms as fn
from fednorms.cli import main
from fednorms.core.error_origin import culprit, place
from fednorms.core.errors import BadInput, Diverged
from fednorms.core.method import Method
from fednorms.core.part import REGISTRY, Eval, Part, Pass, Phase, part
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.tree import Tree
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.graphs import Graphs
from fednorms.engines.loop import Loop
from fednorms.engines.workers.pool import _portable
from fednorms.layers import is_batchnorm, swap
from fednorms.methods.registry import load_all, method
from tests.support.engines import engine_of
from tests.support.tables import table
from tests.support.tiny import play, tiny_data, tiny_net


@pytest.fixture(autouse=True)  # before any other fixture, which may also register parts
def tidy(parts_as_before):
    pass


def own(**hooks):
    return part("own")(type("Own", (Part,), hooks))()


def returning(hook, value):
    """A part whose hook returns this function of the hook's arguments."""
    if hook in ("protect", "release"):
        how = fn.Privacy(**{"protect": lambda update, e: update, hook: value})
        return own(privacy=lambda self: how)
    return own(**{hook: lambda self, *given: value(*given)})


def federation():
    generator = torch.Generator().manual_seed(0)

    def images(n):
        return Split(torch.rand(n, 3, 8, 8, generator=generator, dtype=torch.float64), torch.arange(n) % 3)

    sites = [Site(name, name, train=images(16), test=images(8)) for name in "ab"]
    return Federation("tiny", sites, list("xyz"), Preprocessing())


def two_rounds(kind, p):
    task, engine = engine_of(kind, Method((p,)), federation())
    state = engine.setup(initial_state(task))
    for _ in range(2):
        state = server_update(task, state, engine.train(broadcast(task, state), ["a", "b"]).uploads)


def said(p, kinds=(Loop, Graphs), error=BadInput):
    """The error that every engine raises for a part."""
    texts = []
    for kind in kinds:
        with pytest.raises(error) as caught:
            two_rounds(kind, p)
        texts.append(str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


def job(when, client=lambda local: (Tree(), Tree()), server=lambda up, r: r.mine):
    return [Pass(when, client, server)]


one = torch.ones(())
WRONG = {  # hook, what it returns, and how the error ends
    "init-number": ("init", lambda w: 0.0, "two Trees, .* got float. Return fn.Tree"),
    "init-one": ("init", lambda w: w.zeros(), "two Trees, .* got Tree"),
    "init-numbers": ("init", lambda w: (0.0, 0.0), "two Trees, .* got float and float"),
    "init-entry": ("init", lambda w: (Tree(n=1.0), Tree()), 'got float as the entry "n". Make a tensor of it'),
    "finish-number": ("finish", lambda e: 1.0, "two Trees, .* got float. Return e.mine"),
    "finish-entry": ("finish", lambda e: (e.mine, Tree(n=3)), 'got int as the entry "n"'),
    "server-number": ("server", lambda d, r: 1.0, "two Trees, the update and the new state, got float. Return delta"),
    "server-entries": (
        "server",
        lambda d, r: (Tree(dict.fromkeys(d, 0.0)), r.mine),
        'float as the entry "conv.weight"',
    ),
    "server-dicts": ("server", lambda d, r: (dict(d), {}), "got dict and dict"),
    "down-number": ("down", lambda mine: 1.0, "a Tree, .* got float. Return fn.Tree"),
    "down-entry": ("down", lambda mine: Tree(n=1.0), 'got float as the entry "n"'),
    "begin-nothing": ("begin", lambda m, b: None, "the model, .* got NoneType. Return model"),
    "begin-some": ("begin", lambda m, b: m.pick(["conv.weight"]), "got a Tree without conv.bias, norm.weight"),
    "begin-shape": ("begin", lambda m, b: Tree({**m, "conv.bias": one}), r'a tensor of \(\) as the entry "conv.bias"'),
    "begin-more": ("begin", lambda m, b: Tree({**m, "conv.wait": one}), 'did you mean "conv.weight"'),
    "plan-nothing": ("plan", lambda phases, c: None, "a list of Phases, got NoneType. Return phases"),
    "plan-one": ("plan", lambda phases, c: phases[0], "a list of Phases, got Phase"),
    "plan-numbers": ("plan", lambda phases, c: [1], "a list of Phases, got int in it"),
    "plan-decay": ("plan", lambda phases, c: [Phase(weight_decay=0.1)], "only phases of `evaluation` may"),
    "plan-plain": ("plan", lambda phases, c: [Phase(plain=True)], "only phases of `evaluation` may"),
    "path-list": ("path", lambda c: [1], "a value that can be hashed, got int"),
    "objective-nothing": ("objective", lambda s: None, "one number as a tensor, got NoneType. Return its mean"),
    "objective-number": ("objective", lambda s: 1.0, "one number as a tensor, got float"),
    "objective-vector": ("objective", lambda s: s.logits.mean(1), r"one number as a tensor, got a tensor of \(8,\)"),
    "objective-cut": ("objective", lambda s: s.logits.mean().detach(), "a number with a gradient, got one that"),
    "batch-images": ("batch", lambda x, y, s: x, r"images and labels, got a tensor of \(8, 3, 8, 8\). Return x, y"),
    "batch-two": ("batch", lambda x, y, s: x[:2], r"images and labels, got a tensor of \(2, 3, 8, 8\)"),
    "batch-label": ("batch", lambda x, y, s: (x, 1), "and int. Return x, y"),
    "batch-fewer": ("batch", lambda x, y, s: (x[1:], y), "got 7 images with 8 labels"),
    "batch-flat": ("batch", lambda x, y, s: (x.flatten(1), y), r"got images of \(8, 192\) and float64 for \(8, 3"),
    "batch-type": ("batch", lambda x, y, s: (x.float(), y), "and float32 for .* Keep the axes, the channels"),
    "passes-one": ("passes", lambda: job("before")[0], r"a list of Passes, got Pass. Return \[fn.Pass"),
    "passes-words": ("passes", lambda: ["before"], "a list of Passes, got str in it"),
    "surgery-model": ("surgery", lambda m, h: m, "a list of Changes, or None, got TinyNet. Change the model in place"),
    "surgery-words": ("surgery", lambda m, h: ["conv"], "a list of Changes, or None, got str in it"),
    "oracle-number": ("oracle", lambda f, s: lambda w, draw: 1.0, "gives a gradient, a Tree, got float"),
    "grad-name": (
        "grad",
        lambda g, s: Tree({**g, "nope": one}),
        'the gradient, a Tree, got an entry "nope".* Leave it',
    ),
    "grad-mean": ("grad", lambda g, s: g.map(torch.mean), r"a tensor of \(\) as the entry .* shape .*\(4, 3, 3, 3\)"),
    "grad-row": ("grad", lambda g, s: g.map(lambda t: t[:1]), r"a tensor of \(1, 3, 3, 3\) as the entry"),
    "decay-mean": ("decay", lambda s: s.params.map(torch.mean), r'a tensor of \(\) as the entry "conv.weight"'),
    "send-mean": ("send", lambda d, e: d.map(torch.mean), r'the update, .*a tensor of \(\) as the entry "conv.weight"'),
    "server-mean": ("server", lambda d, r: (d.map(torch.mean), r.mine), r'a tensor of \(\) as the entry "conv.weight"'),
    "server-more": ("server", lambda d, r: (Tree({**d, "nope": one}), r.mine), 'got an entry "nope".* Leave it out'),
    "server-type": ("server", lambda d, r: (d.map(lambda t: t + 0j), r.mine), "complex128 .* which is float64 in"),
    "stats-more": ("stats", lambda d, r: Tree({**d, "nope": one}), "it may return norm.running_mean"),
    "privacy-words": ("privacy", lambda: "private", r"a Privacy, or None, got str. Return fn.Privacy"),
    "protect-nothing": ("protect", lambda u, e: None, "the update, a Tree, got NoneType"),
    "release-mean": ("release", lambda u, r: u.map(torch.mean), r'a tensor of \(\) as the entry "conv.weight"'),
    "evaluation-nothing": ("evaluation", lambda: None, "an Eval, got NoneType"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_return_value_of_a_hook_is_reported(case):
    hook, value, words = WRONG[case]
    assert re.search(f"^own: {hook} must return .*{words}.*[.]$", said(returning(hook, value)))


@pytest.mark.parametrize("when", ["setup", "before", "after"])
def test_a_wrong_return_value_of_a_pass_is_reported(when):
    text = said(own(passes=lambda self: job(when, client=lambda local: 1.0)))
    assert text.startswith("own: client of a pass must return two Trees, what is kept and what is sent, got float.")
    text = said(own(passes=lambda self: job(when, server=lambda up, r: 1.0)))
    assert text.startswith("own: server of a pass must return the server's new state, a Tree, got float.")


def test_names_and_shapes_are_checked_in_every_phase():
    def plan(self, phases, c):
        return [Phase(train="head"), Phase(train="body")]

    def grad(self, g, s):
        return g if "head.weight" in g else g.map(torch.mean)

    assert 'own: grad must return the gradient, a Tree, got a tensor of () as the entry "conv.weight"' in said(
        own(plan=plan, grad=grad)
    )


def test_an_object_that_is_not_a_federation_is_reported():
    with pytest.raises(BadInput, match="own: arrange must return a Federation, got NoneType"):
        fn.run(returning("arrange", lambda f: None), federation(), model=tiny_net(), rounds=1)


def none(logits, y):
    return None


def vector(logits, y):
    return nn.functional.cross_entropy(logits, y, reduction="none")


def cut(logits, y):
    return nn.functional.cross_entropy(logits.detach(), y)


@pytest.mark.parametrize(
    ("loss", "words"), [(none, "got NoneType"), (vector, r"got a tensor of \(4,\)"), (cut, "with a gradient, got one")]
)
def test_a_custom_loss_must_return_one_number(loss, words):
    with pytest.raises(BadInput, match=rf'^The loss "{loss.__name__}" must return .*{words}'):
        play("fedavg", n=1, loss=loss)
    base = returning("objective", lambda s: s.base(s.logits, s.y))
    if loss is not cut:  # a part that only passes it on is not named
        with pytest.raises(BadInput, match=rf'^The loss "{loss.__name__}" must return one number as a tensor, {words}'):
            play(Method((base,)), n=1, loss=loss)


def test_undeclared_uploads_with_privacy_are_reported():
    talker = own(finish=lambda self, e: (e.mine, Tree(n=one)))
    text = r"own: finish or a pass sends its own tensors \(n\), which dplocal does not protect.*uploads = True"
    with pytest.raises(BadInput, match=text):
        play(talker + method("dplocal"), n=1)


# -- what is not finite ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hook", ["server", "stats", "release"])
def test_a_server_step_that_is_not_finite_names_the_server(hook):
    spoil = {"server": lambda d, r: (d * float("nan"), r.mine)}.get(hook, lambda d, r: d * float("inf"))
    text = said(returning(hook, spoil), error=Diverged)
    assert text.startswith(f"The server's step of round 1 is not finite: own ({hook})")
    assert "Client" not in text


def test_a_server_state_that_is_not_finite_is_reported():
    p = own(
        init=lambda self, w: (w.zeros(), Tree()),
        down=lambda self, mine: mine,
        server=lambda self, d, r: (d, d * float("nan")),
        grad=lambda self, g, s: g + s.down,
    )
    text = said(p, error=Diverged)
    assert 'Client "a" diverged in round 2, step 1: own (grad) is not finite, as what the server sent to it' in text
    assert "own (server)" in text


def test_initial_weights_that_are_not_finite_are_reported():
    model = tiny_net()
    nn.init.constant_(model.norm.weight, float("nan"))
    with pytest.raises(
        Diverged, match=r'server sent in round 1 is not finite \(first "norm.weight"\), before any client'
    ):
        play("fedavg", n=1, model=model)


@pytest.mark.parametrize("hook", ["batch", "objective"])
def test_the_hook_that_is_not_finite_is_named(hook):
    spoil = {
        "batch": lambda x, y, s: (x * float("inf"), y),
        "objective": lambda s: s.base(s.logits, s.y) * float("nan"),
    }
    text = said(returning(hook, spoil[hook]), error=Diverged)
    assert f'Client "a" diverged in round 1, step 1: own ({hook}) is not finite' in text


# -- surgery ---------------------------------------------------------------------------------------------------------
def test_surgery_that_breaks_a_model_is_distinguished_from_images_that_do_not_fit():
    wider = returning("surgery", lambda m, h: swap(m, is_batchnorm, lambda bn, name: nn.BatchNorm2d(5)))
    text = said(wider)
    assert text.startswith("own: after its surgery (norm: BatchNorm2d(4) -> BatchNorm2d(5)), and not before, model")
    assert "cannot take images of 3x8x8" in text
    more = returning("surgery", lambda m, h: swap(m, nn.Linear, lambda old, name: nn.Linear(16, 7)))
    assert "own: after its surgery (head: Linear(16, 3) -> Linear(16, 7))" in (text := said(more))
    assert "must have the same dtype" in text
    assert "Give new layers the channels, dtype and device" in text
    more = returning("surgery", lambda m, h: swap(m, nn.Linear, lambda old, name: nn.Linear(16, 7).to(old.weight)))
    assert "returns outputs of shape (2, 7)" in said(more)
    innocent = returning("surgery", lambda m, h: swap(m, is_batchnorm, lambda bn, name: nn.GroupNorm(2, 4)))
    with pytest.raises(BadInput, match=r'^Model "TinyNet" cannot take images of 1x8x8'):
        fn.describe(innocent, tiny_net(), shape=(1, 8, 8))


# -- objects that are not parts, methods or models -------------------------------------------------------------------
class Bare:
    def grad(self, g, s):
        return g


class Unnamed(Part):
    def grad(self, g, s):
        return g


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Bare(), "got Bare. A custom class derives from fn.Part"),
        (Bare, "got the class Bare. A custom class derives from fn.Part"),
        (Unnamed(), r'Unnamed has no name. Put @fn.part\("unnamed"\) above its class'),
        (Unnamed, r"method: Unnamed is a class. Pass an instance of it, Unnamed\(...\)"),
        ([], "expected text, a Method or a part, got an empty list"),
    ],
)
def test_an_object_that_is_not_a_method_is_reported(given, words):
    for use in (method, fn.run, lambda m: fn.compare([m]), fn.describe):
        with pytest.raises(BadInput, match=words):
            use(given)


def test_a_class_that_is_not_a_part_is_reported():
    with pytest.raises(
        BadInput, match=r'Part "bare": Bare is not a subclass of fn.Part. Write `class Bare\(fn.Part\):`'
    ):
        part("bare")(Bare)
    assert "bare" not in REGISTRY


def test_parts_and_methods_add_up_either_way():
    p, fedbn = own(grad=lambda self, g, s: g), method("fedbn")
    assert str(p + fedbn) == "own + fedbn"
    assert str(fedbn + p) == "fedbn + own"
    assert p + fedbn.parts[0] == p + fedbn
    with pytest.raises(BadInput, match=r'text cannot be added. Write fednorms.method\("own \+ fedbn"\)'):
        p + "fedbn"


def test_a_class_instead_of_a_model_or_a_loss_is_reported():
    model = r"model: Flatten is a class. Pass an instance of it, Flatten\(...\), or a name"
    for use in (fn.run, lambda m, **options: fn.compare([m], **options), fn.describe):
        with pytest.raises(BadInput, match=model):
            use("fedavg", model=nn.Flatten)
    with pytest.raises(BadInput, match=r"a name or an nn.Module, got int"):
        fn.run("fedavg", model=3)
    with pytest.raises(BadInput, match="loss: CrossEntropyLoss is a class"):
        fn.run("fedavg", loss=nn.CrossEntropyLoss)


# -- exceptions in custom code ---------------------------------------------------------------------------------------
CRASHING = """
import fednorms as fn

def divided(n):
    return n / 0

@fn.part("crashing")
class Crashing(fn.Part):
    def grad(self, g, s):
        return g * divided(1)
"""
PLACE = 'ZeroDivisionError: division by zero, in part "crashing", hook grad (crashing_part_of_a_test.py, line 5)'


@pytest.fixture
def crashing(tmp_path, monkeypatch):
    (tmp_path / "crashing_part_of_a_test.py").write_text(CRASHING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "crashing_part_of_a_test", raising=False)
    monkeypatch.setenv("FEDNORMS_METHODS", "crashing_part_of_a_test")
    load_all()


@pytest.mark.usefixtures("crashing")
def test_tables_name_part_hook_file_and_line_of_an_exception(tmp_path):
    compared = fn.compare(["crashing"], federation(), tiny_net(dtype=torch.float32), rounds=1, seeds=1)
    assert f"crashing, seed 0 failed: {PLACE}" in compared.remarks()
    folder = table(tmp_path / "mini", change=('method = "fedbn"', 'method = "crashing"'))
    done = fn.reproduce(folder, out=tmp_path / "out", device="cpu", only=["FedBN"])
    assert done.failed == {"shift / FedBN, seed 0": PLACE}


@pytest.mark.usefixtures("crashing")
def test_a_traceback_ends_with_part_and_hook():
    with pytest.raises(ZeroDivisionError) as caught:
        main(["run", "--method", "crashing", "--size", "8", "--rounds", "1", "--out", "r"])
    assert caught.value.__notes__ == [f"Arose in {PLACE.partition(', in ')[2]}"]
    assert place(_portable(caught.value)) == PLACE.partition(", in ")[2]


def test_exceptions_outside_of_parts_are_located_in_the_users_files():
    def lost(logits, y):
        raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        play("fedavg", n=1, loss=lost)
    assert re.fullmatch(r".*lost \(test_checks.py, line \d+\)", place(caught.value))
    assert culprit(caught.value) is None
    assert place(ValueError()) == ""


def test_an_exception_in_the_librarys_own_parts_is_located_too():
    with pytest.raises(AttributeError) as caught:
        method("fedprox").parts[0].loss(None)
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # without this test
    assert re.fullmatch(r'part "fedprox", hook loss \(fedprox.py, line \d+\)', place(caught.value))


def test_rules_of_evaluation_are_still_accepted():
    assert method("fedavg").evaluation() == Eval()
    assert play(own(evaluation=lambda self: Eval()) + method("fedavg"), tiny_data(8), n=1).model
