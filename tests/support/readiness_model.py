"""What `Readiness` should do, said as simply as possible and in no hurry."""

from collections.abc import Callable


class Refused(Exception):
    """Stands for ReadinessError."""


class ReadinessModel:
    def __init__(self, buckets: list[list[int]], on_start: Callable, on_bucket: Callable, on_param: Callable) -> None:
        self.buckets = buckets
        self.size = sum(map(len, buckets))
        self.eager: set[int] = set()
        self.on_start, self.on_bucket, self.on_param = on_start, on_bucket, on_param
        self.phase, self.resting = "IDLE", "IDLE"
        self.touched: set[int] = set()
        self.arrival = bytes(self.size)
        self.launching = False
        self._forget()

    def _forget(self) -> None:
        self.order: list[int] = []
        self.launched = 0
        self.flushed = False
        self.failed = False
        self.marked_once: set[int] = set()

    def _require(self, condition: bool) -> None:
        if not condition:
            raise Refused

    def arm(self, sync: bool) -> None:
        self.resting = "ARMED" if sync else "IDLE"
        if self.phase != "ACTIVE":
            self.phase = self.resting

    def begin(self, arrival: bytes) -> None:
        self._require(self.phase != "ACTIVE")
        self._forget()
        self.phase, self.arrival = "ACTIVE", arrival

    def _ready(self, bucket: list[int]) -> bool:
        return self.flushed or all(self.arrival[p] == 1 and p in self.marked_once for p in bucket)

    def _launch(self) -> None:
        if self.launching:
            return
        self.launching = True
        try:
            while not self.failed and self.launched < len(self.buckets) and self._ready(self.buckets[self.launched]):
                self.launched += 1
                self._call(self.on_bucket, self.launched - 1)
        finally:
            self.launching = False

    def _call(self, callback: Callable, index: int) -> None:
        try:
            callback(index)
        except BaseException:
            self.failed = True
            raise

    def mark(self, param: int) -> None:
        self.touched.add(param)
        if self.phase == "ARMED":
            self.on_start()
        if self.phase != "ACTIVE" or self.failed:
            return
        late = any(param in bucket for bucket in self.buckets[: self.launched])
        packed = param in self.eager and self.arrival[param] == 1 and param in self.marked_once
        if late or packed:
            self.failed = True
            raise Refused
        if param not in self.order:
            self.order.append(param)
        if self.arrival[param] == 1 and param not in self.marked_once:
            if param in self.eager:
                self._call(self.on_param, param)
            self.marked_once.add(param)
            self._launch()

    def flush(self) -> None:
        self._require(self.phase == "ACTIVE" and not self.failed)
        self.flushed = True
        self._launch()

    def end(self) -> None:
        self._require(self.phase == "ACTIVE" and not self.failed and self.launched == len(self.buckets))
        self.phase = self.resting
        self.touched.clear()

    def abort(self) -> None:
        self.phase = self.resting
        self._forget()

    def rebucket(self, buckets: list[list[int]]) -> None:
        self._require(self.phase != "ACTIVE")
        self.buckets = buckets
        self._forget()
