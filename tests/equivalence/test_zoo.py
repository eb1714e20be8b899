"""Right pairs pass, with no tolerance touched."""

import pytest
from support.zoo import cnn, layers, mlp, optimizers, recurrent, resnet, transformer

ZOO = {
    "batch-norm CNN": cnn.pair,
    "ResNet, linen": resnet.pair,
    "transformer, tied": transformer.pair,
    "attention of either library": transformer.attention_pair,
    "LSTM": recurrent.lstm,
    "GRU, equinox": recurrent.gru,
    "convolutions": layers.convs,
    "norms, padding_idx": layers.norms,
    "mixture of experts": layers.experts,
    "complex weights": layers.complex_pair,
}
"""float32 is run beside float64, which arbitrates: one check tries both."""


BEFORE_BATCH_NORM = {"batch-norm CNN": {"conv1.bias", "conv2.bias"}}


@pytest.mark.parametrize("name", ZOO)
def test_a_right_pair_passes(name) -> None:
    report = ZOO[name]().check(power=False).assert_ok()
    assert {f.verdict for f in report.findings} <= {"pass", "zero within rounding"}
    assert all(f.measure and f.float64 for f in report.findings)
    zero = {f.name for f in report.findings if f.verdict == "zero within rounding"}
    assert zero >= BEFORE_BATCH_NORM.get(name, set())


@pytest.mark.parametrize("name", optimizers.RIGHT)
def test_right_optimizers_pass(name) -> None:
    torch_optimizer, jax_optimizer = optimizers.RIGHT[name]
    pair = mlp.pair(torch_optimizer, jax_optimizer)
    pair.check(until="curve", ranks=1, steps=8, power=False).assert_ok()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes(dtype) -> None:
    report = mlp.pair().check(dtype=dtype).assert_ok()
    assert all(f.float64 for f in report.findings)
