"""What crosses between processes, and how programs are found."""

import collections
import io
import socket
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from unified_ddp.equivalence import EquivalenceError, Evaluation, TensorInfo
from unified_ddp.equivalence.processes import messages
from unified_ddp.equivalence.processes.loading import Program
from unified_ddp.equivalence.processes.remote import RemoteSide, SideRaisedError

SIDE = Path(__file__).parent / "sides" / "numpy_side.py"
DTYPES = ["bool", "int8", "uint64", "float16", "float32", "float64", "complex64", "complex128"]
Point = collections.namedtuple("Point", ["x", "y"])


def there_and_back(value):
    file = io.BytesIO()
    messages.write(value, file)
    file.seek(0)
    return messages.read(file)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_arrays_keep_dtype_shape_and_bits(dtype, shape):
    array = np.random.default_rng(0).integers(0, 255, (*shape, 16), "uint8").view(dtype)[..., 0]
    again = there_and_back({"a": array})["a"]
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()


def test_trees_and_records_keep_their_kind():
    array = np.arange(3.0)
    info = TensorInfo("a", (3,), "float32", aliases=(TensorInfo("b", (3,), "float32"),), options={"groups": 2})
    value = {"list": [1, 2.5, None, True], "tuple": (array, "text"), 3: {"inf": float("inf")}, "info": info}
    again = there_and_back(value)
    assert again["list"] == value["list"]
    assert isinstance(again["tuple"], tuple)
    assert again[3] == value[3]
    assert again["info"] == info
    assert there_and_back(Point(1, array)).y.tolist() == [0, 1, 2]
    run = there_and_back(Evaluation({"y": array}, np.float32(1.5), {}, {}))
    assert (run.loss.dtype, float(run.loss)) == (np.float32, 1.5)


@pytest.mark.parametrize("value", [{"x": object()}, {"x": [len]}, np.array(["a", None], dtype=object)])
def test_what_is_no_array_is_refused(value):
    with pytest.raises(EquivalenceError, match="give numpy arrays"):
        there_and_back(value)


def test_a_digest_tells_values_apart_and_not_the_order_of_keys():
    value = {"a": np.arange(3.0), "b": np.arange(4)}
    assert messages.digest(value) == messages.digest(dict(reversed(value.items())))
    others = [{**value, "a": np.arange(3.0) + 2.0**-50}, {**value, "b": np.arange(4.0)}, {**value, "c": 1}]
    assert len({messages.digest(v) for v in [value, *others]}) == 4


def test_large_values_cross_a_socket():
    ours, theirs = socket.socketpair()
    array = np.random.default_rng(0).standard_normal(500_000)
    thread = threading.Thread(target=messages.send, args=(theirs, (array, "done")))
    thread.start()
    again, text = messages.receive(ours)
    thread.join()
    assert (again == array).all()
    assert text == "done"
    theirs.close()
    with pytest.raises(messages.Closed):
        messages.receive(ours)
    ours.close()


def test_what_is_no_message_is_refused():
    with pytest.raises(EquivalenceError, match="no values can be read"):
        messages.read(io.BytesIO(b"PK nonsense"))


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("from unified_ddp.equivalence import TorchSide\ndef make(): return TorchSide()", "torch"),
        ("import unified_ddp.equivalence as e\ndef make(): return e.JaxSide()", "jax"),
        ("def make(): return TorchSide() or JaxSide()", ""),
        ("def make(): return None", ""),
    ],
)
def test_the_framework_is_told_by_the_class_that_a_file_names(tmp_path, text, framework):
    file = tmp_path / "side.py"
    file.write_text(text)
    assert Program.parse(f"{file}:make").framework() == framework


@pytest.mark.parametrize(
    "text",
    [
        "def make(): pass",
        "make = lambda: None",
        "from other import make",
        "from other import *",
        "if 1:\n  def make(): 0",
    ],
)
def test_a_function_is_found_however_it_is_defined(tmp_path, text):
    file = tmp_path / "side.py"
    file.write_text(text)
    assert Program.parse(f"{file}:make").function == "make"


def test_a_file_that_is_no_python_is_named(tmp_path):
    file = tmp_path / "side.py"
    file.write_text("def make(:")
    with pytest.raises(EquivalenceError, match=r"side.py cannot be read as Python"):
        Program.parse(f"{file}:make")


def test_a_side_in_a_process_answers_as_the_side_itself(tmp_path):
    program = Program.parse(f"{SIDE}:first")
    side, batches = program.make()
    with RemoteSide(program, sys.executable, tmp_path, 2, 60) as remote:
        remote.start()
        assert remote.tensors() == side.tensors()
        assert (remote.framework, remote.has_optimizer) == ("numpy", True)
        values, run = remote.values(), side.evaluate(side.values(), batches[0], "float32")
        again = remote.evaluate(values, remote.batches[0], "float32")
        assert all(
            (again.gradients[n] == g).all() and again.gradients[n].dtype == g.dtype for n, g in run.gradients.items()
        )
        reduced = remote.reduce(values, batches, "float64", [["dense.weight"], ["dense.bias"]])
        assert (
            reduced.reduced[1]["dense.bias"] == side.reduce(values, batches, "float64").reduced[1]["dense.bias"]
        ).all()
        assert remote.train(values, batches, "float32").losses == side.train(values, batches, "float32").losses
        with pytest.raises(SideRaisedError, match="in evaluate, raised KeyError"):
            remote.evaluate({}, batches[0], "float32")
        assert remote.info() == side.info()  # it goes on after an error
    assert remote._child.process.returncode is not None


def test_a_process_that_was_killed_is_named(tmp_path):
    program = Program.parse(f"{SIDE}:first")
    with RemoteSide(program, sys.executable, tmp_path, 2, 60) as remote:
        values = remote.values()
        remote._child.process.kill()
        remote._child.process.wait()
        with pytest.raises(EquivalenceError, match=r"numpy_side.py:first \(pid \d+\) was ended by signal 9"):
            remote.evaluate(values, remote.batches[0], "float32")
