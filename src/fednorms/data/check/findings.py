"""What is wrong or unusual about the images of a federation, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fednorms.core.counted import counted
from fednorms.core.option_names import flag, option, setting
from fednorms.data.check.copies import exact_copies, near_copies
from fednorms.data.check.images import Seen
from fednorms.data.check.names import likely_ids
from fednorms.data.check.report import Finding
from fednorms.data.check.shift import wilson
from fednorms.data.federation import Federation
from fednorms.data.problems import some
from fednorms.data.readers.reader import Deviation, anyway

_NAMED = 3  # files named in a sentence
_WIDE = 0.2  # width of an interval above which a test set is too small to judge a model
_FEW = 10  # test images of a class below which its recall cannot be judged
_SHIFTED = 0.3  # label shift worth a sentence
_UNLIKE = 0.5  # feature shift worth a sentence


@dataclass
class Case:
    """A federation under examination, and what was found so far.

    Of a published split only problems with files must be fixed: the rest is part of the data set.
    """

    federation: Federation
    images: Sequence[Seen]
    published: bool = False
    grouped: bool = False
    divisible: bool = True  # whether `group` can change the split
    must: list[Finding] = field(default_factory=list)
    know: list[Finding] = field(default_factory=list)

    def add(self, kind: str, text: str, files: Sequence[str] = (), must: bool = False) -> None:
        """Note a finding."""
        (self.must if must else self.know).append(Finding(kind, text, tuple(files)))

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes."""
        return self.federation.classes

    @property
    def readable(self) -> list[Seen]:
        """The images that could be read."""
        return [image for image in self.images if not image.look.problem]


def incomplete(case: Case, must: bool) -> None:
    """How a data set differs from the published one."""
    found = [note for note in case.federation.source.get("notes", []) if isinstance(note, Deviation)]
    if found:
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        text = f"The data set is not as published: {'; '.join(found[:4])}{more}. {anyway()} reads it anyway."
        case.add("incomplete", text, found, must=must)


def broken(case: Case) -> None:
    """Files that cannot be read or are empty."""
    files = {image.name: image.look.problem for image in case.images if image.look.problem}
    if not files:
        return
    empty = [name for name, problem in files.items() if problem == "the file is empty"]
    one = len(files) == 1
    named = [f"{name} ({problem})" for name, problem in list(files.items())[:_NAMED]]
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    also = f", {len(empty):,} of them empty" if empty and len(empty) < len(files) else ""
    text = (
        f"{counted(len(files), 'file')} cannot be read{also}: {'; '.join(named)}{more}. Replace or remove "
        f"{'it' if one else 'them'}, or leave {'it' if one else 'them'} out with {flag('skip_broken')}."
    )
    case.add("broken", text, [f"{name}: {problem}" for name, problem in files.items()], must=True)


def copies(case: Case) -> None:
    """Exact copies: in training and test data, with two labels, at several sites, within a split."""
    images = case.images
    groups = [[images[i] for i in group] for group in exact_copies(images)]
    two = [group for group in groups if len({image.label for image in group}) > 1]
    if two:
        first = "; ".join(f"{i.name} is {case.classes[i.label]}" for i in _distinct(two[0], lambda i: i.label))
        text = (
            f"{_images_have(len(two))} two labels, so one label is wrong: {first}. Correct the label or remove the "
            f"images; {setting('copies', 'drop')} leaves all of them out."
        )
        case.add("two labels", text, _names(two), must=not case.published)
    known = [image for group in groups if _trained(group) for image in group if image.part == "test"]
    if known:
        tests = sum(image.part == "test" for image in images)
        example = next(group for group in groups if _trained(group) and any(i.part == "test" for i in group))
        here = next(image for image in example if image.part == "test")
        there = next(image for image in example if image.part != "test")
        text = (
            f"{len(known):,} of {counted(tests, 'test image')} {'is' if len(known) == 1 else 'are'} also trained or "
            f"validated on, so scores are too good: {here.name} equals {there.name} ({there.site}, {there.part}). "
            f"{_remedy(case)}"
        )
        case.add("copies", text, [i.name for i in known], must=not case.published)
    shared = [group for group in groups if len({image.site for image in group}) > 1]
    if shared:
        one, other = list(_distinct(shared[0], lambda i: i.site))[:2]
        text = f"{counted(len(shared), 'image')} {_is(shared)} at several sites, such as {one.name} and {other.name}."
        case.add("copies at sites", text, _names(shared))
    inside = [group for group in groups if len({(i.site, i.part) for i in group}) < len(group)]
    if inside:
        text = (
            f"{counted(len(inside), 'image')} {_is(inside)} more than once in one split, such as {inside[0][0].name}; "
            f"{setting('copies', 'drop')} keeps one of each."
        )
        case.add("copies in a split", text, _names(inside))


