"""A linear model in numpy alone, as either side: starts in no time, and may be wrong or fail in many ways."""

import os
import subprocess
import sys
import time

import numpy as np

from unified_ddp.equivalence import EquivalenceError, Evaluation, Reduction, SideInfo, TensorInfo, Trajectory


class NumpySide:
    framework = "numpy"
    has_optimizer = True

    def __init__(self, factor=1.0, summed=False):
        self.factor, self.summed = factor, summed

    def tensors(self):
        shapes = {"weight": (4, 3), "bias": (3,)}
        return tuple(TensorInfo(f"dense.{k}", s, "float32", owner="dense", key=k) for k, s in shapes.items())

    def values(self):
        random = np.random.default_rng(0)
        return {t.name: random.standard_normal(t.shape).astype("float32") for t in self.tensors()}

    def randomness(self, values, batch):
        return ""

    def evaluate(self, values, batch, dtype, *, gradients=True):
        x, y = batch["x"].astype(dtype), batch["y"].astype(dtype)
        weight, bias = values["dense.weight"].astype(dtype), values["dense.bias"].astype(dtype)
        error = x @ weight + bias - y
        grad = self.factor * 2 * error / error.size
        grads = {"dense.weight": x.T @ grad, "dense.bias": grad.sum(0)} if gradients else {}
        loss = np.asarray(self.factor * (error**2).mean())
        return Evaluation({"output": x @ weight + bias}, loss, grads, {})

    def reduce(self, values, shards, dtype, buckets=None):
        local = tuple(self.evaluate(values, shard, dtype).gradients for shard in shards)
        divisor = 1 if self.summed else len(shards)
        mean = {name: (sum(g[name] for g in local) / divisor).astype(dtype) for name in local[0]}
        return Reduction((mean,) * len(shards), local, (("dense.bias", "dense.weight"),))

    def update(self, values, gradients, dtype):
        states, now = [], {name: value.astype(dtype) for name, value in values.items()}
        for grads in gradients:
            now = {name: now[name] - np.asarray(0.1, dtype) * grads[name].astype(dtype) for name in now}
            states.append(now)
        return tuple(states)

    def train(self, values, batches, dtype):
        losses, states, now = [], [], values
        for batch in batches:
            run = self.evaluate(now, batch, dtype)
            (now,) = self.update(now, [run.gradients], dtype)
            losses.append(float(run.loss))
            states.append(now)
        return Trajectory(tuple(losses), tuple(states), ({},) * len(states))

    def info(self):
        return SideInfo("numpy", {"numpy": np.__version__}, {"python": sys.executable}, ("cpu",), 15, 2)


def batches(count=2):
    random = np.random.default_rng(1)
    return [{"x": random.standard_normal((8, 4)), "y": random.standard_normal((8, 3))} for _ in range(count)]


def first():
    return NumpySide(), batches()


def second():
    return NumpySide()


def tripled():
    return NumpySide(factor=3.0)


def summed():
    return NumpySide(summed=True)


def with_other_batches():
    return NumpySide(), batches(3)


def with_a_generator():
    return NumpySide(), (batch for batch in batches())


def with_an_object():
    return NumpySide(), [{"x": object()}]


def nothing():
    return None


def raises():
    raise KeyError("no such checkpoint")


def refuses():
    raise EquivalenceError("the checkpoint has no weights for 'dense'")


def dies():
    print("out of memory", flush=True)
    os._exit(7)


class Failing(NumpySide):
    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def evaluate(self, values, batch, dtype, *, gradients=True):
        self.fail()
        raise AssertionError("does not return")


def divides():
    return Failing(lambda: 1 // 0), batches()


def dies_later():
    return Failing(lambda: os._exit(9)), batches()


def hangs():
    return Failing(lambda: time.sleep(600)), batches()


def hangs_with_a_child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"started {process.pid} from {os.getpid()}", flush=True)
    return hangs()
