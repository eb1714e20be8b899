"""Several processes, launched as torch scripts are.

    torchrun --nproc-per-node 2 examples/jax_torchrun.py

Each process loads its own rows; those of a last, short batch are filled up, and every example counts the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from unified_ddp.jax import DistributedDataParallel, initialize, pad_batch

initialize()
rank, size = jax.process_index(), jax.process_count()
params = {"w": jnp.full(3, float(rank)), "b": jnp.zeros(())}  # all processes start from those of process 0


def loss_fn(params, batch):  # one loss for each example, as rows have a weight
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


step = DistributedDataParallel(params).train_step(loss_fn, optax.sgd(0.1), timeout=60)
state = step.init(params)
x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
rows = {"x": x, "y": x.sum(axis=1) + 1}
for epoch in range(20):
    order = np.random.default_rng(epoch).permutation(100)
    for start in range(0, 100, 32):  # 32, 32, 32 and 4 examples over all processes
        mine = order[start : start + 32][rank::size]
        batch, weight = pad_batch({name: value[mine] for name, value in rows.items()}, 32 // size)
        state, loss = step(state, batch, weight=weight)
print(f"process {rank} of {size}: loss {loss:.6f}, b {state.params['b']:.4f}")
