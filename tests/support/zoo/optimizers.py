"""Optimizers that are one in torch and optax, and near misses."""

import jax
import jax.numpy as jnp
import optax
import torch

LR = 0.05


def sgd(model):
    return torch.optim.SGD(model.parameters(), LR)


def momentum(model):
    return torch.optim.SGD(model.parameters(), LR, momentum=0.9)


def adam(model):
    return torch.optim.Adam(model.parameters(), LR)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), LR, weight_decay=0.1)


def clipped(model):
    optimizer = torch.optim.SGD(model.parameters(), LR)

    def step():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return step


def scheduled(model):
    optimizer = torch.optim.SGD(model.parameters(), LR)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def clip_as_torch(limit):
    """Torch divides by norm + 1e-6."""

    def update(updates, state, params=None):
        norm = optax.global_norm(updates)
        return jax.tree.map(lambda g: g * jnp.minimum(limit / (norm + 1e-6), 1.0), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


decaying = optax.exponential_decay(LR, transition_steps=1, decay_rate=0.9)

RIGHT = {
    "sgd": (sgd, optax.sgd(LR)),
    "momentum": (momentum, optax.sgd(LR, momentum=0.9)),
    "adam": (adam, optax.adam(LR)),
    "adamw": (adamw, optax.adamw(LR, weight_decay=0.1)),
    "clipping": (clipped, optax.chain(clip_as_torch(0.1), optax.sgd(LR))),
    "schedule": (scheduled, optax.sgd(decaying)),
}

WRONG = {
    "Adam's eps within the root": (adam, optax.adam(LR, eps=0.0, eps_root=1e-8)),
    "AdamW's decay not decoupled": (adamw, optax.chain(optax.add_decayed_weights(0.1), optax.adam(LR))),
    "AdamW's decay at optax's default": (adamw, optax.adamw(LR)),
    "schedule off by one": (scheduled, optax.sgd(lambda count: decaying(count + 1))),
    "Nesterov's momentum": (momentum, optax.sgd(LR, momentum=0.9, nesterov=True)),
    "dampened momentum": (momentum, optax.chain(optax.scale(0.1), optax.sgd(LR, momentum=0.9))),
    "clipping by tensor": (clipped, optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(LR))),
    "clipping with optax's formula": (clipped, optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(LR))),
    "Adam's beta2": (adam, optax.adam(LR, b2=0.99)),
    "learning rate": (sgd, optax.sgd(LR * 1.0001)),
}
