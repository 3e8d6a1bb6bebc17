"""Runs whose server has images of its own: recorded, resumed, equal in every engine, refused where it is impossible."""

import math

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.round import broadcast, initial_state
from fednorms.engines.loop import Loop
from fednorms.engines.workers import Workers
from fednorms.explain.deployable import refuse_obstacles
from fednorms.explain.leaves import what_leaves
from fednorms.methods.registry import method
from tests.support.after import federation
from tests.support.engines import engine_of
from tests.support.tiny import same

SMALL = {"size": 8, "proxy": "0.1"}


def test_a_recipe_gives_the_server_images(tmp_path):
    recipe = fn.Recipe(data=SMALL, rounds=3)
    assert recipe == fn.Recipe(data={**SMALL, "proxy": 0.1}, rounds=3)
    assert fn.Recipe.from_toml(recipe.to_toml()) == recipe
    run = fn.run("fedlaw(epochs=1)", "digits-shift", recipe=recipe, out=tmp_path / "whole")
    assert math.isfinite(run.accuracy)
    fn.run("fedlaw(epochs=1)", "digits-shift", recipe=recipe, out=tmp_path / "part", rounds=1)
    again = fn.resume(tmp_path / "part", rounds=3)
    for one, other in zip(run.history, again.history, strict=True):
        assert {k: v for k, v in one.items() if "seconds" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k
        }
    files = [sorted((tmp_path / name / "checkpoints").glob("*3*/server.safetensors"))[0] for name in ("whole", "part")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_finished_run_needs_no_images_at_the_server(tmp_path):
    fn.run("fedlaw(epochs=1)", federation().with_proxy(0.25), rounds=1, out=tmp_path / "run")
    again = fn.evaluate_run(tmp_path / "run", federation=federation())
    assert math.isfinite(next(iter(again.values())).mean)


def test_without_images_the_run_says_what_to_do():
    with pytest.raises(BadInput, match=r"fedlaw learns from images at the server.*proxy="):
        fn.run("fedlaw", federation(), rounds=1)


def test_other_methods_train_without_these_images_and_say_so(tmp_path):
    run = fn.run("fedavg", federation().with_proxy(0.25), rounds=1, out=tmp_path / "run")
    assert "the method does not use the 10 images that the server has" in run.notes


def test_across_machines_it_is_refused_with_the_reason():
    with pytest.raises(BadInput, match="fedlaw learns from images at the server, and no image leaves a site"):
        refuse_obstacles(method("fedlaw"))


def test_workers_give_the_bits_of_the_loop_whatever_the_threads_outside():
    found = []
    for kind, threads in ((Loop, 1), (Workers, 2)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            task, engine = engine_of(kind, "fedlaw(epochs=2, batch_size=4)", doubles())
            state = engine.setup(initial_state(task))
            for _ in range(2):
                state = engine.average(state, engine.train(broadcast(task, state), engine.clients))
            engine.close()
        finally:
            torch.set_num_threads(before)
        found.append(state.model)
    assert same(*found)


def doubles():
    """The tiny federation; its images are scaled when they are used."""
    return federation(unseen=False)


def test_what_leaves_a_site_names_the_images():
    told = what_leaves("fedlaw")
    assert told.proxy == ("fedlaw",)
    assert not told.secure_aggregation
    assert "fedlaw needs labeled images at the server: a fraction of each site's training images" in repr(told)
    assert "every other image" in repr(told)
    assert "the server has labeled images" in repr(fn.describe("fedlaw"))
    assert "labeled images" not in repr(fn.describe("fedavg")) + repr(what_leaves("fedavg"))
