"""The JAX side: one process, one device a rank. Trains under shard_map and, next to it, by plain autograd."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax import shard_map
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from unified_ddp.equivalence.demo.config import Side, VerifyConfig
from unified_ddp.equivalence.demo.data import BUFFERS, SGD_MOMENTUM, Shards
from unified_ddp.equivalence.demo.exchange import Exchange, StepRecord
from unified_ddp.equivalence.demo.faults import break_process, faulty_hook
from unified_ddp.jax import DistributedDataParallel
from unified_ddp.jax.equivalence.demo_model import loss_and_buffers
from unified_ddp.plan import BucketPlan

AXIS = "data"
Tree = dict[str, jax.Array]
Arrays = dict[str, np.ndarray]


def run_side(exchange: Exchange, config: VerifyConfig) -> None:
    """Trains all ranks to the end and records each step.

    Raises:
        RuntimeError: JAX was started with fewer devices than ranks.
    """
    exchange.put_versions(Side.JAX, {"jax": jax.__version__, "flax": version("flax")})
    devices = jax.devices("cpu")
    if len(devices) < config.world_size:
        raise RuntimeError(f"JAX has {len(devices)} CPU devices for {config.world_size} ranks; see XLA_FLAGS")
    mesh = Mesh(np.array(devices[: config.world_size]), (AXIS,))
    shards, weights = exchange.wait_for_inputs()
    _Trainer(config, mesh, weights, exchange.wait_for_plan(Side.TORCH, 0)).train(exchange, shards)


class _Trainer:
    def __init__(self, config: VerifyConfig, mesh: Mesh, weights: Arrays, plan: BucketPlan) -> None:
        self.config, self.mesh = config, mesh
        self.hook = faulty_hook(config, Side.JAX)
        self.ddp = DistributedDataParallel(weights, axis_name=AXIS, plan=plan, comm_hook=self.hook)
        self.params: Tree = self._replicated(weights)
        self.momentum: Tree = self._replicated({name: np.zeros_like(value) for name, value in weights.items()})
        self.buffers: Tree = self._sharded(self._fresh_buffers())
        self.hook_state = self._sharded(self.ddp.init_hook_state(config.world_size))
        self.plain_grad = jax.jit(jax.value_and_grad(loss_and_buffers, has_aux=True))
        self.mapped_step = self._make_step()

    def train(self, exchange: Exchange, shards: Shards) -> None:
        for rank in range(self.config.world_size):
            exchange.put_plan(Side.JAX, rank, self.ddp.plan)
        for step in range(self.config.steps):
            break_process(self.config, Side.JAX, self.config.rank_at_fault, step)
            for rank, record in enumerate(self._step(shards.images[step], shards.labels[step])):
                exchange.put_step(Side.JAX, rank, step, record)

    def _make_step(self) -> Callable[..., tuple[Tree, Tree, Tree, Any, Tree, jax.Array]]:
        def step(params: Tree, momentum: Tree, shard: Any) -> tuple[Tree, Tree, Tree, Any, Tree, jax.Array]:
            buffers, hook_state, images, labels = jax.tree.map(lambda a: a[0], shard)
            buffers = self.ddp.sync_buffers(buffers)
            value_and_grad = self.ddp.value_and_grad(loss_and_buffers, has_aux=True, hook_state=hook_state)
            (loss, buffers), grads, hook_state = value_and_grad(params, buffers, images, labels)
            momentum = jax.tree.map(lambda m, g: SGD_MOMENTUM * m + g, momentum, grads)
            params = jax.tree.map(lambda p, m: p - self.config.learning_rate * m, params, momentum)
            buffers, hook_state = jax.tree.map(lambda a: a[None], (buffers, hook_state))
            return params, momentum, buffers, hook_state, grads, loss[None]

        split, same = P(AXIS), P()
        # A broken reduction leaves gradients that differ by replica, which check_vma would refuse before anything ran.
        mapped = shard_map(
            step,
            mesh=self.mesh,
            in_specs=(same, same, split),
            out_specs=(same, same, split, split, same, split),
            check_vma=self.hook is None,
        )
        return jax.jit(mapped)

    def _step(self, images: np.ndarray, labels: np.ndarray) -> list[StepRecord]:
        plain = self._plain_step(images, labels)
        shard = (self.buffers, self.hook_state, *self._sharded((images, labels)))
        self.params, self.momentum, self.buffers, self.hook_state, reduced, losses = jax.block_until_ready(
            self.mapped_step(self.params, self.momentum, shard)
        )
        buffers = jax.device_get(self.buffers)
        return [
            StepRecord(
                loss=float(losses[rank]),
                reduced=self._on_rank(rank, reduced),
                local=grads,
                buffers={name: value[rank] for name, value in buffers.items()},
                plain_buffers=plain_buffers,
            )
            for rank, (plain_buffers, grads) in enumerate(plain)
        ]

    def _plain_step(self, images: np.ndarray, labels: np.ndarray) -> list[tuple[Arrays, Arrays]]:
        """What each rank would get alone, at its own weights and rank 0's buffers: (buffers, gradients)."""
        first = {name: value[0] for name, value in jax.device_get(self.buffers).items()}
        results = []
        for rank in range(self.config.world_size):
            args = (self._on_rank(rank, self.params), first, images[rank], labels[rank])
            (_, buffers), grads = self.plain_grad(*args)
            results.append(jax.device_get((buffers, grads)))
        return results

    def _on_rank(self, rank: int, tree: Tree) -> Arrays:
        """One replica's own copy: after a broken reduction, arrays that are replicated by type differ by device."""
        device = self.mesh.devices.flat[rank]
        return {
            name: next(np.asarray(s.data) for s in value.addressable_shards if s.device == device)
            for name, value in tree.items()
        }

    def _fresh_buffers(self) -> Arrays:
        ones, counter = self.config.dtype, np.int32
        return {
            name: np.ones((self.config.world_size, *shape), ones)
            if name.endswith("running_var")
            else np.zeros((self.config.world_size, *shape), counter if name.endswith("tracked") else ones)
            for name, shape in BUFFERS.items()
        }

    def _replicated(self, tree: Arrays) -> Tree:
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def _sharded(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, P(AXIS)))
