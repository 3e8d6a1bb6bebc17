"""FedDG: amplitudes are exchanged with numpy's FFT, and a second loss is taken at moved weights."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch.func import functional_call
from torch.nn import functional as F

from tests.reference.fedavg import average


def amplitude(image):
    """The amplitudes of an image (C, H, W), with frequency 0 in the middle."""
    return np.fft.fftshift(np.abs(np.fft.fft2(image)), axes=(-2, -1))


def swapped(image, target, half, share):
    """An image whose central amplitudes go this share of the way to the target's, which are all (C, H, W)."""
    f = np.fft.fftshift(np.fft.fft2(image), axes=(-2, -1))
    a, phase = np.abs(f), np.angle(f)
    h, w = image.shape[-2] // 2, image.shape[-1] // 2
    for k in range(h - half, h + half + 1):
        for m in range(w - half, w + half + 1):
            a[:, k, m] = (1 - share) * a[:, k, m] + share * target[:, k, m]
    return np.fft.ifft2(np.fft.ifftshift(a * np.exp(1j * phase), axes=(-2, -1))).real


def feddg(model, clients, targets, plans, lr, half, step, clip):
    """Each client swaps its images' amplitudes for those of one image; the server's model at the end."""
    server = copy.deepcopy(model)
    for plan in plans:
        states = []
        for (x, y), target, batches in zip(clients, targets, plan, strict=True):
            net = copy.deepcopy(server).train()
            shifted = torch.stack([torch.as_tensor(swapped(one.numpy(), target, half, 1.0)) for one in x])
            optimizer = torch.optim.SGD(net.parameters(), lr=lr)
            for rows in batches:
                optimizer.zero_grad()
                names, weights = zip(*net.named_parameters(), strict=True)
                inner = F.cross_entropy(net(x[rows]), y[rows])
                slopes = torch.autograd.grad(inner, weights, retain_graph=True)
                fast = {n: w - step * g.clamp(-clip, clip) for n, w, g in zip(names, weights, slopes, strict=True)}
                buffers = {n: b.clone() for n, b in net.named_buffers()}
                outer = F.cross_entropy(functional_call(net, {**fast, **buffers}, (shifted[rows],)), y[rows])
                (inner + outer).backward()
                optimizer.step()
            states.append(net.state_dict())
        server.load_state_dict(average(states, [float(len(x)) for x, _ in clients]))
    return server
