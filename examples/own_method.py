"""A new method in ten lines: the server trusts clients that agree with the others. Compared with FedAvg, and combined.

python examples/own_method.py [ROUNDS]
"""

from __future__ import annotations

import sys

import fednorms as fn


@fn.part("agreement")
class Agreement(fn.Part):
    """Multiply a client's weight by max(floor, cos(u_k, u)), where u_k is its update and u the mean of all updates."""

    floor: float = fn.option(0.1, at_least=0.0, at_most=1.0)

    def weigh(self, r):
        mean = sum(r.updates[1:], start=r.updates[0]) / len(r.updates)
        lengths = [float(u.sqnorm().sqrt() * mean.sqnorm().sqrt()) for u in r.updates]
        cosines = [float(u.dot(mean)) / max(n, 1e-12) for u, n in zip(r.updates, lengths, strict=True)]
        return [max(self.floor, cosine) for cosine in cosines], r.mine


def main(rounds: int) -> None:
    print(fn.describe("agreement + fedbn", "cnn-small"), end="\n\n")
    methods = ["fedavg", "agreement", "agreement(floor=0.5) + fedbn"]
    print(fn.compare(methods, "digits-shift", rounds=rounds, seeds=2, lr=0.2, batch_size=32))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
