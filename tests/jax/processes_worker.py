"""One of several processes: runs every case and writes what its replicas got. Arguments: port, rank, size, file."""

import pickle
import sys
from pathlib import Path

import jax

port, rank, size, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", size, rank, initialization_timeout=60)

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # a safe path has neither
import processes_hooks  # noqa: E402
import processes_pmap  # noqa: E402
import processes_shard_map  # noqa: E402

modules = (processes_shard_map, processes_pmap, processes_hooks)
out.write_bytes(pickle.dumps({module.__name__: module.results() for module in modules}))
