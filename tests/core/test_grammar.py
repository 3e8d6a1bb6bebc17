"""Methods as text: what is read, what is written, and what is refused with which message."""

import dataclasses
import pickle
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.options import nearest
from fednorms.core.part import REGISTRY, SUMS, Part, option, part
from fednorms.methods.registry import load_all, method, names

load_all()


def values(f):
    """Legal values of one option, from the range that it declares."""
    limits = f.metadata
    if limits.get("choices"):
        return st.sampled_from(limits["choices"])
    if type(f.default) is bool:
        return st.booleans()
    if type(f.default) is str:  # names of modules
        return st.sampled_from(["", "pool", "body.0, pool"])
    low = limits.get("at_least") if limits.get("at_least") is not None else limits.get("above")
    high = limits.get("at_most")
    if type(f.default) is int:
        return st.integers(low, (low or 0) + 100 if high is None else high)
    return st.floats(
        low, high if high is not None else 1e9, exclude_min=limits.get("above") is not None, allow_nan=False
    )


@st.composite
def parts(draw, name=None):
    cls = REGISTRY[name or draw(st.sampled_from(sorted(REGISTRY)))]
    fields = dataclasses.fields(cls)
    chosen = draw(st.lists(st.sampled_from(fields), unique_by=lambda f: f.name)) if fields else []
    return cls(**{f.name: draw(values(f)) for f in chosen})


@given(st.lists(parts(), max_size=4, unique_by=lambda p: p.name))
def test_every_method_survives_its_own_text(some):
    try:
        m = Method(tuple(some))
    except BadInput:  # two parts that exclude each other
        assume(False)
    again = method(str(m))
    assert again == m
    assert str(again) == str(m)
    assert hash(again) == hash(m)
    assert pickle.loads(pickle.dumps(m)) == m


@given(parts())
def test_text_names_exactly_the_options_that_differ_from_the_default(p):
    text = str(p)
    assert text.startswith(p.name)
    for f in dataclasses.fields(p):
        assert (f"{f.name}=" in text) == (getattr(p, f.name) != f.default)


@given(parts())
def test_parts_are_values(p):
    assert dataclasses.replace(p) == p
    for f in dataclasses.fields(p):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(p, f.name, getattr(p, f.name))


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("fedavg", "fedavg()"),
        ("FedProx(mu=0.01)+FEDFN", "fedprox(mu=0.01) + fedfn"),
        ("  fedbn\n+ agc(clip = inf) ", "fedbn + agc(clip=inf)"),
        ("fedprox(mu=1)", "fedprox(mu=1.0)"),
        ("fedavg + fedbn + fedavg", "fedbn"),
        ("(fedprox + fedbn) + fedfn", "fedprox + (fedbn + fedfn)"),
        ("mixbn(kind=global)", "mixbn(kind='global')"),
        ("fedfn(bias=false)", "fedfn(bias=False)"),
        ("scaffold(option=I)", 'scaffold(option="I")'),
        ("fedwon", "nonorm + wsconv + agc(min_batch=32)"),
    ],
)
def test_ways_to_write_the_same(text, same_as):
    assert method(text) == method(same_as)


def test_numbers_are_kept_to_the_last_digit():
    mu = 0.1 + 0.2
    assert method(str(REGISTRY["fedprox"](mu=mu))).parts[0].mu == mu


def test_a_method_and_a_part_pass_through():
    m = method("fedbn")
    assert method(m) is m
    assert method(m.parts[0]) == m
    assert method("fedprox") + method("fedbn") == method("fedprox + fedbn")
    assert method("fedprox") + REGISTRY["fedbn"]() == method("fedprox + fedbn")


def test_every_name_is_readable_and_listed():
    assert set(names()) == {*REGISTRY, *SUMS, "fedavg"}
    for name in names():
        assert isinstance(method(name), Method)


