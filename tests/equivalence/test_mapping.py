"""Mappings that are found, what names leave open, and errors that say what to add."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from support.zoo import cnn, layers, losses, mlp, recurrent, transformer
from torch import nn

from unified_ddp.equivalence import JaxSide, MappingError, Pair, TorchSide


def texts(pair) -> dict[str, str]:
    return {name: " + ".join(s.text() for s in sources) for name, sources in pair.mapping.sources.items()}


def test_types_say_how_tensors_lie() -> None:
    found = texts(cnn.pair()) | texts(layers.convs()) | texts(transformer.attention_pair()) | texts(recurrent.lstm())
    wanted = {
        "conv2.kernel": "conv2.weight | permute 2 3 1 0",
        "bn1.var": "bn1.running_var",
        "transposed.kernel": "transposed.weight | permute 2 3 0 1 | flip 0 1",
        "temporal.kernel": "temporal.weight | permute 2 1 0",
        "attn.key.kernel": "attn.in_proj_weight | take 0 16:32 | permute 1 0 | reshape 16 2 8",
        "attn.out.kernel": "attn.out_proj.weight | permute 1 0 | reshape 2 8 16",
        "rnn.cell.dense_h.bias": "rnn.bias_ih_l0 + rnn.bias_hh_l0",
    }
    assert {name: found[name] for name in wanted} == wanted


def test_a_saved_mapping_is_used_as_it_is(tmp_path) -> None:
    first = mlp.pair()
    first.mapping.save(tmp_path / "map.toml")
    again = mlp.pair(mapping=tmp_path / "map.toml")
    assert again.mapping == first.mapping
    text = (tmp_path / "map.toml").read_text().replace("fc1.weight", "gone.weight")
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(MappingError, match=r"'fc1.kernel' is made of 'gone.weight', which the first side lacks"):
        mlp.pair(mapping=tmp_path / "map.toml")


def test_weights_go_both_ways() -> None:
    pair = transformer.attention_pair()
    carried = pair.to_jax()
    back = pair.to_torch(carried)
    for name, value in pair.first.values().items():
        np.testing.assert_array_equal(back[name], value)


class Square(nn.Module):
    """Three like layers whose names say nothing to the other side's."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma = (nn.Linear(5, 5, bias=False) for _ in range(3))

    def forward(self, x):
        return self.gamma(torch.tanh(self.beta(torch.sin(self.alpha(x)))))


def square_pair(order="xyz", **options) -> Pair:
    def loss(params, batch):
        first, second, third = (params[name]["w"] for name in order)
        out = jnp.tanh(jnp.sin(batch["x"] @ first) @ second) @ third
        return jnp.mean((out - batch["y"]) ** 2), out

    random = np.random.default_rng(0)
    draw = lambda: random.normal(size=(6, 5)).astype(np.float32)  # noqa: E731
    params = {name: {"w": jnp.zeros((5, 5))} for name in "xyz"}
    torch.manual_seed(0)
    return Pair(
        TorchSide(Square(), losses.torch_regress), JaxSide(params, loss), [{"x": draw(), "y": draw()}], **options
    )


@pytest.mark.parametrize("order", ["xyz", "zyx", "yzx"])
def test_probing_settles_what_names_leave_open(order) -> None:
    pair = square_pair(order)
    wanted = dict(zip(order, ("alpha", "beta", "gamma"), strict=True))
    assert texts(pair) == {f"{name}.w": f"{wanted[name]}.weight | permute 1 0" for name in "xyz"}
    pair.check(power=False).assert_ok()


class Conv1D(nn.Module):
    """The linear layer of GPT-2, which holds (in, out)."""

    def __init__(self, inputs, outputs) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.mark.parametrize(("swapped", "rule"), [(False, ""), (True, " | permute 1 0")])
def test_linear_layers_that_hold_in_out_have_twins_that_hold_either(swapped, rule) -> None:
    def loss(params, batch):
        x = batch["x"]
        for layer in params.values():
            x = jnp.tanh(x @ (layer["kernel"].T if swapped else layer["kernel"]) + layer["bias"])
        return jnp.mean((x - batch["y"]) ** 2), x

    sizes = {"0": (5, 5), "2": (5, 7), "4": (7, 5)}
    params = {
        f"c_fc{n}": {"kernel": jnp.zeros(size[::-1] if swapped else size), "bias": jnp.zeros(size[1])}
        for n, size in sizes.items()
    }
    model = nn.Sequential(Conv1D(5, 5), nn.Tanh(), Conv1D(5, 7), nn.Tanh(), Conv1D(7, 5), nn.Tanh())
    random = np.random.default_rng(0)
    batch = {key: random.normal(size=(6, 5)).astype(np.float32) for key in "xy"}
    pair = Pair(TorchSide(model, losses.torch_regress), JaxSide(params, loss), [batch])
    found = texts(pair)
    assert {name: found[name] for name in found if "kernel" in name} == {
        f"c_fc{n}.kernel": f"{n}.weight{rule}" for n in sizes
    }
    pair.check(power=False).assert_ok()


