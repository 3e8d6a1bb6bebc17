"""Clients that take their steps together (stacks) give the loop's results, with the CPU as the device."""

from __future__ import annotations

import pytest

from fednorms.engines.base import PROVIDES
from fednorms.engines.graphs import Graphs
from fednorms.engines.loop import Loop
from fednorms.methods.registry import method, names
from tests.engines.test_graphs_on_host import COMBINATIONS, assert_same, federation, play, setting
from tests.support.engines import FITTING

ALIKE = federation((17, 17, 22, 17))  # three clients form stacks of two, the second of them half full


@pytest.mark.parametrize("text", [*names(), *COMBINATIONS])
def test_stacks_give_the_loops_results(text):
    text = FITTING.get(text, text)
    if any(p.requires - PROVIDES["graphs"] for p in method(text).parts):
        return
    task, fast = setting(Graphs, text, streams=2, together=2, fed=ALIKE)
    _, loop = setting(Loop, text, fed=ALIKE)
    assert_same(task, play(task, loop), play(task, fast), loop, fast)
    assert fast.stacks or task.twin or task.clients == 1