@given(st.sampled_from(sorted({*REGISTRY, *SUMS})), st.data())
def test_a_typo_of_one_letter_gets_the_right_name_suggested(name, data):
    assume(len(name) > 4)
    at = data.draw(st.integers(1, len(name) - 1))
    typo = name[:at] + "z" + name[at + 1 :]
    assume(typo not in names())
    with pytest.raises(BadInput) as error:
        method(typo)
    assert f'Unknown method "{typo}"' in str(error.value)
    assert f"lists all {len(names())}" in str(error.value)
    assert "did you mean" in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedprocs", 'Unknown method "fedprocs": did you mean "fedprox"?'),
        ("zzzzzzzz", 'Unknown method "zzzzzzzz": `fednorms list methods` lists all ' + str(len(names()))),
        ("fedprox(my=1)", 'fedprox has no option "my": did you mean "mu"?'),
        ("fednn(taw=1)", 'fednn has no option "taw": did you mean "tau"?'),
        ("nonorm(x=1)", 'nonorm has no option "x": it has no options'),
        ("fedavg(lr=1)", 'fedavg has no option "lr": it has no options'),
        ("fedprox(mu=-1)", "fedprox: mu must be a number >= 0.0 (default 0.001), got -1"),
        ("greg(rho=1.5)", "greg: rho must be a number >= 0.0 and <= 1.0 (default 0.1), got 1.5"),
        ("agc(clip=0)", "agc: clip must be a number > 0.0 (default 0.64), got 0.0"),
        ("fedrep(head_epochs=1.5)", "fedrep: head_epochs must be an integer >= 1 (default 10), got 1.5"),
        ("fedrep(head_epochs=true)", "fedrep: head_epochs must be an integer"),
        ("fedfn(bias=1)", "fedfn: bias must be a bool (default True), got 1"),
        ("scaffold(option=III)", "scaffold: option must be one of 'I', 'II' (default 'II'), got 'III'"),
        ("fedprox(mu=abc)", "fedprox: mu must be a number"),
        ("fedprox(mu=none)", "fedprox: mu must be a number"),
        ("fedprox(mu=1, mu=2)", "fedprox: option mu is given twice"),
        ("fedprox + fedbn + fedprox", "fedprox is given twice: list each part once"),
        ("fedwon + agc", "agc is given twice"),
        ("fedbabu + finetune", "fedbabu and finetune each decide how to fine-tune: keep one"),
        ("fedbabu + fedrep", "fedbabu and fedrep each decide how to fine-tune: keep one"),
        ("fedprox(0.1)", 'Cannot read the method "fedprox(0.1)" at "fedprox(0.1)"'),
        ("fedprox(mu=1+x)", "Cannot read the method"),
        ("fedprox(mu={[]: 1})", "Cannot read the method"),
        ("fedprox - fedbn", "Cannot read the method"),
        ("fedprox fedbn", 'Cannot read the method "fedprox fedbn" near column'),
        ("fedprox +", "Cannot read the method"),
        ("", 'Cannot read the method ""'),
        ("fedprox(**{'mu': 1})", 'fedprox has no option "**"'),
        ("'fedprox'", "Cannot read the method"),
        ("a.b", "Cannot read the method"),
    ],
)
def test_refusals_say_what_is_wrong(text, words):
    with pytest.raises(BadInput, match=re.escape(words)):
        method(text)


def test_several_wrong_options_are_reported_at_once():
    with pytest.raises(BadInput, match=r"alpha must be.*; greg: rho must be"):
        method("greg(alpha=-1, rho=2)")


def test_unreadable_text_shows_how_to_write_one():
    with pytest.raises(BadInput, match=re.escape('Write it like "scaffold + greg(alpha=1.0)"')):
        method("fedprox(")


@pytest.mark.parametrize("parts", ["fedbn", REGISTRY["fedbn"](), ("fedbn",), (REGISTRY["fedbn"],)])
def test_a_method_is_made_of_parts(parts):
    with pytest.raises(BadInput, match=r"expected a tuple of parts, got .*fednorms\.method\("):
        Method(parts)


def test_two_objectives_are_refused_by_name():
    @part("other_loss")
    class Other(Part):
        def objective(self, s):
            return s.logits.sum()

    try:
        with pytest.raises(BadInput, match="spherefed and other_loss each replace the base loss: keep one"):
            Method((REGISTRY["spherefed"](), Other()))
    finally:
        del REGISTRY["other_loss"]


def test_two_input_normalizations_are_refused_by_name():
    @part("other_input")
    class Other(Part):
        normalises_input = True

    try:
        with pytest.raises(BadInput, match="fedrdn and other_input each normalize the input: keep one"):
            Method((REGISTRY["fedrdn"](), Other()))
    finally:
        del REGISTRY["other_input"]


def test_two_weightings_are_refused_unless_the_recipe_chooses():
    @part("by_size")
    class Sized(Part):
        weighting = "size"

    try:
        both = method("fedbn") + Sized()
        with pytest.raises(BadInput, match=re.escape("fedbn (uniform) and by_size (size) ask for different")):
            both.weighting()
        assert both.weighting("uniform") == "uniform"
    finally:
        del REGISTRY["by_size"]


def test_integers_are_accepted_as_numbers_and_stored_as_such():
    @part("knob")
    class Knob(Part):
        x: float = option(0.5, at_least=0.0)

    del REGISTRY["knob"]
    assert type(Knob(x=2).x) is float
    with pytest.raises(BadInput, match="got nan"):
        Knob(x=float("nan"))


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4))
def test_nearest_always_lists_what_is_known(name, known):
    text = nearest(name, known)
    assert text.endswith("Known: " + ", ".join(sorted(known)))
    if name in known:
        assert text.startswith(f'did you mean "{name}"?')
