"""Check the images of a federation before training on them: open all, count, compare, and say what to fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.data.check import findings
from fednorms.data.check.images import Seen, seen_in
from fednorms.data.check.report import Checked, Finding, SiteNumbers
from fednorms.data.check.shift import feature_shift, label_shift, wilson
from fednorms.data.federation import Federation
from fednorms.data.folders import counted_only
from fednorms.data.folders.divide import Copies
from fednorms.data.folders.look import Progress
from fednorms.data.folders.scan import scan
from fednorms.data.packed import SUFFIX, check_pack
from fednorms.data.readers import recognized
from fednorms.data.readers.reader import Deviation, Reader
from fednorms.data.registry import federation as open_federation

__all__ = ["Checked", "Finding", "SiteNumbers", "check"]


def check(
    federation: str | Path | Federation,
    protocol: str | None = None,
    val: float | None = None,
    test: float | None = None,
    seed: int | None = None,
    group: str | None = None,
    group_across: bool | None = None,
    copies: Copies | None = None,
    skip_broken: bool | None = None,
    allow_pickle: bool | None = None,
    complete: bool = True,
    cache: str | Path | bool | None = None,
    progress: Progress | None = None,
) -> Checked:
    """Open every image of a folder, data set, pack or federation, and say what must be fixed and what to know.

    Reported are files that cannot be read, copies and near copies in training and test data or at several sites, equal
    images with two labels, missing classes, splits too small to judge a model, patients in file names that the split
    divides, and how much labels and images differ between sites. What was seen in a file is kept in the cache until the
    file changes, so a second check is fast.

    Args:
        federation: a folder, the folder of a known data set, a pack, a name that `fednorms.federation` knows, or a
            `Federation`.
        protocol: whose split of a data set.
        val: fraction for validation, as for `fednorms.federation`; so are the next ones.
        test: fraction for testing.
        seed: decides how the data are split.
        group: a regular expression that finds the patient in a file's name.
        group_across: ids mean the same at all sites.
        copies: "keep", "drop" or "together".
        skip_broken: leave out files that cannot be read, and list them in `left_out`.
        allow_pickle: open pickled archives; only NumPy arrays are accepted.
        complete: a data set whose image counts differ from the published ones must be fixed (True).
        cache: the folder for what was seen; by default the user's cache folder, False for none.
        progress: called with the number of images seen and their total.

    >>> report = check("digits-shift")
    >>> report.ok, report.images
    (True, 1797)
    """
    options: dict[str, Any] = {
        "protocol": protocol,
        "val": val,
        "test": test,
        "seed": seed,
        "group": group,
        "allow_pickle": allow_pickle,
    }
    options |= {"group_across": group_across, "copies": copies, "skip_broken": skip_broken}
    asked = {name: value for name, value in options.items() if value is not None}
    if isinstance(federation, Federation):
        found, what, reader = open_federation(federation, **asked), "a federation", None
    else:
        found, what, reader = _opened(str(federation), asked)
    images = seen_in(found, cache, progress)
    published = reader is not None and bool(reader.published.counts)
    case = findings.Case(found, images, published, "group" in asked, _is_divided_here(found))
    findings.incomplete(case, must=complete)
    for look in (findings.broken, findings.copies, findings.labels, findings.splits, findings.ids, findings.near):
        look(case)
    findings.shapes(case)
    label, feature = _label_shift(found, images), feature_shift(images)
    findings.shifts(case, label, feature)
    for note in found.source.get("notes", []):
        if not isinstance(note, Deviation):
            case.add("note", f"{note[:1].upper()}{note[1:].removesuffix('.')}.")
    return Checked(
        name=found.name,
        what=what,
        classes=tuple(found.classes),
        sites=tuple(_numbers(found, images, label, feature)),
        images=len(images),
        sizes=dict(Counter((i.look.height, i.look.width) for i in case.readable).most_common()),
        modes=dict(Counter(i.look.mode for i in case.readable).most_common()),
        must_fix=tuple(case.must),
        should_know=tuple(case.know),
        facts=tuple(_facts(found, reader)),
        left_out=tuple(found.source.get("left_out", ())),
        reader=reader.name if reader else "",
        protocols=dict(reader.protocols) if reader else {},
    )


def _is_divided_here(found: Federation) -> bool:
    """Whether this library draws the split of some site, so options can change it: folders may bring their own."""
    kind, _, root = str(found.source.get("spec", "")).partition(":")
    return kind == "folder" and any(not file.part for file in scan(Path(root)))


def _opened(text: str, asked: dict[str, Any]) -> tuple[Federation, str, Reader | None]:
    """The federation with its files listed, what it is in words, and its reader if it has one."""
    path = Path(text.removeprefix("pack:").removeprefix("folder:")).expanduser()
    if path.is_file() and path.suffix != ".npz":
        header = check_pack(path)
        how = header["codec"] if header["quality"] is None else f"{header['codec']} of quality {header['quality']}"
        size = f"{counted(header['images'], 'image')} stored as {how}, {header['bytes'] / 2**20:,.1f} MiB"
        return open_federation(f"pack:{path}", **asked), f"a pack; {size}; its hash matches", None
    known = recognized(path)
    if known:
        reader, layout = known[0]
        anyway: dict[str, Any] = {"complete": False} if "complete" in signature(reader.read).parameters else {}
        with counted_only():
            return open_federation(reader.name, root=path, **asked, **anyway), f"{reader.name} ({layout})", reader
    if path.exists():
        with counted_only():
            try:
                scan(path)
            except BadInput as error:
                raise BadInput(
                    f'"{path}" is not a data set of `fednorms list federations`, and not a folder of images: {error}'
                ) from None
            return open_federation(f"folder:{path}", **asked), "custom images as site/class/image", None
    if "/" in text or text.endswith(SUFFIX):
        raise BadInput(f'"{text}": no such file or folder.')
    return open_federation(text, **asked), "a federation of the library", None


def _facts(found: Federation, reader: Reader | None) -> list[str]:
    sites = f"{counted(len(found.clients), 'site')} with training data"
    unseen = f", {len(found.unseen)} unseen" if found.unseen else ""
    names = ", ".join(found.classes[:12]) + (" ..." if found.num_classes > 12 else "")
    facts = [f"{sites}{unseen}, {counted(found.num_classes, 'class', 'classes')} ({names})"]
    if reader is not None:
        facts.append(f"protocol {found.source['protocol']}")
        if found.protocol.facts:
            facts.append(f"as in its papers: {', '.join(found.protocol.facts)}")
    return facts


def _label_shift(found: Federation, images: Sequence[Seen]) -> dict[str, float]:
    counts = {site.name: [0] * found.num_classes for site in found.clients}
    for image in images:
        if image.part == "train" and image.site in counts:
            counts[image.site][image.label] += 1
    return label_shift(counts) if len(counts) > 1 else {}


def _numbers(
    found: Federation, images: Sequence[Seen], label: dict[str, float], feature: dict[str, float]
) -> list[SiteNumbers]:
    counts = {site.name: [0] * found.num_classes for site in found.sites}
    for image in images:
        counts[image.site][image.label] += 1
    return [
        SiteNumbers(
            name=site.name,
            domain=site.domain,
            train=len(site.train or ()),
            val=len(site.val or ()),
            test=len(site.test or ()),
            classes=tuple(counts[site.name]),
            label_shift=label.get(site.name),
            feature_shift=feature.get(site.name),
            test_interval=wilson(0.8, len(site.test)) if site.test is not None else None,
        )
        for site in found.sites
    ]
