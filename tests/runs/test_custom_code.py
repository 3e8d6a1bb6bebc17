"""Custom parts, models and losses: nothing is silently ignored, mixed up or lost."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import fednorms as fn
from fednorms.cli import main
from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.net import Net
from fednorms.core.norms import is_norm
from fednorms.core.part import REGISTRY, Part, Pass, Phase, Route, option, part
from fednorms.core.reductions import reduce_uploads
from fednorms.core.tree import Tree
from fednorms.data import from_arrays
from fednorms.engines.workers import Workers
from fednorms.engines.workers.auto import Auto
from fednorms.engines.workers.unguarded import unguarded_script
from fednorms.methods.registry import method
from fednorms.papers.tables.record import plain, same_run
from fednorms.papers.tables.table import Table
from fednorms.runs.identity import code_hash, model_hash, own_parts
from fednorms.runs.recipe import Recipe
from fednorms.runs.rounds import _TIE
from fednorms.runs.session import Session
from tests.support.tiny import TinyNet, close, play, rounds, same, tiny_data, tiny_net, tiny_task
from tests.support.waiting import HANG


@pytest.fixture(autouse=True)  # before any other fixture, which may also register parts
def tidy(parts_as_before):
    pass


def after(p, n=2, data=None):
    data = data or tiny_data()
    return rounds(tiny_task(Method((p,)), data), data, n).model


def images(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, 8, 8), generator=generator, dtype=torch.uint8), torch.arange(n) % 3


def sites():
    return from_arrays(
        {k: {"train": images(12, i), "test": images(6, i + 5)} for i, k in enumerate("ab")}, classes=list("xyz")
    )


# -- hooks that write into what they get -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["replace", "write", "new"])
@pytest.mark.parametrize("hook", ["server", "send", "stats"])
def test_a_hook_may_write_into_its_tree(hook, how):
    def halved(tree):
        if how == "new":
            return tree * 0.5
        for k in tree:
            if how == "replace":
                tree[k] = tree[k] * 0.5
            else:
                tree[k].mul_(0.5)
        return tree

    def server(self, delta, r):
        return halved(delta), r.mine

    def plain_hook(self, delta, view):
        return halved(delta)

    made = part("halving")(type("Halving", (Part,), {hook: server if hook == "server" else plain_hook}))
    once = after(made(), 1)
    start, average = tiny_net().state_dict(), play("fedavg", n=1).model
    moved = "running_mean" if hook == "stats" else "weight"
    for name in (k for k in average if k.endswith(moved)):
        close({name: once[name]}, {name: start[name] + 0.5 * (average[name] - start[name])})


HOOKS = ["server", "send", "stats", "finish", "grad", "decay", "loss", "oracle", "route"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_returns_nothing_is_named(hook):
    made = part("forgetful")(type("Forgetful", (Part,), {hook: lambda self, *views: None}))
    with pytest.raises(BadInput, match=f"forgetful: {hook} must return .*got NoneType"):
        after(made(), 1)


def test_a_term_of_the_loss_is_one_number():
    made = part("vector")(type("Vector", (Part,), {"loss": lambda self, s: s.logits.mean(1)}))
    with pytest.raises(BadInput, match=r"vector: loss must return one number.*got a tensor of \(\d+,\)"):
        after(made(), 1)


def test_a_plan_that_loses_draws_is_named():
    made = part("fresh")(type("Fresh", (Part,), {"plan": lambda self, phases, c: [Phase()]}))
    data = tiny_data()
    with pytest.raises(BadInput, match=r"asked for batch number 1 .*of a step that has 1"):
        rounds(tiny_task(Method((REGISTRY["perfedavg"](), made())), data), data, 1)


def test_what_a_part_did_not_ask_for_is_an_error_and_not_empty():
    @part("greedy")
    class Greedy(Part):
        def finish(self, e):
            return Tree(e.mean_grad), Tree()

    with pytest.raises(BadInput, match="Set uses_mean_gradient"):
        after(Greedy(), 1)

    @part("evener")
    class Evener(Part):
        def server(self, delta, r):
            return r.even, r.mine

    with pytest.raises(BadInput, match=r"`even` .* Set uses_even_mean"):
        after(Evener(), 1)
    Evener.uses_even_mean = True
    assert same(after(Evener(), 1), after(Evener(), 1))


def test_passes_that_cannot_be_combined_are_refused():
    job = Pass("before", client=lambda local: (Tree(), Tree()), server=lambda up, r: r.mine)

    @part("twice")
    class Twice(Part):
        def passes(self):
            return [job, replace(job, when="after")]

    with pytest.raises(BadInput, match="twice has 2 passes before or after training"):
        Method((Twice(),))

    @part("torn")
    class Torn(Part):
        uploads = True
        reduction = "sum"

        def passes(self):
            return [replace(job, reduce="uniform")]

        def finish(self, e):
            return e.mine, Tree()

    with pytest.raises(BadInput, match="torn reduces what its pass sends by uniform and what finish sends by sum"):
        Method((Torn(),))


def test_a_phase_without_steps_is_refused():
    for wrong in ({"epochs": 0}, {"steps": 0}, {"draws": 0}, {"epochs": -1}):
        with pytest.raises(BadInput, match=">= 1"):
            Phase(**wrong)


# -- what clients send -----------------------------------------------------------------------------------------------


def test_counts_are_summed_and_averaged_as_numbers():
    rows = [Tree(n=torch.tensor([20, 1]), w=torch.tensor(1.0)), Tree(n=torch.tensor([13, 2]), w=torch.tensor(4.0))]
    assert reduce_uploads(rows, [1.0, 1.0], "sum")["n"].tolist() == [33, 3]
    assert reduce_uploads(rows, [1.0, 3.0], "weighted")["n"].tolist() == [14.75, 1.75]
    assert reduce_uploads(rows, [1.0, 3.0], "uniform")["n"].tolist() == [16.5, 1.5]
    assert reduce_uploads(rows, [1.0, 1.0], "sum")["w"].item() == 5.0


@pytest.mark.parametrize("how", ["sum", "weighted", "uniform", "stack"])
@pytest.mark.parametrize("missing", [0, 1])
def test_entries_that_some_clients_do_not_send_are_refused(how, missing):
    rows = [Tree(a=torch.ones(1), b=torch.ones(1)), Tree(a=torch.ones(1), b=torch.ones(1))]
    del rows[missing]["b"]
    with pytest.raises(BadInput, match=rf'do not send the same entries \(b\).*"{how}"'):
        reduce_uploads(rows, [1.0, 1.0], how)
    assert set(reduce_uploads(rows, [1.0, 1.0], "grouped")) == {"a", "b"}


def test_the_part_whose_uploads_differ_is_named():
    @part("shy")
    class Shy(Part):
        uploads = True

        def finish(self, e):
            return e.mine, Tree() if e.context.client == "a" else Tree(x=torch.ones(1))

    with pytest.raises(BadInput, match=r"shy: Clients 1 and 2 .* do not send the same entries"):
        after(Shy(), 1)


# -- names -----------------------------------------------------------------------------------------------------------


def test_what_is_replaced_twice_is_still_changed():
    @part("undecided")
    class Undecided(Part):
        def server(self, delta, r):
            for k in list(delta):
                delta[k] = delta[k] * 0.5
                delta[k] = delta[k] * 0.0
            return delta, r.mine

    model = after(Undecided(), 1)
    start = tiny_net().state_dict()
    assert all(torch.equal(model[k], start[k]) for k in ("conv.weight", "head.weight"))


def test_a_run_from_before_a_key_was_added_is_continued(tmp_path):
    model = tiny_net(0, torch.float32)
    fn.run("fedavg", sites(), model, 1, out=tmp_path / "r")
    file = tmp_path / "r" / "recipe.toml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith(("group =", "[own_parts]"))]
    file.write_text("\n".join(lines) + "\n")
    assert fn.resume(tmp_path / "r", federation=sites(), model=model).rounds == 1


def test_names_of_the_library_and_of_other_code_are_refused():
    for name in ("fedprox", "fedwon", "fedavg"):
        with pytest.raises(BadInput, match=f'The name "{name}" is taken'):
            part(name)(type("Mine", (Part,), {}))
    first = part("mine")(type("First", (Part,), {}))
    with pytest.raises(BadInput, match=r'The name "mine" is taken by .*First'):
        part("mine")(type("Second", (Part,), {}))
    again = part("mine")(type("First", (Part,), {}))  # a notebook cell, run again
    assert REGISTRY["mine"] is again
    with pytest.raises(BadInput, match='The name "mine" was redefined after this instance was created'):
        method(first())


@pytest.mark.parametrize("name", ["Upper", "with-dash", "two words", "", "1st"])
def test_names_that_cannot_be_written_as_text_are_refused(name):
    with pytest.raises(BadInput, match="lowercase letters"):
        part(name)


def test_blanks_in_an_option_stay():
    @part("spoken")
    class Spoken(Part):
        says: str = option("")

    assert method(str(Spoken(says="a  b"))).parts == (Spoken(says="a  b"),)
    assert str(method("fedbn\n  + fedfn")) == "fedbn + fedfn"


def test_custom_parts_work_on_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_parts_of_a_test.py").write_text(
        "import fednorms as fn\n@fn.part('slower')\nclass Slower(fn.Part):\n"
        "    def server(self, delta, r): return 0.5 * delta, r.mine\n"
    )
    monkeypatch.chdir(tmp_path)
    given = ["run", "--method", "slower", "--size", "8", "--rounds", "1", "--model", "cnn-small", "--out", "r"]
    assert main(given) == 2
    monkeypatch.setenv("FEDNORMS_METHODS", "my_parts_of_a_test")
    assert main(given) == 0
    monkeypatch.setenv("FEDNORMS_METHODS", "no_such_module")
    assert main(["list", "methods"]) == 2
    assert 'names the module "no_such_module"' in capsys.readouterr().err


# -- the same run, or another ----------------------------------------------------------------------------------------


def _losses():
    return (lambda z, y: nn.functional.cross_entropy(z, y)), (lambda z, y: 2 * nn.functional.cross_entropy(z, y))


def test_hashes_tell_code_and_weights_apart():
    one, two = _losses()
    assert code_hash(one) != code_hash(two)
    assert code_hash(one) == code_hash(_losses()[0])
    a, b = tiny_net(0), tiny_net(1)
    assert model_hash(a) == model_hash(tiny_net(0)) != model_hash(b)
    other = tiny_net(0)
    other.pool = nn.AdaptiveMaxPool2d(2)  # the same tensors, another function
    assert model_hash(other) != model_hash(a)
    other = tiny_net(0)
    other.norm.momentum = 0.5  # not visible in any tensor
    assert model_hash(other) != model_hash(a)


class Weighted:
    """A loss with its own number."""

    def __init__(self, by):
        self.by = by

    def __call__(self, z, y):
        return self.by * nn.functional.cross_entropy(z, y)

    def as_method(self, z, y):
        return self(z, y)


def _closed(by):
    def loss(z, y):
        return by * nn.functional.cross_entropy(z, y)

    return loss


@pytest.mark.parametrize(
    "make",
    [
        lambda k: partial(_closed, k),
        lambda k: nn.CrossEntropyLoss(label_smoothing=k / 10),
        Weighted,
        lambda k: Weighted(k).as_method,
        _closed,
        lambda k: nn.CrossEntropyLoss(weight=torch.full((3,), float(k))),
    ],
)
def test_losses_are_distinguished_by_the_values_they_hold(make):
    assert code_hash(make(1)) == code_hash(make(1)) != code_hash(make(2))


def test_functions_that_call_each_other_have_a_hash():
    def even(z, n=4):
        return z if n == 0 else odd(z, n - 1)

    def odd(z, n=3):
        return -z if n == 0 else even(z, n - 1)

    assert code_hash(even) == code_hash(even) != code_hash(odd)


def test_hashes_do_not_depend_on_the_process():
    text = (
        "from fednorms.runs.identity import code_hash, model_hash; import torch; from torch import nn\n"
        "torch.manual_seed(0); m = nn.Sequential(nn.Linear(2, 2)); m.act = lambda x: x\n"
        "print(code_hash(lambda n: n in {'alpha', 'beta', 'gamma'}), model_hash(m))"
    )
    here = str(Path(fn.__file__).parents[1])
    said = set()
    for seed in "12":
        env = {**os.environ, "PYTHONPATH": here, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert len(said) == 1


def test_a_run_of_another_model_or_loss_is_not_taken_for_this_one(tmp_path):
    model, (one, two) = tiny_net(0, torch.float32), _losses()
    first = fn.run("fedavg", sites(), model, 1, loss=one, out=tmp_path / "r")
    again = fn.run("fedavg", sites(), tiny_net(0, torch.float32), 1, loss=one, out=tmp_path / "r")
    assert same(first.model().state_dict(), again.model().state_dict())
    with pytest.raises(BadInput, match=r"(?s)another recipe.*TinyNet@.*seed torch before you build one"):
        fn.run("fedavg", sites(), tiny_net(1, torch.float32), 1, loss=one, out=tmp_path / "r")
    with pytest.raises(BadInput, match=r"(?s)another recipe.*<lambda>@"):
        fn.run("fedavg", sites(), model, 1, loss=two, out=tmp_path / "r")
    with pytest.warns(UserWarning, match="other first weights than the run began with"):
        fn.resume(tmp_path / "r", federation=sites(), model=tiny_net(1, torch.float32), loss=one)
    with pytest.raises(BadInput, match="made with another custom model"):
        fn.resume(tmp_path / "r", federation=sites(), model=Twice(), loss=one)
    with pytest.raises(BadInput, match="made with another custom loss"):
        fn.resume(tmp_path / "r", federation=sites(), model=model, loss=two)
    with pytest.raises(BadInput, match="another recipe"):
        fn.compare(["fedavg"], sites(), tiny_net(1, torch.float32), 1, seeds=1, out=fn_compare(tmp_path, model))


def fn_compare(tmp_path, model):
    fn.compare(["fedavg"], sites(), model, 1, seeds=1, out=tmp_path / "c")
    return tmp_path / "c"


def _shrink(by):
    body = {"server": eval(f"lambda self, delta, r: ({by} * delta, r.mine)")}  # other code under the same name
    return part("shrinking")(type("Shrinking", (Part,), body))


def test_a_run_of_a_part_whose_code_has_changed_is_not_continued(tmp_path):
    first = _shrink(0.5)
    fn.run(first(), sites(), tiny_net(0, torch.float32), 1, out=tmp_path / "r")
    stored = plain(fn.Recipe(method="shrinking").resolved())
    assert list(stored["own_parts"]) == ["shrinking"]
    assert same_run(stored, fn.Recipe(method="shrinking"))
    second = _shrink(0.25)
    assert own_parts(method(second())) != stored["own_parts"]
    assert not same_run(stored, fn.Recipe(method="shrinking"))
    with pytest.raises(BadInput, match="another recipe"):
        fn.run(second(), sites(), tiny_net(0, torch.float32), 1, out=tmp_path / "r")
    with pytest.raises(BadInput, match="The code of shrinking has changed since this run began"):
        fn.resume(tmp_path / "r", federation=sites(), model=tiny_net(0, torch.float32))


def test_compare_takes_model_and_data_from_the_recipe():
    recipe = fn.Recipe(model="lenet", rounds=1, data={"size": 32, "test": 0.8, "val": 0.1})
    found = fn.compare(["fedavg"], seeds=1, recipe=recipe)
    assert "lenet" in " ".join(found.about.values())
    with pytest.raises(BadInput, match="no-such-place"):
        fn.compare(["fedavg"], seeds=1, recipe=fn.Recipe(federation="no-such-place"))


def test_the_earlier_of_two_equal_rounds_is_the_best():
    one_order, other_order = 0.39583333333333326, 0.39583333333333337  # with the same sum
    assert other_order <= one_order + _TIE
    assert 57 / 144 + _TIE < 58 / 144


# -- models ----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A network in which the layer called fc is not the classifier."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.fc, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.relu(self.fc(self.norm(self.conv(x)).mean((2, 3)))))


def test_a_layer_that_does_not_return_the_logits_is_not_the_classifier():
    with pytest.raises(BadInput, match=r'Layer "fc" .* has 8 outputs, not 3. Name the layer .* with head='):
        fn.run("fedper", sites(), Odd(), 1)
    assert Net(Odd(), method("fedper"), head=["out"]).probe((3, 8, 8), 3) is False


def test_groups_of_one_value_are_refused():
    def vectors(channels):
        return nn.Sequential(nn.Flatten(), nn.Linear(192, channels), nn.BatchNorm1d(channels), nn.Linear(channels, 3))

    for channels in (8, 32):
        with pytest.raises(BadInput, match="groups of one value each"):
            fn.run("gn", sites(), vectors(channels), 1)
    fn.run("gn", sites(), vectors(64), 1)
    fn.run("gn(groups=2)", sites(), vectors(8), 1)


class Twice(TinyNet):
    """A network that uses its norm twice."""

    def forward(self, x):
        x = self.conv(x)
        return self.head(self.pool(self.norm(x + 5) + self.norm(x - 5)).flatten(1))


def test_a_layer_that_is_called_twice_shows_all_its_inputs():
    net = Net(Twice(), method("fedavg"))
    x = torch.rand(4, 3, 8, 8)
    with net.watching(is_norm) as seen, torch.no_grad():
        net.forward(net.initial.clone(), x, train=False, batch_statistics=True)
        maps = net.module.conv(x)
    (found,) = seen.values()
    assert torch.allclose(found, torch.cat([maps + 5, maps - 5]), atol=1e-6)


class Counting(TinyNet):
    """A network with its own running mean."""

    def __init__(self, persistent=True, rebind=False):
        super().__init__()
        self.rebind = rebind
        self.register_buffer("ema", torch.zeros(()), persistent=persistent)

    def forward(self, x):
        if self.training:
            new = 0.9 * self.ema + 0.1 * x.mean() + 0.1
            if self.rebind:
                self.ema = new.detach()
            else:
                self.ema.copy_(new.detach())
        return super().forward(x - self.ema)


def test_state_that_would_leak_or_be_lost_is_refused():
    with pytest.raises(BadInput, match=r'changes its buffer "ema" .*persistent=False'):
        fn.run("fedavg", sites(), Counting(persistent=False), 1)
    with pytest.raises(BadInput, match=r'its buffer "ema" by a new tensor.*copy_'):
        fn.run("fedavg", sites(), Counting(rebind=True), 1)
    assert fn.run("fedavg", sites(), Counting(), 1).model().ema > 0


def test_a_buffer_at_the_root_is_not_a_layer_of_greg():
    fn.run("greg", sites(), Counting(), 1)


class Resting(TinyNet):
    """A network that keeps its norm in eval mode and frozen, as fine-tuning often does."""

    def __init__(self):
        super().__init__()
        self.norm.running_mean.fill_(0.5)
        self.norm.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def test_a_norm_that_the_model_keeps_in_eval_mode_stays_so():
    model = fn.run("fedavg", sites(), Resting(), 2).model()
    assert model.norm.running_mean.tolist() == [0.5] * 4
    moved = fn.run("fedavg", sites(), TinyNet(), 2).model()
    assert moved.norm.running_mean.abs().sum() > 0


class Tied(nn.Module):
    """A network whose classifier shares its weight with a layer of the body."""

    def __init__(self):
        super().__init__()
        self.mid, self.fc = nn.Linear(3, 3), nn.Linear(3, 3)
        self.fc.weight = self.mid.weight

    def forward(self, x):
        return self.fc(torch.relu(self.mid(x.mean((2, 3)))))


def test_a_weight_that_is_also_the_classifiers_is_the_classifiers():
    routes = Net(Tied(), method("fedper")).routes
    assert routes["mid.weight"] is routes["fc.bias"] is Route.LOCAL
    assert routes["mid.bias"] is Route.SHARED


class Unseen(TinyNet):
    """A network that uses its classifier's weights and never calls it."""

    def forward(self, x):
        maps = self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1)
        return nn.functional.linear(maps, self.head.weight, self.head.bias)


