"""The reduced rung, and steps that are not ours, on real ranks and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.zoo import cnn, mlp

from unified_ddp.equivalence import EquivalenceError, Pair, check_gradients
from unified_ddp.jax import DistributedDataParallel

DTYPE = "float32"


def summed(params):
    return DistributedDataParallel(params, comm_hook=lambda bucket: jax.lax.psum(bucket.storage, bucket.axis_name))


def unreduced(params):
    return DistributedDataParallel(params, comm_hook=lambda bucket: bucket.storage)


def torch_sum(module):
    from unified_ddp.torch import DistributedDataParallel

    return DistributedDataParallel(module, reduction="sum")


def torchs_own(module):
    return torch.nn.parallel.DistributedDataParallel(module)


def sharded(module):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def test_both_real_layers_agree() -> None:
    report = cnn.pair().check("reduced", power=False).assert_ok()
    rung = report.rungs[-1]
    assert {(f.side, f.rank) for f in rung.findings} == {
        (None, None),
        ("torch", 0),
        ("torch", 1),
        ("jax", 0),
        ("jax", 1),
    }
    names = [name for bucket in report.buckets for name in bucket.names]
    assert sorted(names) == sorted(f.name for f in rung.findings if f.side is None)


@pytest.mark.parametrize(
    ("layer", "note"),
    [(summed, "the second side is 2 times the first"), (unreduced, "rank 0's own gradient")],
)
def test_a_wrong_reduction_is_told_from_a_wrong_model(layer, note) -> None:
    pair = Pair(mlp.jax_side(), mlp.jax_side(ddp=layer), mlp.batches())
    report = pair.check("reduced", power=False)
    assert report.first_failure is not None
    assert report.first_failure.name == "reduced"
    own = [f for f in report.first_failure.findings if f.side == "jax" and f.verdict == "differs"]
    assert len(own) >= 4
    assert any(note in f.note for f in own)


def test_a_wrong_reduction_of_torch_ranks_is_caught() -> None:
    pair = Pair(mlp.torch_side(ddp=torch_sum), mlp.jax_side(), mlp.batches())
    report = pair.check("reduced", power=False)
    assert report.first_failure is not None
    assert {f.side for f in report.first_failure.findings if f.verdict == "differs"} == {"torch", None}


@pytest.mark.parametrize("wrap", [torchs_own, sharded])
def test_torchs_own_wrappers(wrap) -> None:
    check_gradients(mlp.torch_side(ddp=wrap), mlp.batches()[0], ranks=2).assert_ok()


def mesh():
    return Mesh(np.asarray(jax.devices()[:4]), ("data",))


def loss(params, batch):
    return mlp.jax_loss(params, batch)[0]


def jitted(params, batch):
    """Parameters sharded over the axis as far as their shapes go, the batch over its rows."""
    rows = NamedSharding(mesh(), P("data"))
    places = jax.tree.map(
        lambda p: NamedSharding(mesh(), P(*["data" if n % 4 == 0 else None for n in p.shape])), params
    )
    return jax.jit(jax.grad(loss), in_shardings=(places, rows), out_shardings=places)(params, batch)


def mapped(params, batch, reduce=jax.lax.pmean):
    replica = lambda params, batch: reduce(jax.grad(loss)(params, batch), "data")  # noqa: E731
    specs = {"mesh": mesh(), "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    return jax.jit(jax.shard_map(replica, **specs))(params, batch)


def reduced_twice(params, batch):
    return mapped(params, batch, reduce=jax.lax.psum)


def one_shard_four_times(params, batch):
    return mapped(params, jax.tree.map(lambda x: jnp.tile(x[:2], (4, *[1] * (x.ndim - 1))), batch))


@pytest.mark.parametrize("step", [jitted, mapped])
def test_right_steps_of_the_users_own(step) -> None:
    check_gradients(mlp.jax_side(), mlp.batches()[0], ranks=4, step=step).assert_ok()


@pytest.mark.parametrize(
    ("step", "note"),
    [(reduced_twice, "the second side is 4 times the first"), (one_shard_four_times, "rank 0's own gradient")],
)
def test_wrong_steps_of_the_users_own(step, note) -> None:
    report = check_gradients(mlp.jax_side(), mlp.batches()[0], ranks=4, step=step)
    assert not report.ok
    assert all(note in f.note for f in report.findings)


def test_a_jax_side_needs_a_step() -> None:
    with pytest.raises(EquivalenceError, match="needs step="):
        check_gradients(mlp.jax_side(), mlp.batches()[0])


def test_rows_that_ranks_cannot_share() -> None:
    with pytest.raises(EquivalenceError, match="8 rows, which 3 ranks cannot share evenly"):
        check_gradients(mlp.torch_side(), mlp.batches()[0], ranks=3)


def test_an_update_needs_optimizers_on_both_sides() -> None:
    pair = mlp.pair(None, optax.sgd(0.1))
    with pytest.raises(EquivalenceError, match="the first side \\(torch\\) has none"):
        pair.check("update")
