"""What users hand over as a JAX model, as functions of a flat dict of parameters and one of buffers.

Pytrees of parameters (flax linen's among them) and equinox modules are trees whose floating-point leaves are
parameters. flax's nnx modules are split into such a tree, module state and a graph. Only nnx needs flax, and only when
it is used.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.side import TensorInfo
from unified_ddp.jax.pytrees.schema import leaf_name

Named = dict[str, Any]


class Tree:
    """A pytree whose inexact array leaves are named; the others stay what they are.

    Attributes:
        names: of the inexact leaves, in tree order.
    """

    def __init__(self, tree: Any) -> None:
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(tree)
        self._leaves = [leaf for _, leaf in paths]
        named = [(i, leaf_name(path)) for i, (path, leaf) in enumerate(paths) if _is_inexact(leaf)]
        self._positions = [i for i, _ in named]
        self.names = [name for _, name in named]
        if len(set(self.names)) != len(self.names):
            twice = next(n for n in self.names if self.names.count(n) > 1)
            raise EquivalenceError(f"two leaves of the pytree are named '{twice}'; rename one of the keys on its path")

    def values(self) -> Named:
        """Returns the named leaves."""
        return {name: self._leaves[i] for name, i in zip(self.names, self._positions, strict=True)}

    def build(self, named: Mapping[str, Any], *, others: bool = True) -> Any:
        """Returns the tree with these leaves; with `others` False, None stands for all that is no inexact array."""
        leaves = list(self._leaves) if others else [None] * len(self._leaves)
        for name, i in zip(self.names, self._positions, strict=True):
            leaves[i] = named[name]
        return jax.tree.unflatten(self._treedef, leaves)

    def named(self, tree: Any) -> Named:
        """Returns the named leaves of a tree that `build` made with `others` False."""
        return dict(zip(self.names, jax.tree.leaves(tree), strict=True))

    def same_leaves(self, tree: Any) -> Named:
        """Returns leaves by name of any tree whose paths are those of this one's named leaves.

        Raises:
            EquivalenceError: the paths differ.
        """
        paths, _ = jax.tree_util.tree_flatten_with_path(tree)
        found = {leaf_name(path): leaf for path, leaf in paths if _is_inexact(leaf)}
        if set(found) != set(self.names):
            raise EquivalenceError(
                f"the step returned gradients {sorted(found)[:5]}, and the parameters are {sorted(self.names)[:5]}; "
                "return gradients of the structure of the parameters"
            )
        return {name: found[name] for name in self.names}

    def name_leaves(self, tree: Any) -> Named:
        """Returns the named leaves of another tree of this structure.

        Raises:
            EquivalenceError: the structure differs.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if self._treedef != treedef:  # type: ignore[operator]
            raise EquivalenceError(
                f"the loss function returned buffers of another structure than it was given: "
                f"{treedef} for {self._treedef}"
            )
        return {name: leaves[i] for name, i in zip(self.names, self._positions, strict=True)}