def near(case: Case) -> None:
    """Images that look the same but are not equal, in training and test data or with two labels."""
    images = case.images
    pairs = [(images[a], images[b]) for a, b in near_copies(images)]
    leaks = [(a, b) for a, b in pairs if (a.part == "test") != (b.part == "test")]
    if leaks:
        a, b = leaks[0]
        test = {i.name for pair in leaks for i in pair if i.part == "test"}
        text = (
            f"{_images_look(len(test), 'test image')} nearly the same as an image that is trained or validated on, "
            f"such as {a.name} and {b.name}. Look at them: copies make scores too good."
        )
        case.add("near copies", text, [f"{a.name} and {b.name}" for a, b in leaks])
    two = [(a, b) for a, b in pairs if a.label != b.label]
    if two:
        a, b = two[0]
        text = (
            f"{counted(len(two), 'pair')} of images {'looks' if len(two) == 1 else 'look'} nearly the same but "
            f"{'has' if len(two) == 1 else 'have'} two labels, such as {a.name} ({case.classes[a.label]}) and {b.name} "
            f"({case.classes[b.label]})."
        )
        case.add("near copies with two labels", text, [f"{a.name} and {b.name}" for a, b in two])
    others = [(a, b) for a, b in pairs if a.site != b.site]
    if others:
        a, b = others[0]
        look = "looks" if len(others) == 1 else "look"
        text = f"{counted(len(others), 'pair')} of images of two sites {look} nearly the same: {a.name}, {b.name}."
        case.add("near copies at sites", text, [f"{a.name} and {b.name}" for a, b in others])


def ids(case: Case) -> None:
    """Patients or lesions in file names, and whether the split keeps them together."""
    files = [image for image in case.readable if image.path is not None]
    if not files or case.grouped:
        return
    found = likely_ids([i.path.name for i in files if i.path], [i.site for i in files], [i.label for i in files])
    if found is None:
        return
    parts: dict[tuple[str, str], set[str]] = {}
    for image, whose in zip(files, found.ids, strict=True):
        if whose is not None:
            parts.setdefault((image.site, whose), set()).add("test" if image.part == "test" else "train")
    divided = [whose for whose, where in parts.items() if len(where) > 1]
    what = f'file names have what looks like ids ("{found.example}"): {counted(len(parts), "id")}'
    use = f"{setting('group', found.pattern)} keeps each in one split."
    if not divided:
        if any(len(where) for where in parts.values()):
            case.add("ids", f"{what[0].upper()}{what[1:]}, and the split keeps each together.")
        return
    if not case.divisible:
        use = "the split is part of the data."
        if not case.published:
            use = "the data bring their own split. Move the images of each id to one side of it."
    text = (
        f"{what[0].upper()}{what[1:]}, of which {len(divided):,} are in both training and test data. If an id is a "
        f"patient or lesion, scores are too good: {use}"
    )
    case.add("ids", text, [f"{site}: {whose}" for site, whose in divided], must=found.named and not case.published)


def labels(case: Case) -> None:
    """Classes that are missing: everywhere, at sites, or in training."""
    counts = case.federation.num_classes
    if counts == 1:
        case.add(
            "one class", "There is only one class, so every prediction is correct. Add images of another.", must=True
        )
    trained, tested = Counter[int](), Counter[int]()
    for image in case.readable:
        (tested if image.part == "test" else trained)[image.label] += 1
    if never := [case.classes[c] for c in sorted(tested) if not trained[c]]:
        text = f"{_class(never)} {some(never)} {'is' if len(never) == 1 else 'are'} tested but trained nowhere."
        case.add("untrained class", text, must=not case.published)
    per_site = {site.name: {i.label for i in case.readable if i.site == site.name} for site in case.federation.sites}
    lacking = {
        site: [case.classes[c] for c in range(counts) if c not in there and (trained[c] or tested[c])]
        for site, there in per_site.items()
    }
    if absent := {site: names for site, names in lacking.items() if names}:
        site, names = next(iter(absent.items()))
        others = f"{counted(len(absent) - 1, 'other site')} {'lacks' if len(absent) == 2 else 'lack'} some"
        more = f", and {others}" if len(absent) > 1 else ""
        text = f'Site "{site}" has no images of {some(names, _NAMED)}{more}. It cannot learn these without the others.'
        case.add("missing classes", text, [f"{site}: {', '.join(names)}" for site, names in absent.items()])
    there = [c for c in range(counts) if tested and (trained[c] or tested[c])]
    if rare := [case.classes[c] for c in there if tested[c] < _FEW]:
        few = min(tested[case.classes.index(name)] for name in rare)
        text = (
            f"{_class(rare)} {some(rare)} {'has' if len(rare) == 1 else 'have'} fewer than {_FEW} test images over all "
            f"sites ({'the fewest: ' if len(rare) > 1 else ''}{few}): recall cannot be judged."
        )
        case.add("rare classes", text)


