"""A Flower app with its own data and its own network, trained with a method of fednorms: `flwr run .`.

Only `my_site` and the two lines at the end are new to such a project; the method is in pyproject.toml.
"""

import numpy as np
from flwr.app import Context
from sklearn.datasets import load_digits
from torch import nn

from fednorms import Federation, Recipe, from_arrays
from fednorms.flower import client_app, server_app


def my_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )


def my_data(number: int, of: int) -> tuple[np.ndarray, np.ndarray]:
    """One partition of the digits, each at another brightness."""
    digits = load_digits()
    mine = np.arange(number, len(digits.target), of)
    images = digits.images[mine] / 16 * (0.4 + 0.6 * number / of)
    return images[:, None].astype(np.float32), digits.target[mine]


def my_site(context: Context, recipe: Recipe) -> Federation:
    """This node's data as a federation of one site."""
    number, of = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return from_arrays(
        {f"site {number}": my_data(number, of)},
        classes=[str(digit) for digit in range(10)],
        val=0.1,
        test=0.2,
    )


client = client_app(site=my_site, model=my_net)
server = server_app(model=my_net)
