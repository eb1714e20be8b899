"""Forms of recurrent modules: packed gates, gates one by one, and two biases where flax and equinox have one.

torch's gates: LSTM i, f, g, o and GRU r, z, n, stacked along the first axis. torch adds b_ih + b_hh; only the GRU's n
keeps them apart, as b_hn is multiplied by r.
"""

from collections.abc import Iterator

from unified_ddp.equivalence.mapping.forms import Form, Leaves, Module, register
from unified_ddp.equivalence.mapping.mapping import Source
from unified_ddp.equivalence.mapping.operations import Permute, Place, Take
from unified_ddp.equivalence.mapping.rules import Rule

__all__: list[str] = []

_SWAP = Permute((1, 0))


@register("LSTM", "LSTMCell")
def _lstm(module: Module, leaves: Leaves) -> Iterator[Form]:
    yield from _fitting(_packed(module, "bias"), leaves)
    yield from _fitting(_packed(module, "dense_h.bias", ("dense_i.kernel", "dense_h.kernel")), leaves)
    yield from _fitting(_gates(module, "ifgo", biased_h="ifgo", biased_i=""), leaves)


@register("GRU", "GRUCell")
def _gru(module: Module, leaves: Leaves) -> Iterator[Form]:
    hidden = module.shape("weight_hh")[1]
    if "bias_ih" in module.tensors:
        both = Rule((Take(0, 0, 2 * hidden), Place(0, 0, 3 * hidden, False)))
        last = Rule((Take(0, 2 * hidden, 3 * hidden),))
        packed: Form = {
            "weight_ih": (module.source("weight_ih", Rule()),),
            "weight_hh": (module.source("weight_hh", Rule()),),
            "bias": (module.source("bias_ih", Rule()), module.source("bias_hh", both)),
            "bias_n": (module.source("bias_hh", last),),
        }
        yield from _fitting(packed, leaves)
    elif "dense_i.kernel" in leaves:
        yield from _fitting(_packed(module, "", ("dense_i.kernel", "dense_h.kernel")), leaves)
    yield from _fitting(_gates(module, "rzn", biased_h="n", biased_i="rzn"), leaves)


@register("RNN", "RNNCell")
def _rnn(module: Module, leaves: Leaves) -> Iterator[Form]:
    yield from _fitting(_packed(module, "dense_i.bias", ("dense_i.kernel", "dense_h.kernel")), leaves)
    yield from _fitting(_packed(module, "i.bias", ("i.kernel", "h.kernel")), leaves)


def _packed(module: Module, bias: str, kernels: tuple[str, str] | None = None) -> Form:
    rule = Rule((_SWAP,)) if kernels else Rule()
    names = kernels or ("weight_ih", "weight_hh")
    form: Form = {
        name: (module.source(key, rule),) for name, key in zip(names, ("weight_ih", "weight_hh"), strict=True)
    }
    if bias and "bias_ih" in module.tensors:
        form[bias] = (module.source("bias_ih", Rule()), module.source("bias_hh", Rule()))
    return form


def _gates(module: Module, gates: str, biased_h: str, biased_i: str) -> Form:
    """Flax's cells with a Dense a gate: "ii.kernel", "hi.kernel", "hi.bias" ..."""
    hidden = module.shape("weight_hh")[1]
    form: Form = {}
    for index, gate in enumerate(gates):
        take = Take(0, index * hidden, (index + 1) * hidden)
        for way in "ih":
            form[f"{way}{gate}.kernel"] = (module.source(f"weight_{way}h", Rule((take, _SWAP))),)
        if "bias_ih" not in module.tensors:
            continue
        only_i, only_h = gate in biased_i, gate in biased_h
        pair: tuple[Source, ...] = tuple(module.source(key, Rule((take,))) for key in ("bias_ih", "bias_hh"))
        if only_i and only_h:
            form[f"i{gate}.bias"], form[f"h{gate}.bias"] = (pair[0],), (pair[1],)
        else:
            form[f"{'i' if only_i else 'h'}{gate}.bias"] = pair
    return form


def _fitting(form: Form, leaves: Leaves) -> Iterator[Form]:
    """Flax's nnx calls the gate "if" `if_`, as the word is Python's."""
    renamed = {_spelled(key, leaves): sources for key, sources in form.items()}
    if all(key in leaves for key in renamed):
        yield renamed


def _spelled(key: str, leaves: Leaves) -> str:
    gate, _, rest = key.partition(".")
    longer = f"{gate}_.{rest}"
    return longer if key not in leaves and longer in leaves else key
