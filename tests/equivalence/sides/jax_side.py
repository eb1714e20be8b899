"""The same model in JAX, as the second side."""

import jax
import jax.numpy as jnp
import numpy as np

from unified_ddp.equivalence import JaxSide


def params():
    random = np.random.default_rng(1)

    def dense(rows, columns):
        kernel = random.standard_normal((rows, columns)).astype("float32") / np.sqrt(rows)
        return {"kernel": kernel, "bias": np.zeros(columns, "float32")}

    norm = {"scale": np.ones(8, "float32"), "bias": np.zeros(8, "float32")}
    return {"dense1": dense(6, 8), "norm": norm, "dense2": dense(8, 3)}


def forward(params, x, eps):
    x = x @ params["dense1"]["kernel"] + params["dense1"]["bias"]
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + eps)
    x = jax.nn.relu(x * params["norm"]["scale"] + params["norm"]["bias"])
    return x @ params["dense2"]["kernel"] + params["dense2"]["bias"]


def loss_with(eps):
    def loss(params, batch):
        logits = forward(params, batch["x"], eps)
        rows = jnp.arange(len(logits))
        return -jax.nn.log_softmax(logits)[rows, batch["y"]].mean(), {"logits": logits}

    return loss


def make():
    return JaxSide(params(), loss_with(1e-5))


def make_wrong_eps():
    return JaxSide(params(), loss_with(1e-3))
