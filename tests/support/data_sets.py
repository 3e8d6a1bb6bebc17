"""Every data set that the papers' tables need, tiny, in a layout of the published one: a few images per class."""

from __future__ import annotations

import numpy as np

from fednorms.data.readers import cifar, domainnet, isic, office, pacs_vlcs
from fednorms.data.readers.fairface import RACES
from tests.support.layouts import class_folders, gradient, picture, table


def digits_five(root):
    for i, name in enumerate(("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST_M")):
        (root / name).mkdir(parents=True)
        for part, n in (("train", 1600), ("test", 400)):  # enough for 200 clients, and for images 743 to 1,485
            np.savez(root / name / f"{part}.npz", x=gradient(n, (4, 4, 3), seed=i), y=np.arange(n) % 10)


def cifar_10(root):
    root.mkdir(parents=True)
    for i, name in enumerate((*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")):
        rows = np.concatenate([np.arange(200, dtype=np.uint8)[:, None] % 10, gradient(200, (3072,), seed=i)], axis=1)
        (root / f"{name}.bin").write_bytes(rows.tobytes())


def cifar_100(root):
    root.mkdir(parents=True)
    for name, n in (("train", 2000), ("test", 200)):
        labels = (np.arange(n) % 100).astype(np.uint8)
        rows = np.concatenate([np.stack([labels // 5, labels], axis=1), gradient(n, (3072,))], axis=1)
        (root / f"{name}.bin").write_bytes(rows.astype(np.uint8).tobytes())


def cifar_10_c(root):
    root.mkdir(parents=True)
    np.save(root / "labels.npy", np.tile(np.arange(40) % 10, 5))
    for i, name in enumerate(cifar.CORRUPTIONS):
        np.save(root / f"{name}.npy", gradient(200, (32, 32, 3), seed=i))


def pacs(root):
    class_folders(root, pacs_vlcs.PACS_COUNTS, pacs_vlcs.PACS_CLASSES, 12)


def vlcs(root):
    class_folders(root, pacs_vlcs.VLCS_COUNTS, pacs_vlcs.VLCS_CLASSES, 12)


def office_home(root):
    class_folders(root, ("Art", "Clipart", "Product", "Real World"), office.HOME_CLASSES, {
        domain: [10 if i < 2 else 1 for i in range(65)] for domain in ("Art", "Clipart", "Product", "Real World")
    })  # fmt: skip


def office_caltech_10(root):
    class_folders(root, office.CALTECH_LISTS, office.CALTECH_CLASSES, 5)


def domainnet_lists(root):
    """With more than a hundred classes, because GReg takes the largest hundred, and the official lists."""
    classes = sorted([*domainnet.TEN_CLASSES, *(f"zz_{i:03d}" for i in range(92))])
    for domain in domainnet.TEN_LISTS:
        lines = {"train": [], "test": []}
        for i, label in enumerate(classes):
            for k in range(8 if label in domainnet.TEN_CLASSES else 2):
                picture(root / domain / label / f"{k}.png", i * 10 + k)
                lines["train" if k else "test"].append(f"{domain}/{label}/{k}.png {i}")
        for part, said in lines.items():
            (root / f"{domain}_{part}.txt").write_text("\n".join(said))


def camelyon17(root):
    rows = []
    for centre in range(5):
        for i in range(400):
            patient = f"{centre * 20 + i % 5:03d}"
            rows.append(
                {"": len(rows), "patient": patient, "node": 0, "x_coord": i, "y_coord": i, "tumor": i % 2,
                 "slide": 0, "center": centre, "split": 0}
            )  # fmt: skip
    table(root / "metadata.csv", rows)
    for value, row in enumerate(rows):
        name = f"patient_{row['patient']}_node_0"
        picture(root / "patches" / name / f"patch_{name}_x_{row['x_coord']}_y_{row['y_coord']}.png", value)


def fairface(root):
    for word, n in (("train", 70), ("val", 14)):
        rows = [
            {"file": f"{word}/{i}.jpg", "age": "20-29", "gender": ("Male", "Female")[i // 7 % 2],
             "race": RACES[i % 7], "service_test": True}
            for i in range(n)
        ]  # fmt: skip
        table(root / f"fairface_label_{word}.csv", rows)
        for i in range(n):
            picture(root / word / f"{i}.jpg", 100)


def fed_isic2019(root):
    rows = [
        {
            "image": f"ISIC_{i:04d}",
            "target": i % 8,
            "center": i % 6,
            "fold": "test" if i % 5 == 0 else "train",
            "lesion_id": f"HAM_{i // 2}",
        }
        for i in range(120)
    ]
    table(root / "train_test_split", rows)
    assert len(isic.CENTERS) == 6
    for i in range(120):
        picture(root / "ISIC_2019_Training_Input" / f"ISIC_{i:04d}.jpg", 50 + i, (30, 20))


MAKERS = {
    "digits-five": digits_five,
    "cifar-10": cifar_10,
    "cifar-100": cifar_100,
    "cifar-10-c": cifar_10_c,
    "pacs": pacs,
    "vlcs": vlcs,
    "office-home": office_home,
    "office-caltech-10": office_caltech_10,
    "domainnet": domainnet_lists,
    "camelyon17": camelyon17,
    "fairface": fairface,
    "fed-isic2019": fed_isic2019,
}
