"""The cases of torch's distributed_test over gloo; each case's ranks are started by the harness."""

import torch
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

__all__ = ["TestDistBackendWithSpawnGLOO"]


class TestDistBackendWithSpawnGLOO(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()
