"""FRAug in its reduced form: three losses of one step, each differentiated only for its own network."""

from __future__ import annotations

import torch
from torch import nn


def stack(inputs, hidden, outputs, tensors, prefix, last_relu):
    layers = [nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs)]
    layers += [nn.BatchNorm1d(outputs), *([nn.ReLU()] if last_relu else [])]
    net = nn.Sequential(*layers).double()
    net.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}, strict=False)
    return net.train()


def _norm(x):
    return torch.stack([row.norm() for row in x]).mean()


def stepped(tensors, gradients, make, lr, clip):
    """The tensors after one step of an optimizer of their own, made by `make(params, lr)`."""
    moved = {name: tensors[name].clone().requires_grad_() for name in gradients}
    for name, w in moved.items():
        w.grad = gradients[name].clone()
    if clip:
        nn.utils.clip_grad_norm_(moved.values(), clip)
    make(moved.values(), lr).step()
    return {name: w.detach() for name, w in moved.items()}


def one_step(model, features, tensors, x, y, z, means, ratio, lam_g, lam_ft):
    """Gradients of the model, the generator and the private network, as three dictionaries."""
    classes, d, latent = model.head.out_features, model.head.in_features, z.shape[1]
    generator = stack(latent + classes, d, d, tensors, "fraug.generator.", last_relu=True)
    private = stack(d + classes, latent, d, tensors, "fraug.local.", last_relu=False)
    label, m = torch.eye(classes).double()[y], means[y]
    ce = nn.functional.cross_entropy

    with torch.no_grad():
        synthetic = ratio * (m + private(torch.cat([generator(torch.cat([z, label], 1)), label], 1))) + (1 - ratio) * m
    r = min(0.5, ratio)
    loss = (1 - r) * ce(model.head(features(model.train(), x)), y) + r * ce(model.head(synthetic), y)
    of_model = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True)
    )

    fake = generator(torch.cat([z, label], 1))
    loss = ce(model.head(fake), y) - lam_g * _norm(fake - m)
    of_generator = torch.autograd.grad(loss, list(generator.parameters()))

    made = m + private(torch.cat([fake.detach(), label], 1))
    p = model.head(made).softmax(1)
    loss = (p * p.log()).sum(1).mean() + lam_ft * _norm(made - m)
    of_private = torch.autograd.grad(loss, list(private.parameters()))
    return (
        of_model,
        dict(zip(dict(generator.named_parameters()), of_generator, strict=True)),
        dict(zip(dict(private.named_parameters()), of_private, strict=True)),
    )
