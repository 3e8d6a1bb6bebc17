"""Names near a mistyped one: everything that asks "did you mean" asks it here, by one measure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def did_you_mean(name: str, names: Iterable[str], *, prefix: str = "", alike: float = 0.5) -> str:
    """The question for an error message, with a space behind it; empty if no name is near.

    Names that are equally near are all named, `prefix` stands before each. `alike` is how near a name must be, from 0
    to 1; more than the default where the name need not be a mistake at all.

    >>> did_you_mean("fedprocs", ["fedprox", "fedbn"]), did_you_mean("fedbnn", ["fedprox", "fedbn", "fednn"])
    ('did you mean "fedprox"? ', 'did you mean "fednn" or "fedbn"? ')
    >>> did_you_mean("resnet", ["resnet18", "vgg11"], prefix="torchvision:"), did_you_mean("xyz", ["fedbn"])
    ('did you mean "torchvision:resnet18"? ', '')
    """
    close = get_close_matches(name, sorted(set(names)), n=3, cutoff=alike)
    ratios = [SequenceMatcher(a=other, b=name).ratio() for other in close]
    level = [f'"{prefix}{other}"' for other, ratio in zip(close, ratios, strict=True) if ratio == ratios[0]]
    return f"did you mean {' or '.join(level)}? " if level else ""
