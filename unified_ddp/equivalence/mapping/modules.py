"""The first side's tensors as modules: by owner, and cut where the other side commonly holds parts."""

from collections.abc import Sequence

from unified_ddp.equivalence.mapping.forms import Module
from unified_ddp.equivalence.mapping.mapping import Source
from unified_ddp.equivalence.mapping.operations import Take
from unified_ddp.equivalence.side import TensorInfo

_QKV = ("query", "key", "value")


def modules_of(tensors: Sequence[TensorInfo], *, typed: bool) -> list[Module]:
    """Returns the modules that own tensors, in order of definition.

    Args:
        tensors: of the first side. A tied one belongs to each module that holds it.
        typed: use the modules' types (torch against JAX); otherwise both sides hold tensors alike.
    """
    owners: dict[str, list[TensorInfo]] = {}
    names = {tensor: tensor.name for tensor in tensors}
    names |= {alias: tensor.name for tensor in tensors for alias in tensor.aliases}
    for tensor in names:
        owners.setdefault(tensor.owner, []).append(tensor)
    modules = []
    for path, owned in owners.items():
        kind = owned[0].owner_type.rpartition(".")[2] if typed else ""
        held = {t.key: (Source(names[t], buffer=t.buffer), t.shape) for t in owned}
        modules.append(Module(path, kind, held, owned[0].options))
    return modules


def variants_of(module: Module) -> list[list[Module]]:
    """Returns the ways to see a module: as it is, or as the parts that the other side may hold instead."""
    if module.type == "MultiheadAttention" and {"in_proj_weight", "q_proj_weight"} & module.tensors.keys():
        return _attention(module)
    if module.type in ("LSTM", "GRU", "RNN") and any(key.startswith("weight_ih") for key in module.tensors):
        return [_layers(module)]
    packed = module.type == "Linear" and module.whole and _is_packed(module.path)
    if packed and module.shape("weight")[0] % 3 == 0:
        parent = module.path.rpartition(".")[0]
        return [[module], _thirds(parent, module, "weight", "bias")]
    return [[module]]


def _is_packed(path: str) -> bool:
    last = path.rpartition(".")[2].lower()
    return last in ("qkv", "c_attn", "in_proj", "query_key_value", "qkv_proj", "wqkv", "to_qkv")


def _attention(module: Module) -> list[list[Module]]:
    if "in_proj_weight" in module.tensors:
        packed = {"weight": module.tensors["in_proj_weight"]}
        if "in_proj_bias" in module.tensors:
            packed["bias"] = module.tensors["in_proj_bias"]
        whole = Module(_join(module.path, "in_proj"), "Linear", packed)
        return [_thirds(module.path, module, "in_proj_weight", "in_proj_bias"), [whole]]
    parts = []
    for index, name in enumerate(_QKV):
        tensors = {"weight": module.tensors[f"{name[0]}_proj_weight"]}
        if "in_proj_bias" in module.tensors:
            tensors["bias"] = _third(module, "in_proj_bias", index)
        parts.append(Module(_join(module.path, name), "Linear", tensors))
    return [parts]


def _thirds(path: str, module: Module, weight: str, bias: str) -> list[Module]:
    parts = []
    for index, name in enumerate(_QKV):
        tensors = {"weight": _third(module, weight, index)}
        if bias in module.tensors:
            tensors["bias"] = _third(module, bias, index)
        parts.append(Module(_join(path, name), "Linear", tensors))
    return parts


def _third(module: Module, key: str, index: int) -> tuple[Source, tuple[int, ...]]:
    source, shape = module.tensors[key]
    size = shape[0] // 3
    return Source(source.name, source.rule.then(Take(0, index * size, (index + 1) * size))), (size, *shape[1:])


def _layers(module: Module) -> list[Module]:
    """One module a layer and direction; a single one keeps the path."""
    ends = [key.removeprefix("weight_ih") for key in module.tensors if key.startswith("weight_ih")]
    parts = []
    for end in ends:
        tensors = {key.removesuffix(end): held for key, held in module.tensors.items() if _ends_in(key, end)}
        words = end.strip("_").replace("l", "", 1).replace("_reverse", ".backward")
        path = module.path if len(ends) == 1 else _join(module.path, words)
        parts.append(Module(path, module.type, tensors, module.options))
    return parts


def _ends_in(key: str, end: str) -> bool:
    return key.endswith(end) and key.removesuffix(end).rpartition("_")[2] in ("ih", "hh", "hr")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
