"""Office-Caltech-10, Office-31 and Office-Home: objects from cameras, shops and artists.

Papers:
    Gong et al., Geodesic Flow Kernel for Unsupervised Domain Adaptation, CVPR 2012,
    https://doi.org/10.1109/CVPR.2012.6247911 (Office-Caltech-10)
    Griffin, Holub, Perona, Caltech-256 Object Category Dataset, technical report, California Institute of Technology
    2007; data set: https://doi.org/10.22002/D1.20087
    Venkateswara et al., Deep Hashing Network for Unsupervised Domain Adaptation, CVPR 2017,
    https://arxiv.org/abs/1706.07522 (Office-Home)
    Saenko et al., Adapting Visual Category Models to New Domains, ECCV 2010,
    https://doi.org/10.1007/978-3-642-15561-1_16 (Office-31)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation
from fednorms.data.readers.divisions import fractions, tenth_per_class
from fednorms.data.readers.fedbn_lists import fedbn_federation, fedbn_lists
from fednorms.data.readers.pictures import (
    FEDNN,
    MEMORY,
    Cache,
    Member,
    built,
    class_folders,
    count_domains,
    folder_of,
    has_domains,
    require_domains,
)
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, compared, deviations, source_of
from fednorms.data.sizes import Size

CALTECH_CLASSES = (
    "back_pack", "bike", "calculator", "headphones", "keyboard",
    "laptop_computer", "monitor", "mouse", "mug", "projector",
)  # fmt: skip
CALTECH_LISTS: Mapping[str, tuple[int, int]] = {
    "amazon": (766, 192),
    "caltech": (898, 225),
    "dslr": (125, 32),
    "webcam": (236, 59),
}
CALTECH_PROTOCOLS = {
    "fedwon": "FedBN and FedWon: the first 62 of each training list, validation the last 50, 256 px",
    "full": "all of FedBN's training and test lists, for partition rules, 256 px",
}
HOME_COUNTS = {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}
HOME_PROTOCOLS = {
    "fednn": "FedNN: floor(0.1 n) test images per domain and class, 224 px; pooled score",
}
OFFICE31_COUNTS = {"amazon": 2817, "dslr": 498, "webcam": 795}
OFFICE31_PROTOCOLS = {"own": "not from a paper: 70 % training, 10 % validation, 20 % test, stratified, 224 px"}
_SPELLINGS = {"laptop": "laptop_computer"}
_CALTECH_FOLDERS = {name: (name, f"{name}10") for name in CALTECH_LISTS}
_HOME_FOLDERS = {
    "Art": ("Art",),
    "Clipart": ("Clipart",),
    "Product": ("Product",),
    "Real World": ("Real World", "Real"),
}
_OFFICE31_FOLDERS = {name: (name,) for name in OFFICE31_COUNTS}
HOME_CLASSES = (
    "Alarm_Clock", "Backpack", "Batteries", "Bed", "Bike", "Bottle", "Bucket", "Calculator", "Calendar", "Candles",
    "Chair", "Clipboards", "Computer", "Couch", "Curtains", "Desk_Lamp", "Drill", "Eraser", "Exit_Sign", "Fan",
    "File_Cabinet", "Flipflops", "Flowers", "Folder", "Fork", "Glasses", "Hammer", "Helmet", "Kettle", "Keyboard",
    "Knives", "Lamp_Shade", "Laptop", "Marker", "Monitor", "Mop", "Mouse", "Mug", "Notebook", "Oven", "Pan",
    "Paper_Clip", "Pen", "Pencil", "Postit_Notes", "Printer", "Push_Pin", "Radio", "Refrigerator", "Ruler",
    "Scissors", "Screwdriver", "Shelf", "Sink", "Sneakers", "Soda", "Speaker", "Spoon", "TV", "Table", "Telephone",
    "ToothBrush", "Toys", "Trash_Can", "Webcam",
)  # fmt: skip
OFFICE31_CLASSES = (
    "back_pack", "bike", "bike_helmet", "bookcase", "bottle", "calculator", "desk_chair", "desk_lamp",
    "desktop_computer", "file_cabinet", "headphones", "keyboard", "laptop_computer", "letter_tray", "mobile_phone",
    "monitor", "mouse", "mug", "paper_notebook", "pen", "phone", "printer", "projector", "punchers", "ring_binder",
    "ruler", "scissors", "speaker", "stapler", "tape_dispenser", "trash_can",
)  # fmt: skip


def office_caltech_10(
    root: str | Path,
    protocol: str = "fedwon",
    size: Size = 256,
    seed: int = 0,
    complete: bool = True,
    allow_pickle: bool = False,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read Office-Caltech-10: ten classes that Office-31's three domains share with Caltech-256.

    With m the shortest training list (125): int(0.5 m) = 62 training images from the start of each list, int(0.4 m) =
    50 validation images from its end, and the test lists as they are. Nothing is normalized. FedBN augments by flips
    and rotations up to 30 degrees. Without the lists, a stratified 80/20 split is drawn (seed 0) and recorded, because
    its order is different.

    `root` has `amazon/back_pack/...`, with `amazon_train.pkl` and `amazon_test.pkl` (or .npz) next to the domains.
    Copies with `caltech10`, `backpack` and `laptop` are read as well.
    """
    place = CALTECH.find(root, protocol)
    lists, problems, drawn = fedbn_lists(place, _CALTECH_FOLDERS, CALTECH_CLASSES, allow_pickle, seed, _SPELLINGS)
    if not drawn:
        for domain, counts in CALTECH_LISTS.items():
            have = {part: len(lists[domain][part]) for part in ("train", "test")}
            problems += compared(domain, have, dict(zip(("train", "test"), counts, strict=True)))
    else:
        whole = {domain: len(parts["train"]) + len(parts["test"]) for domain, parts in lists.items()}
        problems += compared("counts", whole, {domain: sum(counts) for domain, counts in CALTECH_LISTS.items()})
    notes = deviations("office-caltech-10", problems, complete) + drawn
    shares = (0.5, 0.4) if protocol == "fedwon" else None
    return fedbn_federation(
        "office-caltech-10", root, place, lists, CALTECH_CLASSES, protocol, shares, size, seed, notes, cache,
        memory_limit,
    )  # fmt: skip


