"""Values with arrays as npz, in files and over sockets. No pickle: nothing that is read is ever executed.

An archive holds its arrays and, as JSON, the value with references to them. numpy writes bfloat16 and float8 without
their type, so these go as integers of their bits and bear their name in the JSON.
"""

import collections
import hashlib
import io
import json
import socket
import struct
import zipfile
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import IO, Any

import numpy as np

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.results import BucketTime, SideInfo
from unified_ddp.equivalence.side import Evaluation, Reduction, TensorInfo, Trajectory

_RECORDS = {cls.__name__: cls for cls in (BucketTime, Evaluation, Reduction, SideInfo, TensorInfo, Trajectory)}
_TREE = "tree"
_LENGTH = struct.Struct("<Q")


class Closed(Exception):
    """The other end of a socket is closed."""


def write(value: Any, file: IO[bytes]) -> None:
    """Writes a value: numbers, strings, lists, tuples, dicts, arrays, and the records of sides.

    Raises:
        EquivalenceError: it holds something else.
    """
    arrays: dict[str, np.ndarray] = {}

    def keep(array: np.ndarray) -> str:
        name = f"a{len(arrays)}"
        arrays[name] = array
        return name

    tree = json.dumps(_encoded(value, keep, ""))
    np.savez(file, allow_pickle=False, **{_TREE: np.frombuffer(tree.encode(), np.uint8)}, **arrays)


def read(file: IO[bytes]) -> Any:
    """Returns what `write` wrote.

    Raises:
        EquivalenceError: it is no such file.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            return _decoded(json.loads(archive[_TREE].tobytes()), archive)
    except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise EquivalenceError(f"no values can be read: {error}") from error


def digest(value: Any) -> str:
    """Returns a hash of a value that is the same wherever it is taken."""
    state = hashlib.sha256()

    def add(array: np.ndarray) -> str:
        state.update(np.ascontiguousarray(array).tobytes())
        return f"{array.dtype.str}{array.shape}"

    state.update(json.dumps(_encoded(_in_order(value), add, "")).encode())
    return state.hexdigest()[:32]


def _in_order(value: Any) -> Any:
    """Dicts of arrays are equal whatever order their keys came in."""
    if isinstance(value, dict):
        return {key: _in_order(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_in_order(item) for item in value]
    return value


def send(stream: socket.socket, value: Any) -> None:
    """Sends a value over a socket."""
    file = io.BytesIO()
    write(value, file)
    payload = file.getbuffer()
    stream.sendall(_LENGTH.pack(len(payload)))
    stream.sendall(payload)


def receive(stream: socket.socket, idle: Callable[[], None] = lambda: None) -> Any:
    """Returns the next value.

    Args:
        stream: if it has a timeout, `idle` is called whenever nothing came for that long; it may raise.
        idle: see there.

    Raises:
        Closed: the other end is closed.
    """
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size, idle))
    return read(io.BytesIO(_exactly(stream, length, idle)))


def _exactly(stream: socket.socket, size: int, idle: Callable[[], None]) -> bytearray:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        try:
            count = stream.recv_into(view[have:])
        except TimeoutError:
            idle()
            continue
        except ConnectionError as error:
            raise Closed from error
        if not count:
            raise Closed
        have += count
    return data


def _encoded(value: Any, keep: Callable[[np.ndarray], str], where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value if type(value) in (type(None), bool, int, float, str) else _plain(value)
    if isinstance(value, dict):
        return {"dict": [[_encoded(k, keep, where), _encoded(v, keep, f"{where}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encoded(item, keep, f"{where}[{i}]") for i, item in enumerate(value)]
        if hasattr(value, "_fields"):
            return {"named": type(value).__name__, "fields": list(value._fields), "items": items}
        return {"list" if isinstance(value, list) else "tuple": items}
    if is_dataclass(value) and type(value).__name__ in _RECORDS:
        return {
            "record": type(value).__name__,
            "items": {f.name: _encoded(getattr(value, f.name), keep, f"{where}.{f.name}") for f in fields(value)},
        }
    return _encoded_array(value, keep, where)


def _plain(value: Any) -> Any:
    """A number or string of a subclass, such as an enum's member, goes as what it is one of."""
    return next(base(value) for base in (bool, int, float, str) if isinstance(value, base))


def _encoded_array(value: Any, keep: Callable[[np.ndarray], str], where: str) -> Any:
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.dtype.name.startswith(("bfloat16", "float8")):
        bits = array.view(np.dtype(f"u{array.dtype.itemsize}"))
        return {"array": keep(bits), "dtype": array.dtype.name}
    if array.dtype.kind not in "biufcSU":
        raise EquivalenceError(
            f"{where.lstrip('.') or 'a value'} is a {type(value).__name__}, which is no array and no tree (dict, list, "
            "tuple) of arrays; give numpy arrays"
        )
    return {"array": keep(array)}


def _decoded(tree: Any, archive: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "dict" in tree:
        return {_decoded(k, archive): _decoded(v, archive) for k, v in tree["dict"]}
    if "list" in tree:
        return [_decoded(item, archive) for item in tree["list"]]
    if "tuple" in tree:
        return tuple(_decoded(item, archive) for item in tree["tuple"])
    if "named" in tree:
        made: Any = collections.namedtuple(tree["named"], tree["fields"])  # type: ignore[misc]
        return made(*(_decoded(item, archive) for item in tree["items"]))
    if "record" in tree:
        return _RECORDS[tree["record"]](**{name: _decoded(item, archive) for name, item in tree["items"].items()})
    array = archive[tree["array"]]
    if "dtype" in tree:
        import ml_dtypes

        return array.view(np.dtype(getattr(ml_dtypes, tree["dtype"])))
    return array
