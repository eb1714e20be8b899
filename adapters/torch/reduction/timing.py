"""When the phases of an iteration began and ended, on the host and, on accelerators, on the device."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

FORWARD_START = "forward_compute_time_start"
BACKWARD_START = "backward_compute_time_start"
BACKWARD_END = "backward_compute_time_end"
COMM_START = "backward_comm_time_start"
COMM_END = "backward_comm_time_end"

_DURATIONS = {
    "forward_compute_time": (FORWARD_START, BACKWARD_START),
    "backward_compute_time": (BACKWARD_START, BACKWARD_END),
    "backward_comm_time": (COMM_START, COMM_END),
    "backward_compute_comm_overlap_time": (COMM_START, BACKWARD_END),
}


@dataclass(frozen=True)
class Moment:
    """A point in time: nanoseconds since the epoch, and the device's event."""

    host: int
    event: Any = None


@dataclass
class StepTimer:
    """Records the moments of one iteration, if it is sampled.

    Args:
        device: where the module is; on accelerators durations are measured by events on the current stream.
    """

    device: torch.device
    enabled: bool = False
    moments: dict[str, Moment] = field(default_factory=dict)

    def begin(self, enabled: bool) -> None:
        """Starts an iteration."""
        self.enabled = enabled
        self.moments = {}
        self.mark(FORWARD_START)

    def mark(self, name: str) -> None:
        """Records a moment; the first one of its name counts."""
        if self.enabled and name not in self.moments:
            event = None
            if self.device.type != "cpu":
                event = torch.Event(self.device, enable_timing=True)
                event.record()
            self.moments[name] = Moment(time.time_ns(), event)


def durations(moments: dict[str, Moment]) -> dict[str, int]:
    """Returns the iteration's durations in nanoseconds; on accelerators this waits for the device."""
    found = {}
    for name, (start, end) in _DURATIONS.items():
        if start in moments and end in moments:
            a, b = moments[start], moments[end]
            if a.event is None:
                found[name] = max(b.host - a.host, 0)
            else:
                for moment in (a, b):  # they may be on different streams
                    moment.event.synchronize()
                found[name] = max(int(a.event.elapsed_time(b.event) * 1e6), 0)
    return found
