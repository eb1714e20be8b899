"""Faults on either side, and the rung that catches each. float64 alone is run: it is what tells programs apart."""

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from support.zoo import cnn, layers, losses, mlp, optimizers, transformer

from unified_ddp.equivalence import EquivalenceError, Pair, TorchSide

WIDTH, HEADS = transformer.WIDTH, transformer.HEADS
BLOCK = "layers.0.proj.kernel"


def _mean_of_wrong_axis(params, batch):
    out = mlp.jax_call(params, batch["x"])
    return jnp.mean(jnp.sum((out - batch["y"]) ** 2, axis=-1)), out


def _gradient_cut(params, batch):
    out = mlp.jax_call(params | {"fc1": jax.lax.stop_gradient(params["fc1"])}, batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), out


MODELS = {
    "batch norm's eps": ("outputs", lambda: cnn.pair(eps=1e-3)),
    "batch norm's eps by a hair": ("outputs", lambda: cnn.pair(eps=1.01e-5)),
    "momentum's convention": ("buffers", lambda: cnn.pair(momentum=0.9)),
    "biased running variance": ("buffers", lambda: cnn.pair(unbiased=False)),
    "tanh GELU": ("outputs", lambda: cnn.pair(approximate=True)),
    "SAME for explicit padding": ("outputs", lambda: cnn.pair(padding="SAME")),
    "flattened channels last": ("outputs", lambda: cnn.pair(channels_first_flatten=False)),
    "pooling without its padding": ("outputs", lambda: cnn.pair(count_padding=False)),
    "a dropped bias": ("outputs", lambda: cnn.pair(dropped_bias=True)),
    "kernel's height and width exchanged": (
        "outputs",
        lambda: cnn.pair(rules={"conv1.kernel": "conv1.weight | permute 3 2 1 0"}),
    ),
    "loss summed": ("loss", lambda: cnn.pair(loss=losses.jax_classify_sum)),
    "labels smoothed": ("loss", lambda: cnn.pair(loss=losses.jax_classify_smoothed)),
    "loss averaged over rows alone": ("loss", lambda: _mlp(_mean_of_wrong_axis)),
    "queries and keys exchanged": ("outputs", lambda: transformer.pair(swap_qk=True)),
    "attention without its scale": ("outputs", lambda: transformer.pair(scale=1.0)),
    "attention's scale of the whole width": ("outputs", lambda: transformer.pair(scale=WIDTH**-0.5)),
    "layer norm's eps": ("outputs", lambda: transformer.pair(eps=1e-6)),
    "no causal mask": ("outputs", lambda: transformer.pair(causal=False)),
    "heads last": ("outputs", lambda: transformer.pair(heads_first=False)),
    "embeddings scaled": ("outputs", lambda: transformer.pair(embedding_scale=WIDTH**0.5)),
    "head's gradient cut": ("gradients", lambda: transformer.pair(stop_head=True)),
    "one square kernel transposed": (
        "outputs",
        lambda: transformer.pair(rules={BLOCK: "blocks.0.attn.proj.weight"}),
    ),
    "padding row trained": ("gradients", lambda: layers.norms(padding_idx=None)),
    "layer norm's eps after others": ("outputs", lambda: layers.norms(eps=1e-5)),
    "experts' gates not renormalised": ("outputs", lambda: layers.experts(renormalise=False)),
    "a layer's gradient cut": ("gradients", lambda: _mlp(_gradient_cut)),
}


def _mlp(loss) -> Pair:
    return Pair(mlp.torch_side(), mlp.jax_side(loss), mlp.batches())


@pytest.mark.parametrize("name", MODELS)
def test_a_fault_of_the_model_is_caught(name) -> None:
    rung, make = MODELS[name]
    report = make().check(rung, dtype="float64", power=False)
    assert report.first_failure is not None
    assert report.first_failure.name == rung
    assert not report.ok


@pytest.mark.parametrize("name", optimizers.WRONG)
def test_a_fault_of_the_optimizer_is_caught(name) -> None:
    torch_optimizer, jax_optimizer = optimizers.WRONG[name]
    report = mlp.pair(torch_optimizer, jax_optimizer).check("update", ranks=1, steps=6, power=False)
    assert report.first_failure is not None
    assert report.first_failure.name == "update"


def test_a_complex_gradient_that_is_not_conjugated_is_caught() -> None:
    pair = layers.complex_pair(torch_optimizer=optimizers.sgd, jax_optimizer=optax.sgd(optimizers.LR))
    report = pair.check("update", ranks=1, steps=3, dtype="float64", power=False)
    assert report.first_failure is not None
    assert report.first_failure.name == "update"
    assert report.first_failure.worst is not None
    assert report.first_failure.worst.name == "spectrum"


def test_float64_arbitrates_what_is_precision() -> None:
    report = _mlp(_half_precision_inside).check(power=False)
    assert report.first_failure is not None
    assert report.first_failure.verdict == "precision"


def _half_precision_inside(params, batch):
    cast = (lambda x: x) if jax.config.jax_enable_x64 else (lambda x: x.astype(jnp.bfloat16).astype(x.dtype))
    out = mlp.jax_call(jax.tree.map(cast, params), batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), out


def test_a_random_side_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Dropout(0.5))
    side = TorchSide(model, losses.torch_regress)
    with pytest.raises(EquivalenceError, match="the torch side is random \\(dropout in 1"):
        Pair(side, TorchSide(torch.nn.Sequential(torch.nn.Linear(5, 3)), losses.torch_regress), mlp.batches()).check()


def _not_a_number(params, batch):
    out = mlp.jax_call(params, batch["x"]) * jnp.nan
    return jnp.mean((out - batch["y"]) ** 2), out


def test_nan_on_both_sides_is_no_agreement() -> None:
    pair = Pair(mlp.jax_side(_not_a_number), mlp.jax_side(_not_a_number), mlp.batches())
    with pytest.raises(EquivalenceError, match="is NaN on both sides in float32, which shows nothing"):
        pair.check()


def test_nan_on_one_side_differs() -> None:
    pair = Pair(mlp.jax_side(), mlp.jax_side(_not_a_number), mlp.batches())
    assert pair.check(power=False).first_failure is not None
