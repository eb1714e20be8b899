"""LSTM in torch and nnx, GRU in torch and equinox."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from support.zoo import losses
from unified_ddp.equivalence import JaxSide, Pair, TorchSide


class TorchRecurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.rnn = kind(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class JaxLstm(nnx.Module):
    def __init__(self, rngs) -> None:
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(5, 6, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x))


class EquinoxGru(equinox.Module):
    rnn: equinox.nn.GRUCell
    head: equinox.nn.Linear

    def __init__(self, key) -> None:
        first, second = jax.random.split(key)
        self.rnn, self.head = equinox.nn.GRUCell(5, 6, key=first), equinox.nn.Linear(6, 3, key=second)

    def __call__(self, x):
        def sequence(rows):
            def step(hidden, row):
                hidden = self.rnn(row, hidden)
                return hidden, self.head(hidden)

            return jax.lax.scan(step, jnp.zeros(6, rows.dtype), rows)[1]

        return jax.vmap(sequence)(x)


def batches():
    random = np.random.default_rng(5)
    draw = lambda size: random.normal(size=(4, 5, size)).astype(np.float32)  # noqa: E731
    return [{"x": draw(5), "y": draw(3)}]


def lstm() -> Pair:
    torch.manual_seed(0)
    model = TorchRecurrent(nn.LSTM)
    return Pair(TorchSide(model, losses.torch_regress), JaxSide(JaxLstm(nnx.Rngs(0)), losses.jax_regress), batches())


def gru() -> Pair:
    torch.manual_seed(0)
    model = TorchRecurrent(nn.GRU)
    return Pair(
        TorchSide(model, losses.torch_regress), JaxSide(EquinoxGru(jax.random.key(0)), losses.jax_regress), batches()
    )
