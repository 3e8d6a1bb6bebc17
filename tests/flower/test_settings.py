"""A Flower run config that cannot be read is explained."""

from __future__ import annotations

import pytest

from fednorms.core.errors import BadInput

settings = pytest.importorskip("fednorms.flower.settings")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"evaluate": "[global]"}, r'Cannot read evaluate = "\[global\]" in the run config as a list.*\["global"\]'),
        ({"evaluate": 100_000 * "["}, r"as a list.*JSON"),
        ({"recipe": "rounds ="}, "recipe in the run config is not valid TOML"),
        ({"recipe": "rounds = 3", "rounds.x": 1}, 'Key "rounds.x" in the run config is inside "rounds"'),
        ({"a" + 100_000 * ".a": 1}, "nested too deeply"),
        ({"rounds": 10**400}, "rounds must be an integer of at most 64 bits"),
    ],
)
def test_a_bad_value_is_explained(config, message):
    with pytest.raises(BadInput, match=message):
        settings.read(config)
