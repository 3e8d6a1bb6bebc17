"""Every method that can be deployed gives the reference loop's result bit for bit, through Flower's messages."""

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

import importlib.util
from pathlib import Path

import torch
from flwr.app import Context, RecordDict

from fednorms.core.errors import BadInput
from fednorms.core.tree import Tree
from fednorms.data import Federation
from fednorms.engines.devices import repeatable
from fednorms.explain.deployable import obstacle
from fednorms.flower import messages
from fednorms.flower.project import read_project
from fednorms.flower.server import serve
from fednorms.methods.registry import load_all, method, names
from fednorms.runs.driver import execute
from tests.support.addressed import halfway
from tests.support.flower_in_process import (
    LocalGrid,
    config_of,
    nodes_for,
    reference,
    repeatable_form,
    run,
    same_result,
    travelled,
)

load_all()
SAMPLE = ["fedavg", "scaffold + fedbn", "hbn", "fedrdn", "fedfa + fednova", "ditto", "normbound(relative=0.5) + median"]
OTHERS = [repeatable_form(n) for n in names() if n not in SAMPLE and not obstacle(method(n))]
OTHERS += ["fednn(tau=0.02, freeze_on_saturation=true)"]


def equals_the_loop(text, folder, **changes):
    ours, _ = run(text, folder, **changes)
    same_result(ours, reference(config_of(text, folder, **changes), folder))


@pytest.mark.parametrize("text", SAMPLE)
def test_a_sample_equals_the_loop(text, tmp_path):
    equals_the_loop(text, tmp_path)


def test_what_is_for_one_site_equals_the_loop(tmp_path):
    with halfway() as part:
        equals_the_loop(f"{part.name} + scaffold", tmp_path, rounds=3, evaluate='["personal", "global"]')


@pytest.mark.slow
@pytest.mark.parametrize("text", OTHERS)
def test_every_other_method_equals_the_loop(text, tmp_path):
    equals_the_loop(text, tmp_path)


def test_partial_participation_momentum_and_balanced_classes_equal_the_loop(tmp_path):
    config = dict(
        deploy__sites="clean,faint,foggy",
        participation="fixed:2",
        rounds=3,
        class_weights="balanced",
        training__momentum=0.9,
        training__keep_momentum=True,
        evaluate='["global", "global/batch", "after_local"]',
    )
    ours, _ = run("scaffold", tmp_path, nodes=nodes_for("clean,faint,foggy"), **config)
    same_result(ours, reference(config_of("scaffold", tmp_path, **config), tmp_path))


@pytest.mark.parametrize("text", ["fedtan", "centralised", "scaffold + fedtan"])
def test_methods_that_need_all_data_or_joint_steps_are_refused_with_the_reason(text, tmp_path):
    with pytest.raises(BadInput, match=r"cannot run across machines: (fedtan takes steps|centralised moves the data)"):
        run(text, tmp_path)
    assert not (tmp_path / "run").exists()


def test_records_keep_names_order_shapes_dtypes_and_bits():
    tree = Tree(
        {
            "z.weight": torch.randn(3, 2).t(),
            "a/b": torch.tensor(7),
            "empty": torch.zeros(0, 4),
            "double": torch.randn(2, dtype=torch.float64) * 1e-300,
            "flags": torch.tensor([True, False]),
            "odd": torch.tensor([float("nan"), float("-inf"), -0.0]),
        }
    )
    record = messages.array_record(tree)
    back = messages.tree_of(record)
    assert list(back) == list(tree)
    for name, tensor in tree.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert back[name].is_contiguous()
        assert back[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes()


def test_only_what_is_exchanged_travels_after_the_first_message(tmp_path):
    seen = []

    class Watching(LocalGrid):
        def push_messages(self, sent):
            sent = list(sent)
            seen.extend((m.metadata.message_type, travelled(m).content) for m in sent)
            return super().push_messages(sent)

    config = config_of("fedbn", tmp_path)
    serve(Watching(config, tmp_path, nodes_for()), config)
    training = [content for kind, content in seen if kind == "train"]
    assert [messages.FIXED in content for content in training] == [True, True, False, False]
    assert not [n for content in training for n in content.array_records["model"] if "norm" in n]
    assert {k.split(".")[0] for k in training[0].array_records[messages.FIXED]} == {"norm1", "norm2", "norm3"}
    said = str([dict(content.config_records["about"]) for _, content in seen])
    assert "clean" not in said
    assert "faint" not in said  # a site learns nothing about another one


def test_the_example_with_custom_data_and_model(tmp_path):
    folder = Path(__file__).parents[2] / "examples" / "flower_app"
    spec = importlib.util.spec_from_file_location("my_app", folder / "my_app.py")
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    recipe, deployment = read_project(folder)
    config = {"recipe": recipe.to_toml(), "rounds": 2, "deploy.minimum": 3, "deploy.out": str(tmp_path / "run")}
    nodes = {7 + i: {"partition-id": i, "num-partitions": 3} for i in range(3)}
    grid = LocalGrid(config, tmp_path, nodes)
    grid.app = app.client
    ours = serve(grid, config, app.my_net)
    assert deployment.minimum == 2
    sites = [f"site {i}" for i in range(3)]
    parts = [app.my_site(Context(1, n, config, RecordDict(), {}), recipe) for n, config in nodes.items()]
    together = Federation("all", [p.sites[0] for p in parts], parts[0].classes, parts[0].preprocessing)
    with repeatable(1, recipe.seed):
        start = app.my_net()
    theirs = execute(recipe.model_copy(update={"rounds": 2}), federation=together, model=start)
    assert [s.name for s in together.sites] == sites
    same_result(ours, theirs)