def splits(case: Case) -> None:
    """Splits that are missing or too small to judge a model."""
    sites = case.federation.sites
    untested = [site.name for site in sites if site.test is None]
    if len(untested) == len(sites):
        text = f"No site has test images, so no model can be judged. Raise {option('test')}, or add a test folder."
        case.add("no tests", text, must=True)
    elif untested:
        case.add("no tests", f"No test images at {some(untested, _NAMED)}: scores are those of the other sites.")
    if not any(site.val is not None for site in sites):
        text = (
            "No validation images: a run cannot choose its best round, stop early, or search rates. "
            f"{option('val').rstrip('=')} sets some of the training images aside."
        )
        case.add("no validation", text)
    sizes = {site.name: len(site.test) for site in sites if site.test is not None}
    small = {name: n for name, n in sizes.items() if _width(n) > _WIDE}
    if small:
        name, n = min(small.items(), key=lambda item: item[1])
        low, high = (100 * v for v in wilson(0.8, n))
        whose = f"{counted(len(small), 'site')} of {len(sizes)}" if len(small) > 1 else f'Site "{name}"'
        text = (
            f"{whose} {'have' if len(small) > 1 else 'has'} too few test images to judge a model there: with {n} ("
            f"{name}), an accuracy of 80 % may be {low:.0f} to {high:.0f} %. "
            f"{_enough()} test images give an interval of {100 * _WIDE:.0f} points."
        )
        case.add("small tests", text, [f"{name}: {n}" for name, n in small.items()])


def shapes(case: Case) -> None:
    """Sizes and modes that differ."""
    sizes = Counter((i.look.height, i.look.width) for i in case.readable)
    listed = all(image.path is not None for image in case.images)
    if len(sizes) > 1 and listed and not case.published:
        (h, w), _ = sizes.most_common(1)[0]
        smallest = min(sizes)
        text = (
            f"Images differ in size ({len(sizes)} sizes; the most common is {h}x{w}, the smallest "
            f"{smallest[0]}x{smallest[1]}, height x width): runs need {option('size').rstrip('=')}, such as "
            f"{setting('size', f'{h}x{w}' if h != w else str(h))}."
        )
        case.add("sizes", text)
    modes = {
        site.name: Counter(i.look.mode for i in case.readable if i.site == site.name) for site in case.federation.sites
    }
    gray = {
        name: sum(c[m] for m in c if m in ("L", "1", "LA") or m.startswith("I")) / max(1, sum(c.values()))
        for name, c in modes.items()
    }
    if max(gray.values(), default=0) > 0.9 and min(gray.values(), default=1) < 0.1:
        text = (
            f"Some sites have gray images and others color ({some([n for n, g in gray.items() if g > 0.9], _NAMED)} "
            "gray): a model may tell sites apart by that."
        )
        case.add("modes", text)


def shifts(case: Case, label: Mapping[str, float], feature: Mapping[str, float]) -> None:
    """Sites whose labels or images differ clearly from the others."""
    if label and (worst := max(label, key=lambda s: label[s])) and label[worst] > _SHIFTED:
        text = (
            f"Labels differ between sites: {worst} is {label[worst]:.2f} from the pooled class shares (total "
            "variation, 0 to 1). Compare sites by balanced accuracy."
        )
        case.add("label shift", text)
    if feature and (worst := max(feature, key=lambda s: feature[s])) and feature[worst] > _UNLIKE:
        text = (
            f"Images differ between sites even within classes: {worst} by {feature[worst]:.2f} standard deviations in "
            "brightness and color. Methods that keep normalization local are made for this (fedbn, fedwon)."
        )
        case.add("feature shift", text)


def _enough() -> int:
    """The smallest test set that is not too small."""
    return next(n for n in range(1, 10_000) if _width(n) <= _WIDE)


def _width(n: int) -> float:
    low, high = wilson(0.8, n)
    return high - low


def _trained(group: Sequence[Seen]) -> bool:
    return any(image.part != "test" for image in group)


def _names(groups: Sequence[Sequence[Seen]]) -> list[str]:
    return [" = ".join(image.name for image in group) for group in groups]


def _distinct(group: Sequence[Seen], key: Callable[[Seen], object]) -> Iterator[Seen]:
    yield from {key(image): image for image in reversed(group)}.values()


def _images_have(n: int) -> str:
    return f"{counted(n, 'image')} {'has' if n == 1 else 'have'}"


def _images_look(n: int, what: str) -> str:
    return f"{counted(n, what)} {'looks' if n == 1 else 'look'}"


def _is(groups: Sequence[object]) -> str:
    return "is" if len(groups) == 1 else "are"


def _class(names: Sequence[str]) -> str:
    return "Class" if len(names) == 1 else "Classes"


def _remedy(case: Case) -> str:
    drop = f"{setting('copies', 'drop')} leaves them out of training"
    if case.published or not case.divisible:
        return f"{drop}."
    return f"{drop}, {setting('copies', 'together')} keeps copies in one split."