class Several(TinyNet):
    """A network that returns a dictionary."""

    def forward(self, x):
        return {"logits": super().forward(x)}


@pytest.mark.parametrize(("model", "words"), [(Unseen, "does not call its classifier"), (Several, "AttributeError")])
def test_models_that_cannot_be_used_are_refused(model, words):
    with pytest.raises(BadInput, match=words):
        fn.run("fedavg", sites(), model(), 1)


# -- tables ----------------------------------------------------------------------------------------------------------


def test_adapted_models_have_no_best_round():
    values = {
        "paper": "p",
        "label": "l",
        "title": "t",
        "selection": "best-val",
        "settings": [{"name": "a", "columns": {"Tuned": "mean@adapted"}}],
        "rows": [{"name": "one", "method": "fedavg + finetune"}],
    }
    with pytest.raises(BadInput, match='column "Tuned": adapted models are tested only in the last round'):
        Table.make(values)
    assert Table.make(values | {"selection": "last"}).rows


# -- a run is not continued with other code ---------------------------------------------------------------------------
OWN = """
import torch
from torch import nn
import fednorms as fn

SCALE = {scale}
SEEN = []

def strength(step):
    return SCALE * {factor}

class Layer(nn.Identity):
    def forward(self, x):
        return x * {layer}

@fn.part("reaching")
class Reaching(fn.Part):
    def surgery(self, model, head):
        model.extra = Layer()
        return None
    def grad(self, g, s):
        SEEN.append(1)
        return g * strength(s)
"""


