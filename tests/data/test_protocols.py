"""What a data set's protocol sets: augmentation, loss, class weights and metric, recorded and never applied twice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

import fednorms
from fednorms.core.errors import BadInput
from fednorms.data import Federation, Preprocessing, Protocol, Site, Split
from fednorms.data.pack import pack
from fednorms.data.readers import READERS, isic
from fednorms.data.registry import federation
from fednorms.engines.graphs import Graphs
from fednorms.engines.loop import Loop
from fednorms.flower.agreement import Card, agreement, read_agreement
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session
from fednorms.transforms import CHAINS
from tests.engines.test_graphs_on_host import assert_same, play, setting
from tests.engines.test_graphs_on_host import federation as host_federation
from tests.support.layouts import class_folders, picture, table


def tiny(protocol=None, crop=None, size=8):
    generator = torch.Generator().manual_seed(0)

    def split(n):
        return Split(
            torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=generator), torch.arange(n) % 2
        )

    sites = [Site(name, name, split(8), split(4), split(4)) for name in "ab"]
    made = Preprocessing((0.5,), (0.25,), crop)
    return Federation("tiny", sites, ["cat", "dog"], made, protocol=protocol or Protocol())


def run(method, fed, **recipe):
    return fednorms.run(method, fed, rounds=1, recipe=Recipe(training={"batch_size": 4}, **recipe))


def weights(result):
    return torch.cat([t.flatten().double() for t in result._state.model.values()])


def test_a_run_augments_as_the_data_sets_protocol_says():
    plain, protocol = tiny(), tiny(Protocol("flip_rotate"))
    automatic = run("fedavg", protocol)
    by_hand = run("augment(chain=flip_rotate)", plain)
    assert torch.equal(weights(automatic), weights(by_hand))
    assert not torch.equal(weights(automatic), weights(run("fedavg", plain)))
    assert torch.equal(weights(run("fedavg", protocol, data={"augment": "none"})), weights(run("fedavg", plain)))
    assert torch.equal(weights(run("fedavg", plain, data={"augment": "flip_rotate"})), weights(by_hand))
    assert automatic.recipe.data.augment == "flip_rotate"
    assert automatic.method == "fedavg", "the method keeps its name"
    assert str(automatic._session.task.method) == "augment(chain='flip_rotate')"
    assert automatic.notes == ["from the data set's protocol: augmentation flip_rotate"]


def test_the_methods_own_augmentation_wins_and_nothing_is_augmented_twice():
    protocol = tiny(Protocol("flip_rotate"))
    own = run("augment(chain=flip) + fedbn", protocol)
    assert str(own._session.task.method) == "augment(chain='flip') + fedbn"
    assert own.recipe.data.augment == "none"
    assert torch.equal(weights(own), weights(run("augment(chain=flip) + fedbn", tiny())))
    with pytest.raises(BadInput, match=r'augmented twice: by data\.augment = "flip"'):
        run("augment(chain=flip)", protocol, data={"augment": "flip"})
    with pytest.raises(BadInput, match=r'"fliprotate" in data\.augment: did you mean "flip_rotate"'):
        Recipe.make({"data": {"augment": "fliprotate"}})


def test_protocol_settings_are_recorded_and_a_run_continues_with_them(tmp_path):
    path = pack(tiny(Protocol("crop_flip")), tmp_path / "tiny.fnpack")
    recipe = Recipe(method="fedbn", federation=f"pack:{path}", rounds=2, training={"batch_size": 4})
    whole = fednorms.run(recipe=recipe)

    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fednorms.run(recipe=recipe, out=tmp_path / "run", callback=stop)
    text = (tmp_path / "run" / "recipe.toml").read_text()
    assert 'augment = "crop_flip"' in text
    assert 'loss = "cross_entropy"' in text
    assert json.loads((tmp_path / "run" / "federation.json").read_text())["protocol"]["augment"] == "crop_flip"
    resumed = fednorms.resume(tmp_path / "run")
    assert torch.equal(weights(whole), weights(resumed))
    assert resumed.notes[0].endswith("augmentation crop_flip")
    again = fednorms.run(recipe=recipe, out=tmp_path / "run")
    assert torch.equal(weights(whole), weights(again)), "the same recipe finds its run again"


def test_loss_and_weights_belong_together():
    protocol = Protocol("none", "focal", (1.0, 3.0), "balanced_accuracy")
    taken = Recipe().adopting(protocol)
    assert (taken.loss, taken.class_weights, taken.metric) == ("focal", [1.0, 3.0], "balanced_accuracy")
    assert taken.adopting(Protocol()) == taken, "once written out, other data change nothing"
    other = Recipe(loss="cross_entropy").adopting(protocol)
    assert (other.loss, other.class_weights) == ("cross_entropy", "none"), "the weights are those of the focal loss"
    assert Recipe(class_weights="balanced").adopting(protocol).class_weights == "balanced"
    assert Recipe().adopting(Protocol()).metric == "accuracy"
    x, y = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([1, 0])
    loss = Session.open(Recipe(), tiny(protocol)).task.loss
    p = torch.tensor([0.5, 1 / (1 + torch.exp(torch.tensor(-1.0)))])
    assert torch.isclose(loss(x, y), (torch.tensor([3.0, 1.0]) * (1 - p) ** 2 * -p.log()).mean())
    with pytest.raises(BadInput, match="3 class weights for 2 classes"):
        tiny(Protocol(class_weights=(1, 2, 3)))
    with pytest.raises(BadInput, match='metric must be accuracy or balanced_accuracy, got "auc"'):
        Protocol(metric="auc")


def test_the_metric_chooses_the_best_validation_round():
    protocol = Protocol(metric="balanced_accuracy")
    fed = tiny(protocol)
    skewed = [replace(s, val=Split(s.val.x, torch.tensor([0, 0, 0, 1]))) for s in fed.sites]
    result = fednorms.run("fedavg", replace(fed, sites=skewed), rounds=4, lr=0.5)
    scores = {row["round"]: row["scores"][f"{result.headline}/val"] for row in result.history}
    assert result.best["val"] == max(s["balanced_accuracy"] for s in scores.values())
    assert "balanced accuracy" in repr(result)
    assert "judged by balanced accuracy" in result.notes[0]


# -- every data set -------------------------------------------------------------------------------------------------
def test_every_chain_a_reader_names_exists(tmp_path):
    root = class_folders(tmp_path / "PACS", ("art_painting", "cartoon", "photo", "sketch"), READERS_PACS, 12)
    named = {p: federation("pacs", root=root, protocol=p, size=4, complete=False).protocol.augment for p in PACS_OF}
    assert named == {"fednn": "feddyn", "greg": "flip_rotate", "greg-cross-device": "flip_rotate"}
    assert set(named.values()) - {"none"} <= set(CHAINS)


READERS_PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
PACS_OF = [p for p in READERS["pacs"].protocols if p != "official"]


def lesions(root, n=48):
    rows = [
        {"image": f"I{i:03d}", "target": i // 6 % 8, "center": i % 6, "fold": "test" if i // 6 % 4 == 0 else "train"}
        for i in range(n)
    ]
    table(root / "train_test_split", rows)
    for i in range(n):
        picture(root / "ISIC_2019_Training_Input" / f"I{i:03d}.jpg", 5 * i, (40, 30))
    return root


def test_fed_isic2019_is_the_papers_federation_in_one_call(tmp_path):
    root = lesions(tmp_path / "data")
    data = {"root": str(root), "complete": False, "size": 16}
    recipe = Recipe(federation="fed-isic2019", data=data, rounds=1, training={"batch_size": 4}, method="fedbn")
    result = fednorms.run(recipe=recipe, out=tmp_path / "run")
    session = result._session
    assert (result.recipe.loss, result.recipe.metric, result.recipe.data.augment) == (
        "focal", "balanced_accuracy", "isic",
    )  # fmt: skip
    assert result.recipe.class_weights == list(isic.WEIGHTS)
    assert session.federation.shape == (3, 16, 16)
    assert session.federation.stored_shape == (3, 17, 17)
    logits, y = torch.zeros(1, 8, dtype=torch.float64), torch.tensor([1])
    p = torch.tensor(1 / 8, dtype=torch.float64)
    assert torch.isclose(session.task.loss(logits, y), isic.WEIGHTS[1] * (1 - p) ** 2 * -p.log())
    # Commands after training use the same task, and read files at the stored size before the center crop.
    opened = fednorms.open_run(tmp_path / "run")
    assert str(opened.task.method) == "augment(chain='isic') + fedbn"
    assert (opened.facts.shape, opened.facts.stored_shape) == ((3, 16, 16), (3, 17, 17))
    scores = fednorms.evaluate_run(tmp_path / "run")
    assert scores
    Image.new("RGB", (17, 17), (90, 60, 30)).save(tmp_path / "new.png")
    [answer] = fednorms.predict(tmp_path / "run", [tmp_path / "new.png"], site="MSK")
    assert answer.label in isic.CLASSES
    assert "shades of grey" not in answer.note, "files are prepared as the training images were: nothing to say"
    fednorms.export(tmp_path / "run", tmp_path / "model", site="MSK")
    about = json.loads((tmp_path / "model" / "model.json").read_text())
    assert about["preprocessing"]["prepared"] == opened.facts.prepared, "an exported model carries its preparation"
    assert about["preprocessing"]["crop"]
    for label in isic.CLASSES[:2]:
        picture(tmp_path / "clinic" / label / "0.png", 9, (17, 17))
        picture(tmp_path / "clinic" / label / "1.png", 99, (17, 17))
    adapted = fednorms.adapt(tmp_path / "run", tmp_path / "clinic", tmp_path / "adapted", epochs=1)
    assert not any("prepare them" in note for note in adapted.notes)
    assert json.loads((tmp_path / "adapted" / "model.json").read_text())["shape"] == about["shape"] == [3, 16, 16]


def test_flower_sites_agree_on_the_protocol():
    fed = tiny(Protocol("flip", "focal", (1, 2)))
    one = replace(fed, sites=fed.sites[:1])
    card = Card.of(one, counts=False, order=0)
    assert Card.from_json(card.to_json()) == card
    other = Card.of(replace(one, protocol=Protocol()), counts=False, order=1)
    assert "protocol" in card.differs(other)
    assert read_agreement(agreement(card.facts)).protocol == fed.protocol


# -- engines --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["augment(chain=crop_flip)", "augment(chain=isic) + fedbn", "fedavg"])
def test_graph_engine_and_loop_agree(text):
    fed = replace(host_federation(), preprocessing=Preprocessing((0.5,), (0.5,), crop=6))
    task, loop = setting(Loop, text, fed=fed)
    other, graphs = setting(Graphs, text, fed=fed)
    assert_same(task, play(task, loop), play(other, graphs), loop, graphs)


@pytest.mark.parametrize("chain", CHAINS)
def test_every_chain_runs_in_graphs(chain):
    task, loop = setting(Loop, f"augment(chain={chain})")
    other, graphs = setting(Graphs, f"augment(chain={chain})")
    assert_same(task, play(task, loop, 2), play(other, graphs, 2), loop, graphs)


def test_a_network_sees_the_center_crop_and_shapes_agree(tmp_path):
    fed = tiny(crop=6)
    assert (fed.shape, fed.stored_shape) == ((3, 6, 6), (3, 8, 8))
    x = fed.sites[0].train.x[:]
    assert torch.equal(fed.preprocessing(x), replace(fed.preprocessing, crop=None)(x[..., 1:7, 1:7]))
    opened = federation(f"pack:{pack(fed, tmp_path / 'x.fnpack')}")
    assert (opened.shape, opened.stored_shape) == (fed.shape, fed.stored_shape)
    assert opened.fingerprint() == fed.fingerprint()
    with pytest.raises(BadInput, match="crops 9 pixels but the images are 3x8x8"):
        tiny(crop=9)
    with pytest.raises(BadInput, match="crop must be a positive number of pixels, got 0"):
        Preprocessing(crop=0)


def test_worker_processes_read_packs_and_augment_as_the_loop_does(tmp_path):
    path = pack(tiny(Protocol("isic"), crop=8, size=12), tmp_path / "tiny.fnpack", quality=90)
    recipe = Recipe(method="fedbn", federation=f"pack:{path}", rounds=1, training={"batch_size": 3})
    loop, workers = (
        fednorms.run(recipe=recipe.model_copy(update={"engine": engine, "workers": 2}))
        for engine in ("loop", "workers")
    )
    assert torch.equal(weights(loop), weights(workers))
    assert loop.scores().to_dict() == workers.scores().to_dict()
