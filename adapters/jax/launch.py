"""Joining the other processes, however they were launched."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

COORDINATOR_PORT_OFFSET = 1000
"""torchrun keeps MASTER_PORT to itself, so JAX's coordinator listens that many ports further on (or back)."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    **options: Any,
) -> None:
    """Joins the other processes; call it in each, before anything uses a device.

    It is `jax.distributed.initialize`, and takes its arguments, with two additions. Under torchrun (and whatever else
    sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE) what is not given is read from there; the coordinator is at
    MASTER_ADDR, 1000 ports above MASTER_PORT. With several processes a node, each then takes the GPU of its
    LOCAL_RANK, if it sees more than one. On CPUs, collectives between processes run over gloo, JAX's default.

    Started alone, without any launcher, a process stays alone: nothing is done.

    Args:
        coordinator_address: "host:port" of process 0.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        local_device_ids: the devices that this process uses; None for all.
        options: further arguments of `jax.distributed.initialize`, such as `initialization_timeout` in seconds.

    Raises:
        ValueError: torchrun's variables are there in part only.
        RuntimeError: (by JAX) a device was used before, or the others did not come in time.
    """
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
        "local_device_ids": local_device_ids,
    }
    arguments = _from_torchrun(os.environ) | {name: value for name, value in given.items() if value is not None}
    try:
        jax.distributed.initialize(**arguments, **options)
    except ValueError as error:  # how JAX says that it found no launcher
        if arguments or "coordinator_address should be defined" not in str(error):
            raise


def _from_torchrun(env: Mapping[str, str]) -> dict[str, Any]:
    """The arguments that torchrun's environment gives; empty where it is not torchrun's."""
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in env]
    if len({"RANK", "WORLD_SIZE"} & set(missing)) == 2:
        return {}
    if missing:
        raise ValueError(
            f"the environment has {', '.join(n for n in names if n in env)} but not {', '.join(missing)}; launch with "
            "torchrun, set all of them, or pass coordinator_address, num_processes and process_id"
        )
    port = int(env["MASTER_PORT"])
    port += COORDINATOR_PORT_OFFSET if port + COORDINATOR_PORT_OFFSET <= 65535 else -COORDINATOR_PORT_OFFSET
    arguments: dict[str, Any] = {
        "coordinator_address": f"{env['MASTER_ADDR']}:{port}",
        "num_processes": int(env["WORLD_SIZE"]),
        "process_id": int(env["RANK"]),
    }
    sees_one = len(env.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) == 1
    if int(env.get("LOCAL_WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in env and not sees_one:
        arguments["local_device_ids"] = [int(env["LOCAL_RANK"])]
    return arguments