def test_code_that_a_part_uses_is_part_of_its_hash(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(number, **values):
        """The same names in a file of another name: only the text matters."""
        REGISTRY.pop("reaching", None)
        (tmp_path / f"own{number}.py").write_text(OWN.format(**{"scale": 1.0, "factor": 1, "layer": 1} | values))
        module = __import__(f"own{number}")
        before = code_hash(module.Reaching)
        module.SEEN.append(2)  # what a run fills in is not code
        assert code_hash(module.Reaching) == before
        return before

    same_text = {hashed(0), hashed(1)}
    assert len(same_text) == 1
    others = [hashed(2, scale=0.0), hashed(3, factor=2), hashed(4, layer=2)]
    assert len({*same_text, *others}) == 4


def test_a_run_that_failed_before_its_first_round_can_be_started_again(tmp_path):
    @part("mended")
    class Wrong(Part):
        def grad(self, g, s):
            return None

    with pytest.raises(Exception, match="grad"):
        fn.run("mended", sites(), rounds=1, model="cnn-small", out=tmp_path / "run")
    REGISTRY.pop("mended")

    @part("mended")
    class Right(Part):
        def grad(self, g, s):
            return g

    assert fn.run("mended", sites(), rounds=1, model="cnn-small", out=tmp_path / "run").rounds == 1


@pytest.mark.parametrize(("guard", "found"), [("pass", True), ('if __name__ == "__main__":\n    pass', False)])
def test_a_script_that_processes_would_run_again_starts_none(guard, found, tmp_path, monkeypatch):
    script = tmp_path / "mine.py"
    script.write_text(guard)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    assert unguarded_script() == (str(script) if found else "")
    opened = []
    monkeypatch.setattr(Workers, "start", lambda self: opened.append(1))
    session = Session.open(Recipe.make({"method": "fedavg", "rounds": 9, "federation": "custom:x"}), sites())
    engine = session.engine
    assert isinstance(engine, Auto)
    engine.worth_starting, engine.workers.count, engine.times["loop"] = 0.0, 2, [1.0, 1.0]
    engine._choose(1.0, 2, 8)
    assert bool(opened) is not found
    assert any("mine.py has no" in note for note in engine.notes) is found


def test_an_unknown_method_says_where_custom_ones_are_found(tmp_path, monkeypatch, capsys):
    assert main(["describe", "nowheretobefound"]) == 2
    assert "FEDNORMS_METHODS=mymodule" in capsys.readouterr().err
    monkeypatch.setenv("FEDNORMS_METHODS", "mine.py")
    assert main(["describe", "fedavg"]) == 2
    assert "without .py" in capsys.readouterr().err
    (tmp_path / "broken.py").write_text("def (:")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDNORMS_METHODS", "broken")
    assert main(["describe", "fedavg"]) == 2
    assert 'names the module "broken"' in capsys.readouterr().err


def test_declarations_and_names_of_hooks_are_checked():
    with pytest.raises(BadInput, match=r"reduction must be one of 'weighted'.*got 'average'"):

        @part("averaging")
        class Averaging(Part):
            reduction = "average"

    with pytest.raises(BadInput, match="got 'sizes'"):

        @part("sizing")
        class Sizing(Part):
            weighting = "sizes"

    with pytest.warns(UserWarning, match='gradient is not a hook.*did you mean "grad"'):

        @part("misspelt")
        class Misspelt(Part):
            def gradient(self, g, s):
                return g

            def strength(self):
                return 1.0

    assert "averaging" not in REGISTRY
