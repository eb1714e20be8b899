"""What `_get_ddp_logging_data` tells: the keys of torch's logger, with this reducer's values."""

import os
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from unified_ddp.torch.reduction.timing import durations
from unified_ddp.torch.schema import dtype_name

if TYPE_CHECKING:
    from unified_ddp.torch.parity.torchs_reducer import TorchsReducer


_C_NAMES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
_GLOO_VARIABLES = {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"}
_NCCL_VARIABLES = {
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
    "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "nccl_debug": "NCCL_DEBUG",
    "nccl_nthreads": "NCCL_NTHREADS",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
}
_GLOO_THREADS = 2  # what ProcessGroupGloo starts


class DDPLogger:
    """Collects construction facts at once and, for sampled iterations, run-time facts.

    Run-time facts of an iteration are taken at the start of the next, for the first ten iterations and then for every
    `sample_rate`-th.
    """

    def __init__(self, reducer: "TorchsReducer") -> None:
        self._reducer_ref = weakref.ref(reducer)  # the reducer holds its logger
        self.sample_rate = 100
        self.iteration = 0
        self._samples = 0
        self.strs: dict[str, str] = {}
        self.ints: dict[str, int] = {}

    @property
    def _reducer(self) -> "TorchsReducer":
        reducer = self._reducer_ref()
        assert reducer is not None
        return reducer

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map=dict(self.strs), ints_map=dict(self.ints))

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: list[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Takes what is known once the wrapper is built."""
        reducer = self._reducer
        group = reducer.transport.group
        backend = dist.get_backend(group)
        dtypes = sorted({dtype_name(p.dtype) for p in reducer.params}, key=lambda d: _C_NAMES.get(d, d))
        variables = {
            "master_addr": "MASTER_ADDR",
            "master_port": "MASTER_PORT",
            "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
            "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
        }
        if backend == "gloo":
            variables |= _GLOO_VARIABLES
            self.ints["gloo_num_threads"] = _GLOO_THREADS
        elif backend == "nccl":
            variables |= _NCCL_VARIABLES
        self.strs |= {key: os.environ.get(name, "N/A") for key, name in variables.items()}
        self.strs |= {
            "backend_name": backend,
            "module_name": module_name,
            "device_ids": ", ".join(map(str, device_ids)),
            "dtypes": ", ".join(_C_NAMES.get(d, d) for d in dtypes),
            "bucket_sizes": _bucket_sizes(reducer),
        }
        self.ints |= {
            "world_size": reducer.transport.world_size,
            "rank": reducer.transport.rank,
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
            "bucket_cap_bytes": reducer.options.caps.largest,
            "find_unused_parameters": int(reducer.options.find_unused_parameters),
            "gradient_as_bucket_view": int(reducer.options.gradient_as_bucket_view),
            "is_multi_device_module": int(len({p.device for p in reducer.params}) > 1),
            "num_parameter_tensors": len(reducer.params),
            "total_parameter_size_bytes": sum(p.nbytes for p in reducer.plan.params),
            "iteration": 0,
        }
        if static_graph:
            self._set_static_graph()

    def set_runtime_stats_and_log(self) -> None:
        """Takes the facts of the iteration that has ended, if it was sampled, and counts the next."""
        if self._is_sampled(self.iteration):
            self._take_runtime_facts()
        self.iteration += 1
        self._reducer.timer.begin(self._is_sampled(self.iteration))

    def _is_sampled(self, iteration: int) -> bool:
        return iteration > 0 and (iteration <= 10 or iteration % self.sample_rate == 0)

    def _take_runtime_facts(self) -> None:
        reducer = self._reducer
        self._samples += 1
        last = reducer.last_pass
        self.strs["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, last.order)) if last else ""
        self.ints |= {
            "iteration": self.iteration,
            "num_buckets_reduced": last.launched if last else 0,
            "has_rebuilt_buckets": int(reducer.rebuilt),
            "unused_parameter_size": sum(reducer.plan.params[i].nbytes for i in reducer.last_unused),
        }
        if reducer.rebuilt:
            self.strs |= {
                "rebuilt_bucket_sizes": _bucket_sizes(reducer),
                "rebuilt_per_bucket_param_indices": ", ".join(
                    " ".join(map(str, b.params)) for b in reducer.plan.buckets
                ),
            }
        if reducer.graph_is_static():
            self.ints["can_set_static_graph"] = 1
        else:
            self.ints.pop("can_set_static_graph", None)
        self.ints |= {name: m.host for name, m in reducer.timer.moments.items()}
        for name, value in durations(reducer.timer.moments).items():
            self.ints[name] = value
            before = self.ints.get(f"avg_{name}", 0)
            self.ints[f"avg_{name}"] = (before * (self._samples - 1) + value) // self._samples

    def set_error_and_log(self, message: str) -> None:
        """Keeps the last error."""
        self.strs["error"] = message
        self.ints["has_error"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self.strs["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self.ints["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self.ints["static_graph"] = 1


def _bucket_sizes(reducer: "TorchsReducer") -> str:
    return ", ".join(str(b.nbytes) for b in reducer.plan.buckets)


def module_facts(module: nn.Module) -> dict[str, Any]:
    """Returns the module's name and whether a SyncBatchNorm is in it."""
    return {
        "module_name": type(module).__name__,
        "has_sync_bn": any(isinstance(m, torch.nn.SyncBatchNorm) for m in module.modules()),
    }