def caltech_layout(root: Path) -> str | None:
    """Which layout of Office-Caltech-10 a folder has, in words."""
    if not has_domains(root, _CALTECH_FOLDERS, CALTECH_CLASSES, _SPELLINGS):
        return None
    if folder_of(root, _CALTECH_FOLDERS["caltech"]) is None:  # the other domains are Office-31's
        return None
    return "class folders with FedBN's lists" if any(root.glob("amazon_train.*")) else "class folders without lists"


def office_home(
    root: str | Path,
    protocol: str = "fednn",
    size: Size = 224,
    seed: int = 0,
    complete: bool = True,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read Office-Home: 15,588 images of 65 classes as art, clip art, product pictures and photographs.

    We infer floor(0.1 n) test images per domain and class by analogy with PACS and VLCS. FedNN does not state its
    normalization; we use ImageNet's mean and standard deviation.

    `root` has `Art/Alarm_Clock/...`; "Real World" may be written with an underscore.
    """
    place = HOME.find(root, protocol)
    found, problems = class_folders(place, _HOME_FOLDERS, HOME_CLASSES)
    require_domains("office-home", place, problems)
    notes = deviations("office-home", problems + count_domains(found, HOME_COUNTS), complete)
    members = [Member(d, d, tenth_per_class(p.y, seed, f"office-home {d}")) for d, p in found.items()]
    source = source_of(root, protocol, seed, notes)
    norm = Preprocessing.imagenet()
    return built(
        "office-home", place, found, members, HOME_CLASSES, size, norm, source, cache, memory_limit, protocol=FEDNN
    )


def home_layout(root: Path) -> str | None:
    """Whether a folder is Office-Home."""
    return "class folders" if has_domains(root, _HOME_FOLDERS, HOME_CLASSES) else None


def office_31(
    root: str | Path,
    protocol: str = "own",
    size: Size = 224,
    seed: int = 0,
    val: float = 0.1,
    test: float = 0.2,
    complete: bool = True,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read Office-31: 4,110 images of 31 classes from a shop, a webcam and a good camera.

    No paper here states a split; ours is stratified, with ImageNet's mean and standard deviation.

    `root` has `amazon/images/back_pack/...` or `amazon/back_pack/...`.
    """
    place = OFFICE31.find(root, protocol)
    found, problems = class_folders(place, _OFFICE31_FOLDERS, OFFICE31_CLASSES, _SPELLINGS)
    require_domains("office-31", place, problems)
    notes = deviations("office-31", problems + count_domains(found, OFFICE31_COUNTS), complete)
    members = [Member(d, d, fractions(p.y, val, test, seed, f"office-31 {d}")) for d, p in found.items()]
    source = source_of(root, protocol, seed, notes) | {"val": val, "test": test}
    norm = Preprocessing.imagenet()
    return built("office-31", place, found, members, OFFICE31_CLASSES, size, norm, source, cache, memory_limit)


def office31_layout(root: Path) -> str | None:
    """Whether a folder is Office-31."""
    return "class folders" if has_domains(root, _OFFICE31_FOLDERS, OFFICE31_CLASSES, _SPELLINGS) else None


CALTECH = Reader(
    "office-caltech-10",
    "Office-Caltech-10: ten classes from Amazon, Caltech, DSLR and webcam",
    office_caltech_10,
    CALTECH_PROTOCOLS,
    caltech_layout,
    "ROOT/{amazon,caltech,dslr,webcam}/[images/]{back_pack,...,laptop_computer,...}/*.jpg (also caltech10, backpack, "
    "laptop), perhaps with {domain}_{train,test}.pkl",
    ("office_caltech_10", "office-caltech-10", "OfficeCaltech10"),
    Published(
        "Ten classes of objects that Office-31 and Caltech-256 share, in four domains. The reader follows the lists of "
        "FedBN's release.",
        {"FedBN's release": "https://github.com/med-air/FedBN", "Caltech-256": "https://doi.org/10.22002/D1.20087"},
        "see the record of Caltech-256; none found for the Office images",
        CALTECH_LISTS,
    ),
)
HOME = Reader(
    "office-home",
    "Office-Home: 65 classes as art, clip art, product and photo",
    office_home,
    HOME_PROTOCOLS,
    home_layout,
    "ROOT/{Art,Clipart,Product,Real World}/{65 classes}/*.jpg",
    ("OfficeHomeDataset_10072016", "OfficeHome", "office_home", "office-home"),
    Published(
        "65 classes of everyday objects as paintings, clip art, product pictures and photographs.",
        {"authors": "https://www.hemanthdv.org/officeHomeDataset.html"},
        "non-commercial research only; the images belong to their owners",
        HOME_COUNTS,
    ),
)
OFFICE31 = Reader(
    "office-31",
    "Office-31: 31 classes from Amazon, DSLR and webcam",
    office_31,
    OFFICE31_PROTOCOLS,
    office31_layout,
    "ROOT/{amazon,dslr,webcam}/[images/]{31 classes}/*.jpg",
    ("office31", "office-31", "Office31", "office_31"),
    Published(
        "31 classes of office objects as pictures from a shop, a DSLR camera and a webcam.",
        {"authors": "https://faculty.cc.gatech.edu/~judy/domainadapt/"},
        "none found",
        OFFICE31_COUNTS,
    ),
)
