"""A site that never trained: adapt the model to its images, export it, and predict.

    python examples/new_site.py [ROUNDS]

Writes into runs/new-site.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from PIL import Image

import fednorms as fn


def main(rounds: int) -> None:
    out = Path("runs/new-site")
    shutil.rmtree(out, ignore_errors=True)
    everyone = fn.federation("digits-shift")
    federation = everyone.hold_out("poster")
    print(fn.run("fedbn", federation, rounds=rounds, lr=0.2, batch_size=32, out=out / "run"))

    new = everyone.site("poster")  # its images, as a hospital would have them: class/image.png
    for part, split in new.splits.items():
        for i, (image, label) in enumerate(zip(split.x, split.y, strict=True)):
            file = out / "poster" / part / everyone.classes[label] / f"{i:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)

    print(fn.adapt(out / "run", out / "poster", epochs=5, lr=0.05, out=out / "model"))
    files = sorted((out / "poster" / "test").glob("*/*.png"))[::12]
    for answer in fn.predict(out / "model", files):
        print(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
