"""Choose a learning rate on validation images, and report test images once.

python examples/tune.py [ROUNDS]
"""

from __future__ import annotations

import sys

import fednorms as fn

RATES = (0.05, 0.1, 0.2, 0.4)


def main(rounds: int) -> None:
    results = {lr: fn.run("gn", "digits-shift", rounds=rounds, lr=lr, batch_size=32) for lr in RATES}
    for lr, result in results.items():
        print(f"lr {lr:<5} validation accuracy {100 * result.scores(split='val').mean:.1f} %")
    best = max(results, key=lambda lr: results[lr].scores(split="val").mean)
    print(f"\nlr {best} is the best on validation images. On test images it has:\n{results[best]}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
