"""FDSE: layers in two halves, a consensus of unit updates, mixtures by similarity, and statistics that are aligned."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.reference.fedpac import best_weights


class Split(nn.Module):
    """A convolution or linear layer in two halves."""

    def __init__(self, old, wide, ratio=2, relu=True):
        super().__init__()
        few = math.ceil(len(old.weight) / ratio)
        flat = isinstance(old, nn.Linear)
        first = nn.Linear(old.in_features, few) if flat else nn.Conv2d(old.in_channels, few, 3, padding=old.padding)
        first.load_state_dict({"weight": old.weight.detach()[:few], "bias": old.bias.detach()[:few]})
        self.first, self.bn = first, (nn.BatchNorm1d if flat else nn.BatchNorm2d)(few).double()
        self.wide, self.shift = nn.Parameter(wide.clone()), nn.Parameter(torch.zeros(len(old.weight)).double())
        self.relu = relu

    def forward(self, x):
        z = self.bn(self.first(x))
        z = z.clamp(min=0) if self.relu else z
        each = len(self.wide) // z.shape[1]  # filters per channel
        more = []
        for i, filters in enumerate(self.wide):
            channel = z[:, i // each : i // each + 1]
            more.append(channel * filters.view(()) if z.dim() == 2 else F.conv2d(channel, filters[None], padding=1))
        y = torch.cat([z, *more], 1)[:, : len(self.shift)]
        return y + (self.shift if z.dim() == 2 else self.shift[:, None, None])


class Net(nn.Module):
    """Two layers that a BatchNorm follows, a convolution and a linear one."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc, self.norm1 = nn.Linear(20, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.hidden(x)[0])

    def hidden(self, x):
        """The features, and what both norms get."""
        a = self.conv(x)
        b = self.fc(self.pool(torch.relu(self.norm(a))).flatten(1))
        return torch.relu(self.norm1(b)), (a, b)


def apart(net, seen, start, lam, beta):
    """The distance of running statistics from those at the start."""
    total, weights = 0.0, [math.exp(beta * layer) for layer in range(len(seen))]
    for x, norm, (g, h), w in zip(seen, (net.norm, net.norm1), start, weights, strict=True):
        rows = x.transpose(0, 1).flatten(1)
        m = 0.9 * norm.running_mean + 0.1 * rows.mean(1)
        v = 0.9 * norm.running_var + 0.1 * rows.var(1)
        d = len(g)
        total = total + w / sum(weights) * (((g - m) ** 2).sum() / d + (h.sum() / d - v.sum() / d) ** 2)
    return lam * total


def consensus(start, ends):
    """A tensor moved by the mean length along the shortest convex combination of unit updates."""
    moves = [(end - start).flatten() for end in ends]
    units = [d / (d.norm() + 1e-8) for d in moves]
    gram = torch.tensor([[float(a @ b) for b in units] for a in units], dtype=torch.float64)
    a = best_weights(gram)
    along = sum(w * u for w, u in zip(a, units, strict=True))
    return start + (sum(d.norm() for d in moves) / len(moves) * along).view_as(start)


def fdse(model, clients, plans, lr, lam, tau, beta):
    """The server's model, and what each client would start the next round from of the erasers."""
    server, local = copy.deepcopy(model), [copy.deepcopy(model) for _ in clients]
    mixed: list[dict] = [{} for _ in clients]
    for t, plan in enumerate(plans):
        present = [k for k, batches in enumerate(plan) if batches is not None]
        for k in present:
            (x, y), net = clients[k], local[k]
            received = {n: v for n, v in server.state_dict().items() if ".bn.running" not in n}
            net.load_state_dict({**net.state_dict(), **copy.deepcopy(received), **mixed[k]})
            start = [(n.running_mean.clone(), n.running_var.clone()) for n in (net.norm, net.norm1)]
            optimizer = torch.optim.SGD(net.parameters(), lr=lr)
            net.train()
            for rows in plan[k]:
                optimizer.zero_grad()
                f, seen = net.hidden(x[rows])
                loss = F.cross_entropy(net.head(f), y[rows])
                if t:
                    loss = loss + apart(net, seen, start, lam, beta)
                loss.backward()
                optimizer.step()
        sent = [local[k].state_dict() for k in present]
        before = server.state_dict()
        new = {}
        for name, old in before.items():
            values = [s[name] for s in sent]
            if "running" in name:
                new[name] = sum(values) / len(values) if ".bn." not in name else old
            elif "num_batches" not in name:
                new[name] = consensus(old, values)
        server.load_state_dict({**before, **copy.deepcopy(new)})
        for name in before:
            if name.endswith(".wide") or (".bn." in name and name.endswith(("weight", "bias"))):
                for i, k in enumerate(present):
                    near = [F.cosine_similarity(sent[i][name].flatten(), s[name].flatten(), dim=0) for s in sent]
                    share = torch.stack(near).div(tau).exp()
                    mixed[k][name] = sum(w * s[name] for w, s in zip(share / share.sum(), sent, strict=True))
    return server, mixed, local