def broken_square_pair() -> Pair:
    pair = square_pair()
    original = pair.second.program._loss_fn
    pair.second.program._loss_fn = lambda params, batch: tuple(1.1 * part for part in original(params, batch))
    return pair


def test_what_probing_cannot_settle_is_noted() -> None:
    report = broken_square_pair().check(power=False)
    assert not report.ok
    assert any("names leave open which tensors make" in note for note in report.notes)


class Biased(nnx.Module):
    def __init__(self, rngs) -> None:
        self.fc1, self.fc2 = nnx.Linear(5, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.fc2(jnp.tanh(self.fc1(x)))


class Unbiased(mlp.TorchMlp):
    def __init__(self) -> None:
        super().__init__()
        self.fc2 = nn.Linear(6, 3, bias=False)


def biased_pair(**options) -> Pair:
    sides = TorchSide(Unbiased(), losses.torch_regress), JaxSide(Biased(nnx.Rngs(0)), losses.jax_regress)
    return Pair(*sides, mlp.batches(), **options)


def test_a_bias_too_many_is_named_with_both_remedies() -> None:
    with pytest.raises(
        MappingError, match=r"'fc2' is Linear without a bias. Say ignore=\['fc2.bias'\].*use_bias=False"
    ):
        biased_pair().check()
    report = biased_pair(ignore=["fc2.bias"]).check(power=False)
    assert [item.name for item in report.not_tested] == ["fc2.bias"]


def test_names_in_overrides_must_exist() -> None:
    with pytest.raises(MappingError, match=r"rules has 'fc1.kernels'.*'fc1.kernel'"):
        mlp.pair(rules={"fc1.kernels": "fc1.weight | permute 1 0"}).check()
    with pytest.raises(MappingError, match=r"ignore has 'head.bias', which no tensor is called"):
        mlp.pair(ignore=["head.bias"]).check()


def test_a_rule_must_make_the_shape() -> None:
    with pytest.raises(MappingError, match=r"makes shape \(6, 5\).*'fc1.kernel' has \(5, 6\)"):
        mlp.pair(rules={"fc1.kernel": "fc1.weight"}).check()


class Untied(nnx.Module):
    def __init__(self, rngs) -> None:
        self.embed, self.head = nnx.Embed(7, 4, rngs=rngs), nnx.Linear(4, 7, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def tied_pair(**options) -> Pair:
    from support.zoo import optimizers

    random = np.random.default_rng(0)
    batch = {"x": random.integers(0, 7, (4, 5)), "y": random.integers(0, 7, (4, 5))}
    torch_optimizer, jax_optimizer = optimizers.RIGHT["sgd"]
    return Pair(
        TorchSide(Tied(), losses.torch_classify, torch_optimizer),
        JaxSide(Untied(nnx.Rngs(0)), losses.jax_classify, jax_optimizer),
        [batch],
        **options,
    )


def test_tensors_tied_on_one_side_alone_are_refused_or_found_at_the_update() -> None:
    with pytest.raises(MappingError, match=r"'embed.weight' and 'head.weight' are one tensor.*tied=\['head.kernel'\]"):
        tied_pair().check()
    report = tied_pair(tied=["head.kernel"]).check("update", ranks=1, steps=2, power=False)
    assert report.first_failure is not None
    assert report.first_failure.name == "update"


def test_one_framework_is_a_pair_as_well() -> None:
    Pair(mlp.torch_side(), mlp.torch_side(), mlp.batches()).check(power=False).assert_ok()
    Pair(mlp.jax_side(), mlp.jax_side(), mlp.batches()).check(power=False).assert_ok()


def test_what_no_rung_would_notice_is_listed() -> None:
    report = transformer.attention_pair().check()
    assert report.ok
    assert {item.name for item in report.not_tested} == set()
    padded = layers.norms().check()
    assert any(item.name == "embed.weight" and "rows" in item.reason for item in padded.not_tested)


def test_a_tensor_that_nothing_uses_is_listed() -> None:
    class WithSpare(mlp.TorchMlp):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    spare = {"spare": {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}}
    pair = Pair(
        TorchSide(WithSpare(), losses.torch_regress), JaxSide(mlp.params() | spare, mlp.jax_loss), mlp.batches()
    )
    report = pair.check()
    assert {item.name for item in report.not_tested} == {"spare.weight", "spare.bias"}
    assert all(f.verdict != "pass" for f in report.findings if f.name.startswith("spare") and f.kind == "gradient")


def test_frozen_parameters_are_noted() -> None:
    pair = mlp.pair()
    pair.first.model.fc1.weight.requires_grad_(False)
    report = pair.check(power=False).assert_ok()
    assert "fc1.weight" not in {f.name for f in report.findings if f.kind == "gradient"}
    assert any("frozen on the first side" in note and "fc1.weight" in note for note in report.notes)
