"""The job in FedJAX, whose models are functions of JAX: the network is written again."""

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from job import given

job, record = given()
if job.net != "lenet-gn":
    raise SystemExit("FedJAX averages parameters only: it has no place for statistics of batch normalization")


def conv(x, w, b):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID") + b[:, None, None]


def norm(x, scale, shift, groups=2):
    g = x.reshape(len(x), groups, -1)
    g = (g - g.mean(2, keepdims=True)) / jnp.sqrt(g.var(2, keepdims=True) + 1e-5)
    return g.reshape(x.shape) * scale[:, None, None] + shift[:, None, None]


def pooled(x):
    return jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def logits(p, x):
    def with_bias(name):
        return p[f"{name}.weight"], p[f"{name}.bias"]

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x = pooled(norm(conv(x, *with_bias("conv1")), *with_bias("norm1")))
    x = pooled(norm(conv(x, *with_bias("conv2")), *with_bias("norm2")))
    x = jax.nn.relu(linear(x.reshape(len(x), -1), "fc1"))
    return linear(jax.nn.relu(linear(x, "fc2")), "head")


def loss(p, batch, rng):
    log_p = jax.nn.log_softmax(logits(p, batch["x"]))
    return -jnp.take_along_axis(log_p, batch["y"][:, None], 1).mean()


algorithm = fed_avg.federated_averaging(
    jax.grad(loss),
    fedjax.optimizers.sgd(job.lr),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch, skip_shuffle=True),
)
state = algorithm.init({k: jnp.asarray(v.numpy()) for k, v in job.model().state_dict().items()})
data = [fedjax.ClientDataset({"x": x.numpy(), "y": y.numpy()}) for x, y in job.clients]
for number in range(job.rounds):
    keys = jax.random.split(jax.random.PRNGKey(number), job.n)
    state, _ = algorithm.apply(state, [(k, data[k], keys[k]) for k in range(job.n)])
    record.round({k: np.asarray(v) for k, v in state.params.items()})
