"""The cases of torch's ddp_under_dist_autograd_test on the TensorPipe agent, made as torch makes them."""

from torch.testing._internal.distributed.ddp_under_dist_autograd_test import (
    DdpComparisonTest,
    DdpUnderDistAutogradTest,
)
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)
from torch.testing._internal.distributed.rpc_utils import generate_tests

globals().update(
    generate_tests("TensorPipe", TensorPipeRpcAgentTestFixture, [DdpUnderDistAutogradTest, DdpComparisonTest], __name__)
)
