"""FRN, RBN and SN in plain numpy loops, written from the papers; shares no code with the library."""

from __future__ import annotations

import numpy as np


def frn(x, gamma, beta, tau=None, eps=1e-6):
    """Filter response normalization; `tau` thresholds."""
    y = np.empty_like(x)
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            nu2 = sum(v * v for v in x[n, c].ravel()) / x[n, c].size
            y[n, c] = gamma[c] * x[n, c] / np.sqrt(nu2 + eps) + beta[c]
            if tau is not None:
                y[n, c] = np.maximum(y[n, c], tau[c])
    return y


def rbn(x, gamma, beta, w_m, w_v, w_b, eps=1e-5):
    """Representative batch normalization in training; also the moments of what was normalized."""
    centred = np.empty_like(x)
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            centred[n, c] = x[n, c] + w_m[c] * x[n, c].mean()
    mean, var = centred.mean((0, 2, 3)), centred.var((0, 2, 3))
    y = np.empty_like(x)
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            z = (centred[n, c] - mean[c]) / np.sqrt(var[c] + eps)
            gate = 1 / (1 + np.exp(-(w_v[c] * z.mean() + w_b[c])))
            y[n, c] = gamma[c] * z * gate + beta[c]
    return y, mean, var


def sn(x, gamma, beta, a_mean, a_var, biased, eps=1e-5):
    """Switchable normalization in training, logits in the order instance, layer, batch."""
    images, channels, height, width = x.shape
    m_in, v_in = np.empty((images, channels)), np.empty((images, channels))
    for n in range(images):
        for c in range(channels):
            m_in[n, c] = x[n, c].mean()
            v_in[n, c] = ((x[n, c] - m_in[n, c]) ** 2).sum() / (height * width - (0 if biased else 1))
    m_ln = m_in.mean(1)
    v_ln = (v_in + m_in**2).mean(1) - m_ln**2
    m_bn = m_in.mean(0)
    v_bn = (v_in + m_in**2).mean(0) - m_bn**2
    w, u = np.exp(a_mean) / np.exp(a_mean).sum(), np.exp(a_var) / np.exp(a_var).sum()
    y = np.empty_like(x)
    for n in range(images):
        for c in range(channels):
            m = w[0] * m_in[n, c] + w[1] * m_ln[n] + w[2] * m_bn[c]
            v = u[0] * v_in[n, c] + u[1] * v_ln[n] + u[2] * v_bn[c]
            y[n, c] = gamma[c] * (x[n, c] - m) / np.sqrt(v + eps) + beta[c]
    return y, m_bn, v_bn
