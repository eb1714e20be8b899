"""Forms: the ways in which the tensors of one module of the first side may make tensors of the second.

A form follows from the module's type, never from the mere fact that a transposed shape fits. It says for each key below
a path of the second side (such as "kernel", or "query.kernel") of which tensors it is made. Where a type leaves several
forms open (a plain pytree's square "w"), all are given, and probing decides.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from unified_ddp.equivalence.mapping.mapping import Source
from unified_ddp.equivalence.mapping.operations import Flip, Permute, Reshape
from unified_ddp.equivalence.mapping.rules import Rule
from unified_ddp.equivalence.side import TensorInfo

Leaves = Mapping[str, TensorInfo]
"""By key below a path of the second side."""

Form = dict[str, tuple[Source, ...]]
"""By key below a path of the second side, its sources."""


@dataclass(frozen=True)
class Module:
    """A module of the first side, or a part of one.

    Attributes:
        path: of the module.
        type: last part of its type's name, such as "Linear".
        tensors: by key, where it comes from and the shape that this has.
        options: see `TensorInfo.options`.
    """

    path: str
    type: str
    tensors: dict[str, tuple[Source, tuple[int, ...]]]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Says whether the tensors from which forms start are there; the user's rules may have taken them."""
        return "Norm" in self.type or "weight" in self.tensors or {"weight_ih", "weight_hh"} <= self.tensors.keys()

    def source(self, key: str, rule: Rule) -> Source:
        """Returns the source of a tensor with more operations behind those that the module's part has."""
        source, _ = self.tensors[key]
        return Source(source.name, source.rule.then(*rule.operations), source.buffer)

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor of the module."""
        return self.tensors[key][1]


Make = Callable[[Module, Leaves], Iterator[Form]]
_FORMS: dict[str, Make] = {}

KERNEL_KEYS = ("kernel", "weight", "w", "W", "weights")
BIAS_KEYS = ("bias", "b", "beta", "offset")
SCALE_KEYS = ("scale", "weight", "gamma", "g", "w", "kernel")


def register(*types: str) -> Callable[[Make], Make]:
    """Registers the forms of modules by the last part of their type's name."""

    def put(make: Make) -> Make:
        for name in types:
            _FORMS[name] = make
        return make

    return put


def forms_of(module: Module, leaves: Leaves) -> list[Form]:
    """Returns every form of the module that fits the leaves below one path."""
    make = _FORMS.get(module.type) or next((f for name, f in _FORMS.items() if _kin(module.type, name)), _as_named)
    if not module.whole:
        make = _as_named
    return [form for form in make(module, leaves) if form and _one_kind(form, leaves)]


def _one_kind(form: Form, leaves: Leaves) -> bool:
    """Running statistics are made of running statistics."""
    return all(leaves[key].buffer == source.buffer for key, sources in form.items() for source in sources)


def _kin(type_name: str, known: str) -> bool:
    """A user's own LlamaRMSNorm or LayerNorm2d has the forms of norms."""
    return known.endswith("Norm") and known in type_name


def by_key(module: Module, leaves: Leaves, tables: Mapping[str, list[tuple[str, list[Rule]]]]) -> Iterator[Form]:
    """Yields the forms that come of independent choices: for each tensor the keys and rules that it may have."""
    choices: list[list[tuple[str, Source]]] = []
    for key, table in tables.items():
        if key not in module.tensors:
            continue
        fitting = [
            (leaf, module.source(key, rule))
            for leaf, rules in table
            if leaf in leaves
            for rule in rules
            if rule.fits(module.shape(key), leaves[leaf].shape)
        ]
        if fitting:
            choices.append(_distinct(fitting))
        elif key == "weight":
            return  # a bias alone tells too little
    for picked in product(*choices) if choices else ():
        names = [leaf for leaf, _ in picked]
        if len(set(names)) == len(names):
            yield {leaf: (source,) for leaf, source in picked}


def _distinct(fitting: list[tuple[str, Source]]) -> list[tuple[str, Source]]:
    return list(dict.fromkeys(fitting))


def reshaped(rule: Rule, shape: tuple[int, ...], leaf: TensorInfo | None, split: int | None = None) -> list[Rule]:
    """Returns the rule, with a reshape behind it if the leaf holds the same axes cut into several.

    Args:
        rule: makes an array of the leaf's elements in their order.
        shape: of the rule's source.
        leaf: the target.
        split: the size of the first axis, which must be a product of leading axes of the leaf; None asks nothing.
    """
    if leaf is None:
        return []
    made = rule.shape(shape)
    if made == leaf.shape:
        return [rule]
    if math.prod(made) != math.prod(leaf.shape):
        return []
    leading = {math.prod(leaf.shape[:i]) for i in range(1, len(leaf.shape))}
    if split is not None and split not in leading:
        return []
    return [rule.then(Reshape(leaf.shape))]


def dense_rules(key: str, shape: tuple[int, ...], leaf: TensorInfo | None) -> list[Rule]:
    """Returns how a weight (out, in) lies: flax has (in, out), equinox keeps torch's order, others do either."""
    if leaf is None or len(shape) != 2:
        return []
    swapped, same = Rule((Permute((1, 0)),)), Rule()
    kernel = reshaped(swapped, shape, leaf, shape[1])
    if key == "kernel" or "flax" in leaf.owner_type:
        return kernel
    kept = [same] if same.fits(shape, leaf.shape) else []
    if "equinox" in leaf.owner_type:
        return kept
    return kept + kernel if key == "weight" else kernel + kept


