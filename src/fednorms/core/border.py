"""The border: what the server accepts of what clients send, by the same code in a simulation and across machines.

Every function returns reasons in words. It never raises on what a client sent: the caller decides whether the client is
left out or the run stops. Only lengths are not compared in a simulation (`lengths=False`): a run that diverges is a
result there, and ends as it always did.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

import torch
from torch import Tensor

from fednorms.core.part import Part, Reduction
from fednorms.core.protection import is_variance
from fednorms.core.reductions import reductions
from fednorms.core.states import ServerState, Task, Upload
from fednorms.core.tree import Tree

EXPLODED = 1000.0  # an update so many times as long as one plus the model is not training
APART = 1e6  # a part's upload so many times as long as one plus that of the median client is not a measurement
LARGEST_COUNT = 2**53  # a counter of batches stays far below it

Form = tuple[tuple[int, ...], torch.dtype]
Trial = Callable[[], Tree | None]  # what a client would send, if that can be computed; asked for in a tie only


def _no_trial() -> None:
    return None


def _no_trials(p: Part) -> Trial:
    return _no_trial


def misfit(task: Task, upload: Upload) -> str:
    """How an upload's model differs from the net in names, shapes and dtypes; empty if it does not.

    Only the form is read, so this costs microseconds.
    """
    net = task.net
    expected = {n: _form(net.initial[n]) for n in net.exchanged}
    found = {n: _form(t) for n, t in upload.model.items()}
    if differing := [n for n in {**expected, **found} if expected.get(n) != found.get(n)]:
        name = differing[0]
        return f"sent {name} as {_words(found.get(name))}, expected {_words(expected.get(name))}"
    parts = {p.name for p in task.method.parts}
    if unknown := sorted(set(upload.parts) - parts):
        return f'sent an upload of "{unknown[0]}", which is not a part of the method'
    return ""


def unusable(
    task: Task,
    sent: Tree,
    uploads: Mapping[str, Upload],
    images: Mapping[str, int],
    *,
    lengths: bool = True,
    started: Mapping[str, Tree] = MappingProxyType({}),
    trial: Callable[[Part], Trial] = _no_trials,
) -> dict[str, str]:
    """Which clients sent uploads that the server cannot use, and why.

    `sent` is the model they started from, except those of `started`. `images` are the numbers of training images that
    they have registered. `trial` makes what a client would send for a part.
    """
    bad: dict[str, str] = {}
    most = _longest(task, sent) if lengths else math.inf
    for name, upload in uploads.items():
        own = started.get(name, sent)
        if wrong := misfit(task, upload) or _implausible(task, own, upload, images[name]) or _long(own, upload, most):
            bad[name] = wrong
    rest = {name: upload for name, upload in uploads.items() if name not in bad}
    for p in task.method.parts:
        trees = {n: u.parts.get(p.name, Tree()) for n, u in rest.items()}
        how = reductions(task)[p.name]
        bad = {**odd_ones(trees, how, images, task.net.initial, lengths=lengths, trial=trial(p)), **bad}
    return bad


def unusable_measures(
    task: Task,
    p: Part,
    how: Reduction,
    trees: Mapping[str, Tree],
    images: Mapping[str, int],
    *,
    lengths: bool = True,
    trial: Trial = _no_trial,
) -> dict[str, str]:
    """The same for what clients sent in an extra pass of a part."""
    bad = {
        name: wrong
        for name, tree in trees.items()
        if (wrong := _implausible_part(p, tree, images[name]) or _for_another(p, tree, name, images))
    }
    rest = {name: tree for name, tree in trees.items() if name not in bad}
    return {**odd_ones(rest, how, images, task.net.initial, lengths=lengths, trial=trial), **bad}


def _for_another(p: Part, up: Tree, client: str, clients: Collection[str]) -> str:
    """What is wrong if a client names its tensors after another client (FedAP: NAME/LAYER)."""
    wrong = [name for name in up if (who := name.rpartition("/")[0]) != client and who in clients]
    return f"sent {p.name}/{wrong[0]}, which is named after another client" if wrong else ""


def _implausible(task: Task, sent: Tree, upload: Upload, images: int) -> str:
    if wrong := _not_numbers(upload.model):
        return wrong
    for name, t in upload.model.items():
        if is_variance(task.net.slots[name]) and bool((t < 0).any()):
            return f"sent {name}, a variance, with negative entries"
        if not t.is_floating_point() and bool((t < 0).any()) and not bool((sent[name] < 0).any()):
            return f"sent {name}, a counter, with negative entries"
    for p in task.method.parts:
        if wrong := _implausible_part(p, upload.parts.get(p.name, Tree()), images):
            return wrong
    return ""


def _long(sent: Tree, upload: Upload, most: float) -> str:
    if math.isinf(most) or (moved := _distance(sent, upload.model)) <= most:
        return ""
    return f"sent an update of length {moved:.3g}, more than {most:.3g}"


def _implausible_part(p: Part, up: Tree, images: int) -> str:
    if wrong := _not_numbers(up, f"{p.name}/"):
        return wrong
    for name, t in up.items():
        if _declared(name, p.never_negative) and bool((t < 0).any()):
            return f"sent {p.name}/{name} with negative entries"
        if _declared(name, p.counts_images) and float(t.to(torch.float64).sum()) > images * (1 + 1e-5):
            return f"sent {p.name}/{name} for more than its {images} training images"
    return ""


def odd_ones(
    trees: Mapping[str, Tree],
    how: Reduction,
    images: Mapping[str, int],
    net: Tree | None = None,
    *,
    lengths: bool = True,
    trial: Trial = _no_trial,
) -> dict[str, str]:
    """Which trees do not fit most of them, in names, shapes, dtypes or length.

    A tie is decided by what `trial` makes. Without it, nobody knows who is right, and none of them fits: a name must
    not decide.

    The rows of a "list" may differ in number, up to one per training image. The entries of "grouped" are compared with
    those of the same name; an entry NAME@GROUP has the form of the tensor NAME of the net.

    >>> rows = {"a": Tree(m=torch.ones(3)), "b": Tree(m=torch.ones(2)), "c": Tree(m=torch.ones(2))}
    >>> odd_ones(rows, "sum", {"a": 5, "b": 5, "c": 5})
    {'a': 'sent m as float32 of shape (3,), most sites send float32 of shape (2,)'}
    """
    odd: dict[str, str] = {}
    if how == "grouped":
        for name, tree in trees.items():
            like = {k: (net or Tree()).get(k.rpartition("@")[0]) for k in tree}
            if differing := [k for k, t in like.items() if t is not None and _form(t) != _form(tree[k])]:
                entry = differing[0]
                expected = _words(_form((net or Tree())[entry.rpartition("@")[0]]))
                odd[name] = f"sent {entry} as {_words(_form(tree[entry]))}, expected {expected}"
        for entry in sorted({k for tree in trees.values() for k in tree}):
            alike = {n: t.pick([entry]) for n, t in trees.items() if entry in t and n not in odd}
            odd = {**odd_ones(alike, "weighted", images, lengths=lengths), **odd}
        return odd
    skip = 1 if how == "list" else 0
    forms = {n: {k: _form(t, skip) for k, t in sorted(tree.items())} for n, tree in sorted(trees.items())}
    counted = Counter(tuple(form.items()) for form in forms.values()).most_common()
    tie = len(counted) > 1 and counted[0][1] == counted[1][1]
    made = trial() if tie else None
    usual = dict(counted[0][0]) if counted else {}
    if made is not None:
        usual = {k: _form(t, skip) for k, t in sorted(made.items())}
    for name, form in forms.items():
        if form != usual or (tie and made is None):
            other = usual if form != usual else dict(counted[1][0])
            entry = next(k for k in {**other, **form} if other.get(k) != form.get(k))
            said, expected = _words(form.get(entry)), _words(other.get(entry))
            who = "expected" if made is not None else "as many sites send" if tie else "most sites send"
            odd[name] = f"sent {entry} as {said}, {who} {expected}"
        elif how == "list" and (wrong := _rows(trees[name], images[name])):
            odd[name] = wrong
    long = {n: _length(t) for n, t in trees.items() if n not in odd} if lengths else {}
    middle = sorted(long.values())[(len(long) - 1) // 2] if long else 0.0
    for name, length in long.items():
        if not length <= APART * (1 + middle):
            odd[name] = f"sent values of length {length:.3g}, of which half of the sites send at most {middle:.3g}"
    return odd


def exploded(before: ServerState, after: ServerState) -> str:
    """Why a new state of the server must not be used: empty if it may be."""
    for name, t in (*after.model.items(), *_named(after.parts)):
        if not Tree({name: t}).finite():
            return f"{name} would not be finite"
    moved, most = _distance(before.model, after.model), EXPLODED * (1 + _length(before.model))
    return f"the model would move by {moved:.3g}, more than {most:.3g}" if moved > most else ""


def _longest(task: Task, sent: Tree) -> float:
    """The largest length of an update: what a privacy mechanism declares, or what is not an explosion."""
    reference = sent.pick(task.net.exchanged)
    most = EXPLODED * (1 + _length(reference))
    mechanism = task.method.privacy[1].mechanism if task.method.privacy else None
    if mechanism is None or math.isinf(mechanism.clip):
        return most
    size = sum(t.numel() for t in reference.values() if t.is_floating_point())
    noise = mechanism.noise * (math.sqrt(size) + 10) if mechanism.where == "client" else 0.0  # beyond 1e-20 unlikely
    return 1.01 * mechanism.clip * (1 + noise) + 1e-5 * (1 + _length(reference))  # the last term is rounding


def _declared(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _not_numbers(tree: Tree, prefix: str = "") -> str:
    for name, t in tree.items():
        if t.is_complex():
            return f"sent {prefix}{name} as complex numbers"
        if not Tree({name: t}).finite():
            return f"sent {prefix}{name}, which is not finite"
        if not t.is_floating_point() and bool((t.to(torch.float64).abs() > LARGEST_COUNT).any()):
            return f"sent {prefix}{name} with a count of more than {LARGEST_COUNT}"
    return ""


def _rows(tree: Tree, images: int) -> str:
    rows = {t.shape[0] if t.dim() else 0 for t in tree.values()}
    if len(rows) > 1:
        return f"sent a list whose entries have {' and '.join(map(str, sorted(rows)))} rows"
    most = max(rows, default=1)
    return "" if 1 <= most <= images else f"sent a list of {most} rows for {images} training images"


def _distance(a: Tree, b: Tree) -> float:
    floats = [n for n, t in b.items() if t.is_floating_point() and n in a]
    return _length(b.pick(floats).to(torch.float64) - a.pick(floats).to(torch.float64))


def _length(tree: Tree) -> float:
    floats = Tree({k: t.detach() for k, t in tree.items() if t.is_floating_point() and t.numel()})
    return math.sqrt(sum(float(t.to(torch.float64).square().sum()) for t in floats.values()))


def _named(parts: Mapping[str, Tree]) -> list[tuple[str, Tensor]]:
    return [(f"{part}/{k}", t) for part, tree in parts.items() for k, t in tree.items()]


def _form(t: Tensor, skip: int = 0) -> Form:
    return tuple(t.shape)[skip:], t.dtype


def _words(form: Form | None) -> str:
    return "nothing" if form is None else f"{form[1]} of shape {form[0]}".removeprefix("torch.")
