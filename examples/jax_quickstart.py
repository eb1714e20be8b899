import jax
import jax.numpy as jnp

from unified_ddp.jax import DistributedDataParallel

params = {"w": jnp.zeros(4), "b": jnp.zeros(())}
ddp = DistributedDataParallel(params, axis_name="data")
mesh = jax.sharding.Mesh(jax.devices(), ("data",))


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - x.sum(1)) ** 2)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
def step(params, x):
    loss, grads = ddp.value_and_grad(loss_fn)(params, x)  # gradients are averaged over the axis "data"
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), ddp.mean(loss)


for i in range(100):
    params, loss = step(params, jax.random.normal(jax.random.key(i), (64, 4)))
    loss.block_until_ready()  # several CPU devices of one process need this
print(f"{jax.device_count()} devices: loss {loss:.6f}")
