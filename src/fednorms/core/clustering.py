"""FINCH: clustering by first neighbors, without a number of clusters or a threshold. Our own implementation.

Paper: Efficient Parameter-Free Clustering Using First Neighbor Relations. Sarfraz, Sharma and Stiefelhagen. CVPR 2019.
https://arxiv.org/abs/1902.11266
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def finch(x: Tensor) -> Tensor:
    """The cluster number of every row of x: the coarsest partition of FINCH that has more than one cluster.

    Every point is linked with its nearest neighbor by cosine similarity; clusters are the connected components.
    Clusters are then replaced by the means of their points, and so on until one cluster is left or nothing merges; that
    last step is discarded. A first partition with a single cluster is kept.

    >>> angles = torch.deg2rad(torch.tensor([0.0, 1.0, 90.0, 91.0]))
    >>> finch(torch.stack([angles.cos(), angles.sin()], 1)).tolist()
    [0, 0, 1, 1]
    """
    x = x.detach().double().cpu()
    labels = torch.arange(len(x))
    points = x
    while len(points) > 1:
        merged = _components(nearest_neighbours(points))
        count = int(merged.max()) + 1
        first = len(points) == len(x)
        if count == len(points) or (count == 1 and not first):
            break
        labels = merged[labels]
        points = cluster_means(x, labels)
    return labels


def cluster_means(x: Tensor, labels: Tensor) -> Tensor:
    """The mean of the rows of each cluster, in the order of cluster numbers.

    >>> cluster_means(torch.tensor([[0.0], [2.0], [5.0]]), torch.tensor([0, 0, 1]))
    tensor([[1.],
            [5.]])
    """
    count = int(labels.max()) + 1 if len(labels) else 0
    sums = x.new_zeros(count, x.shape[1]).index_add_(0, labels, x)
    return sums / torch.bincount(labels, minlength=count).to(x).unsqueeze(1)


def nearest_neighbours(x: Tensor, rows: int = 1024) -> Tensor:
    """For every row, the other row with the highest cosine similarity (of several equal ones, the first).

    >>> nearest_neighbours(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])).tolist()
    [1, 0, 1]
    """
    unit = normalize(x)
    found = []
    for start in range(0, len(unit), rows):  # some rows at a time: the whole matrix may not fit
        similarity = unit[start : start + rows] @ unit.T
        own = torch.arange(len(similarity))
        similarity[own, own + start] = -torch.inf
        best = similarity.amax(1, keepdim=True)
        found.append((similarity == best).to(torch.uint8).argmax(1))
    return torch.cat(found)


def _components(neighbour: Tensor) -> Tensor:
    """Connected components of the graph that links every point with its neighbor, numbered by first appearance."""
    root = list(range(len(neighbour)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i, j in enumerate(neighbour.tolist()):
        a, b = find(i), find(j)
        root[max(a, b)] = min(a, b)
    number: dict[int, int] = {}
    return torch.tensor([number.setdefault(find(i), len(number)) for i in range(len(root))])
