"""What torch's class has, ours has."""

import os
import subprocess
import sys

from conformance.api_coverage import LEFT_OUT
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def test_nothing_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "conformance.api_coverage"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 members missing or different" in done.stdout


def test_what_is_left_out_exists_in_torch() -> None:
    for member, why in LEFT_OUT.items():
        kind, _, name = member.partition(".")
        assert kind in ("class", "instance", "reducer", "logger")
        assert kind != "class" or name in vars(TorchDDP)
        assert why
