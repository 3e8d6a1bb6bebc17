"""Readers of published data sets: a folder in its usual layout becomes the papers' federation."""

from __future__ import annotations

from pathlib import Path

from fednorms.core.errors import BadInput
from fednorms.data.readers import (
    camelyon17,
    centers,
    cifar,
    digits_five,
    domainnet,
    fairface,
    huggingface,
    isic,
    medmnist,
    npz,
    office,
    pacs_vlcs,
)
from fednorms.data.readers.reader import Reader

READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        digits_five.READER,
        office.CALTECH,
        office.HOME,
        office.OFFICE31,
        pacs_vlcs.PACS,
        pacs_vlcs.VLCS,
        domainnet.READER,
        cifar.CIFAR10,
        cifar.CIFAR100,
        cifar.CIFAR10C,
        camelyon17.READER,
        isic.READER,
        fairface.READER,
        centers.READER,
        medmnist.READER,
        npz.READER,
        huggingface.READER,
    )
}


def recognized(root: str | Path) -> list[tuple[Reader, str]]:
    """The readers that recognize a folder, each with the layout that it finds.

    >>> recognized("/no/such/place")
    []
    >>> recognized("pacs")
    Traceback (most recent call last):
    fednorms.BadInput: "pacs" is the name of a data set; expected its folder, ...
    """
    place = Path(root).expanduser()
    if str(root) in READERS and not place.exists():
        raise BadInput(
            READERS[str(root)].with_where(
                f'"{root}" is the name of a data set; expected its folder, such as data/{root}.'
            )
        )
    if not place.is_dir():
        return []
    seen = ((reader, reader.layout(place)) for reader in READERS.values())
    return [(reader, layout) for reader, layout in seen if layout]
