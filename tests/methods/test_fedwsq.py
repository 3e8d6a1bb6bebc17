"""FedWSQ: weight standardization, and updates quantized for a normal distribution.

Next to the authors' quantizer (github.com/Seongyeol-kim/FedWSQ) the largest difference of a weight is 0.
"""

import math
from itertools import pairwise

import pytest

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.methods.fedwsq import LEVELS
from tests.support.tiny import close, play, tiny_data, tiny_net

SENT = "conv.weight"


def density(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("bits", LEVELS)
def test_each_level_but_zero_is_the_mean_of_a_normal_in_its_cell(bits):
    # The authors' numbers; two of the 16 are a little off.
    levels = LEVELS[bits]
    assert len(levels) == 2**bits
    edges = [-40.0, *((a + b) / 2 for a, b in pairwise(levels)), 40.0]
    for level, (a, b) in zip(levels, pairwise(edges), strict=True):
        if level:
            assert level == pytest.approx((density(a) - density(b)) / (below(b) - below(a)), abs=0.022)


@pytest.mark.parametrize("bits", LEVELS)
def test_what_is_sent_is_the_nearest_level_times_s(bits):
    text = f"fedwsq(bits={bits}, first=true, start=0.02)"
    exact, rounded = (play(t, n=1) for t in ("fedwsq(bits=32, first=true)", text))
    start = tiny_net().state_dict()
    for name in "abc":
        one, other = exact.uploads[name].model, rounded.uploads[name].model
        for x, y in zip((one[SENT] - start[SENT]).flatten(), (other[SENT] - start[SENT]).flatten(), strict=True):
            nearest = min((0.02 * level for level in LEVELS[bits]), key=lambda v, x=x: abs(v - float(x)))
            assert float(y) == pytest.approx(nearest, abs=1e-12)
        close({k: v for k, v in one.items() if k != SENT}, {k: v for k, v in other.items() if k != SENT}, atol=1e-14)


def test_s_follows_the_mean_deviation_of_exact_updates():
    run = play("fedwsq(bits=1, first=true, start=0.5, momentum=0.25)", n=1)
    exact, start = play("ws", n=1), tiny_net().state_dict()
    found = [(u.model[SENT] - start[SENT]).flatten() for u in exact.uploads.values()]
    deviations = [float(((d - d.mean()) ** 2).sum() / (len(d) - 1)) ** 0.5 for d in found]
    s = float(run.server.parts["fedwsq"][SENT])
    assert s == pytest.approx(0.75 * 0.5 + 0.25 * sum(deviations) / 3, abs=1e-12)


def test_without_quantization_it_is_ws():
    close(play("ws", n=3).model, play("fedwsq(bits=32, first=true)", n=3).model, atol=0)


def test_the_first_convolution_is_left_alone_unless_asked():
    with pytest.raises(BadInput, match="convolution after the first"):
        play("fedwsq", tiny_data())
    assert fn.describe("fedwsq", "cnn-small").acts_on == ("layers", "sent update")


def test_other_bits_are_refused():
    with pytest.raises(BadInput, match="bits"):
        fn.method("fedwsq(bits=3)")