def _bias_table(module: Module, leaves: Leaves, keys: tuple[str, ...] = BIAS_KEYS) -> list[tuple[str, list[Rule]]]:
    if "bias" not in module.tensors:
        return []
    return [(key, reshaped(Rule(), module.shape("bias"), leaves.get(key))) for key in keys]


@register("Linear", "NonDynamicallyQuantizableLinear", "LazyLinear")
def _linear(module: Module, leaves: Leaves) -> Iterator[Form]:
    weight = [(key, dense_rules(key, module.shape("weight"), leaves.get(key))) for key in KERNEL_KEYS]
    yield from by_key(module, leaves, {"weight": weight, "bias": _bias_table(module, leaves)})


@register("Conv1D")
def _linear_stored_in_out(module: Module, leaves: Leaves) -> Iterator[Form]:
    """GPT-2's linear layer holds (in, out); twins of it hold the same, as flax's own Dense, or (out, in)."""
    if len(module.shape("weight")) != 2:
        yield from _as_named(module, leaves)
        return
    rules = [Rule(), Rule((Permute((1, 0)),))]
    weight = [(key, rules) for key in KERNEL_KEYS]
    yield from by_key(module, leaves, {"weight": weight, "bias": _bias_table(module, leaves)})


@register("Conv1d", "Conv2d", "Conv3d")
def _conv(module: Module, leaves: Leaves) -> Iterator[Form]:
    shape = module.shape("weight")
    spatial = range(2, len(shape))
    flax, same = Rule((Permute((*spatial, 1, 0)),)), Rule()
    table = [(key, [flax] if key == "kernel" else [same, flax]) for key in KERNEL_KEYS]
    yield from by_key(module, leaves, {"weight": table, "bias": _bias_table(module, leaves)})


@register("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
def _conv_transpose(module: Module, leaves: Leaves) -> Iterator[Form]:
    """Torch (I, O/g, *k) runs its kernel backwards; flax's runs it forwards, unless `transpose_kernel`."""
    shape, groups = module.shape("weight"), int(module.options.get("groups", 1))
    spatial = tuple(range(2, len(shape)))
    places = tuple(range(len(spatial)))
    flipped = Rule((Permute((*spatial, 0, 1)), Flip(places)))
    kept = Rule((Permute((*spatial, 1, 0)),))
    table = []
    for key in KERNEL_KEYS:
        leaf = leaves.get(key)
        if leaf is None:
            continue
        known = leaf.options.get("transpose_kernel")
        if "equinox" in leaf.owner_type:
            table.append((key, [_grouped_equinox(shape, groups)]))
        else:
            table.append((key, [kept] if known else [flipped] if known is False else [flipped, kept]))
    yield from by_key(module, leaves, {"weight": table, "bias": _bias_table(module, leaves)})


def _grouped_equinox(shape: tuple[int, ...], groups: int) -> Rule:
    """(I, O/g, *k) to (O, I/g, *k), with the kernel run forwards."""
    inputs, outputs, *kernel = shape
    axes = tuple(range(3, 3 + len(kernel)))
    flip = Flip(tuple(range(2, len(shape))))
    if groups == 1:
        return Rule((Permute((1, 0, *range(2, len(shape)))), flip))
    cut = Reshape((groups, inputs // groups, outputs, *kernel))
    joined = Reshape((groups * outputs, inputs // groups, *kernel))
    return Rule((cut, Permute((0, 2, 1, *axes)), joined, flip))


@register(
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "SyncBatchNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "GroupNorm",
    "RMSNorm",
    "BatchNorm",
)
def _norm(module: Module, leaves: Leaves) -> Iterator[Form]:
    tables = {
        "weight": [(key, _norm_rules(module, "weight", leaves.get(key))) for key in SCALE_KEYS],
        "bias": [(key, _norm_rules(module, "bias", leaves.get(key))) for key in BIAS_KEYS],
        "running_mean": [(key, [Rule()]) for key in ("mean", "running_mean", "moving_mean")],
        "running_var": [(key, [Rule()]) for key in ("var", "running_var", "moving_variance", "variance")],
    }
    for key in module.tensors.keys() - tables.keys():  # a norm of the user's own
        tables[key] = [(leaf, [Rule()]) for leaf in (key, *SCALE_KEYS)]
    yield from by_key(module, leaves, tables)


def _norm_rules(module: Module, key: str, leaf: TensorInfo | None) -> list[Rule]:
    return reshaped(Rule(), module.shape(key), leaf) if key in module.tensors else []


@register("Embedding", "EmbeddingBag")
def _embedding(module: Module, leaves: Leaves) -> Iterator[Form]:
    keys = ("embedding", "weight", "embeddings", "table", "kernel", "w")
    yield from by_key(module, leaves, {"weight": [(key, [Rule()]) for key in keys]})


def _as_named(module: Module, leaves: Leaves) -> Iterator[Form]:
    """A type of the user's own: the same key, and the same shape but for axes of size one."""
    tables = {}
    for key in module.tensors:
        names = [leaf for leaf in leaves if _same_key(key, leaf)]
        tables[key] = [(leaf, _same_elements(module.shape(key), leaves[leaf].shape)) for leaf in names]
    yield from by_key(module, leaves, tables)


def _same_elements(shape: tuple[int, ...], target: tuple[int, ...]) -> list[Rule]:
    if shape == target:
        return [Rule()]
    same = [size for size in shape if size != 1] == [size for size in target if size != 1]
    return [Rule((Reshape(target),))] if same else []


_KIN_KEYS = ({"weight", "kernel", "scale", "embedding", "w"}, {"bias", "b"})


def _same_key(key: str, leaf: str) -> bool:
    if key.lower().strip("_") == leaf.lower().strip("_"):
        return True
    return any(key in kin and leaf in kin for kin in _KIN_KEYS)