def _is_inexact(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and hasattr(leaf, "shape") and jnp.issubdtype(dtype, jnp.inexact)


class Program:
    """A loss function on named parameters and buffers.

    Attributes:
        params: the tree of parameters, as an optimizer sees it.
        buffers: the tree of module state.
    """

    def __init__(self, params: Any, loss_fn: Callable[..., Any], buffers: Any = None) -> None:
        self.params, self.buffers = Tree(params), Tree({} if buffers is None else buffers)
        self._loss_fn = loss_fn
        self._has_buffers = buffers is not None
        self._owners = _owners_of(params)

    def call(self, params: Named, buffers: Named, batch: Any) -> tuple[Any, Any, Named]:
        """Returns loss, outputs ({} if there are none) and the new buffers; can be traced."""
        tree = self.params.build(params)
        if not self._has_buffers:
            loss, outputs = _split(self._loss_fn(tree, batch))
            return loss, outputs, {}
        result = self._loss_fn(tree, batch, buffers=self.buffers.build(buffers))
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise EquivalenceError(
                "with buffers=, the loss function returns (loss, buffers) or (loss, buffers, outputs)"
            )
        loss, new, *outputs = result
        return loss, outputs[0] if outputs else {}, self.buffers.name_leaves(new)

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Returns what `Side.tensors` returns."""
        held = [(self.params.values(), False), (self.buffers.values(), True)]
        infos = [_info(n, leaf, buffer, self._owners) for leaves, buffer in held for n, leaf in leaves.items()]
        order = {path: i for i, path in enumerate(self._owners)}
        return tuple(sorted(infos, key=lambda info: (order.get(info.owner, len(order)), info.buffer)))

    def modules(self) -> set[str]:
        """Returns the names of the Python modules that define the model's types."""
        return {kind.rpartition(".")[0].partition(".<locals>")[0] for kind, _ in self._owners.values() if kind}

    def randomness(self) -> str:
        """Returns what draws random numbers, as far as it can be seen without a second key; "" if nothing does."""
        return ""


class NnxProgram(Program):
    """A flax nnx module; the loss function is called with a module of its own, as loss_fn(model, batch)."""

    def __init__(self, model: Any, loss_fn: Callable[..., Any]) -> None:
        from flax import nnx

        self._nnx = nnx
        graph, *(params, rest) = nnx.split(model, nnx.Param, ...)
        self._graphs = {False: graph, True: _widened(nnx, model)}
        self.params, self.buffers = Tree(params), Tree(rest)
        self._loss_fn = loss_fn
        self._owners = _owners_of(model)
        self._dropouts = [
            ".".join(map(str, path))
            for path, node in nnx.iter_graph(model)
            if isinstance(node, nnx.Dropout) and node.rate and not node.deterministic
        ]

    def call(self, params: Named, buffers: Named, batch: Any) -> tuple[Any, Any, Named]:
        """See `Program`."""
        nnx = self._nnx
        wide = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        model = nnx.merge(self._graphs[wide], self.params.build(params), self.buffers.build(buffers))
        loss, outputs = _split(self._loss_fn(model, batch))
        _, _, rest = nnx.split(model, nnx.Param, ...)
        return loss, outputs, self.buffers.name_leaves(rest)

    def randomness(self) -> str:
        """See `Program`."""
        return f"dropout in {', '.join(self._dropouts[:5])}" if self._dropouts else ""


def _widened(nnx: Any, model: Any) -> Any:
    """The graph for runs in float64: what modules hold as their dtype of computation, if float32, is float64 in it."""
    twin = nnx.clone(model)
    for _, node in nnx.iter_graph(twin):
        if isinstance(node, nnx.Module):
            for key, value in list(vars(node).items()):
                if key in ("dtype", "param_dtype") and value is not None and np.dtype(value) == np.float32:
                    setattr(node, key, jnp.float64)
    return nnx.split(twin, nnx.Param, ...)[0]


def program_of(model: Any, loss_fn: Callable[..., Any], buffers: Any = None) -> Program:
    """Returns the program of an nnx module, an equinox module or any other pytree of parameters."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        if buffers is not None:
            raise EquivalenceError("an nnx module holds its state itself; leave buffers= out")
        return NnxProgram(model, loss_fn)
    program = Program(model, loss_fn, buffers)
    if not program.params.names:
        raise EquivalenceError(
            f"JaxSide was given {type(model).__name__}, which holds no floating-point arrays; give the pytree of "
            "parameters (flax linen: variables['params']), an equinox module or an nnx module"
        )
    return program


def _split(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple):
        if len(result) != 2:
            raise EquivalenceError(
                f"the JAX loss function returned {len(result)} values; it returns loss or (loss, outputs)"
            )
        loss, outputs = result
        return loss, outputs
    return result, {}


def _info(name: str, leaf: Any, buffer: bool, owners: dict[str, tuple[str, dict[str, Any]]]) -> TensorInfo:
    owner, _, key = name.rpartition(".")
    owner_type, options = owners.get(owner, ("", {}))
    return TensorInfo(name, tuple(leaf.shape), str(np.dtype(leaf.dtype)), buffer, owner, owner_type, key, (), options)


def _owners_of(tree: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns paths of containers in order of definition, with the full names of modules' types and their options.

    Pytrees flatten dicts by sorted keys and nnx its attributes; what was defined first is known only here.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    seen: set[int] = set()

    def walk(node: Any, path: str) -> None:
        if isinstance(node, Mapping):
            children = list(node.items())
        elif isinstance(node, list | tuple):
            children = list(enumerate(node))
        elif hasattr(node, "__dict__") and not _is_inexact(node) and not callable(getattr(node, "__jax_array__", None)):
            children = [(key, value) for key, value in vars(node).items() if not key.startswith("__")]
        else:
            return
        if id(node) in seen or isinstance(node, type) or (callable(node) and not _is_module(node)):
            return
        seen.add(id(node))
        if _is_module(node):
            options = {k: v for k, v in children if isinstance(v, bool | int | float | str)}
            found[path] = (f"{type(node).__module__}.{type(node).__qualname__}", options)
        else:
            found[path] = ("", {})
        for key, child in children:
            walk(child, f"{path}.{key}" if path else str(key))

    walk(tree, "")
    return found


def _is_module(node: Any) -> bool:
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(node).__mro__}
    return not names.isdisjoint(("flax.nnx.module.Module", "equinox._module._module.Module"))
