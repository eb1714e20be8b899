"""Every rule is a linear map: <A w, g> = <w, A' g>, and text gives it back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_ddp.equivalence import MappingError
from unified_ddp.equivalence.mapping.mapping import Mapping, Source
from unified_ddp.equivalence.mapping.operations import Blocks, Flip, Permute, Place, Reshape, Scale, Sum, Take
from unified_ddp.equivalence.mapping.rules import Rule, parse_rule


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def operations(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    size = shape[axis]
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size))
    blocks = draw(st.sampled_from(divisors(size)))
    cut = draw(st.sampled_from(divisors(size)))
    options = [
        Permute(tuple(draw(st.permutations(range(len(shape)))))),
        Reshape((*shape[:axis], cut, size // cut, *shape[axis + 1 :])),
        Flip((axis,)),
        Blocks(axis, tuple(draw(st.permutations(range(blocks))))),
        Take(axis, start, stop),
        Place(axis, start, start + size + 1, False),
        Place(axis, 1, 3, True),
        Scale(draw(st.sampled_from([0.125, -3.0, 0.3]))),
    ]
    if len(shape) > 1:
        options += [Take(axis, start, None), Sum(axis)]
    return draw(st.sampled_from(options))


@st.composite
def rules(draw):
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    rule = Rule()
    for _ in range(draw(st.integers(0, 4))):
        rule = rule.then(draw(operations(rule.shape(shape))))
    return shape, rule


@settings(max_examples=300, deadline=None)
@given(rules(), st.integers(0, 2**31))
def test_transpose_is_the_adjoint(drawn, seed) -> None:
    shape, rule = drawn
    random = np.random.default_rng(seed)
    w, g = random.normal(size=shape), random.normal(size=rule.shape(shape))
    made, back = rule.apply(w), rule.transpose(g, shape)
    assert made.shape == g.shape
    assert back.shape == shape
    assert np.vdot(made, g) == pytest.approx(np.vdot(w, back), rel=1e-10, abs=1e-10)


@settings(max_examples=200, deadline=None)
@given(rules(), st.integers(0, 2**31))
def test_inverse_makes_the_same_tensor_again(drawn, seed) -> None:
    shape, rule = drawn
    made = rule.apply(np.random.default_rng(seed).normal(size=shape))
    np.testing.assert_allclose(rule.apply(rule.invert(made, shape)), made, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(rules())
def test_text_gives_the_rule_back(drawn) -> None:
    _, rule = drawn
    assert parse_rule(rule.text("a.weight")) == ("a.weight", rule)


def two_biases() -> Mapping:
    return Mapping({"bias": (Source("b_ih"), Source("b_hh"))}, {})


def test_a_sum_of_tensors_gives_each_the_whole_gradient() -> None:
    values = {"b_ih": np.array([1.0, 2.0]), "b_hh": np.array([10.0, 20.0])}
    assert two_biases().carry(values)["bias"].tolist() == [11.0, 22.0]
    pulled = two_biases().pull_back({"bias": np.array([3.0, 4.0])}, {"b_ih": (2,), "b_hh": (2,)})
    assert {name: grad.tolist() for name, grad in pulled.items()} == {"b_ih": [3.0, 4.0], "b_hh": [3.0, 4.0]}


def test_weights_go_back_to_values_that_make_the_same() -> None:
    first = two_biases().invert({"bias": np.array([3.0, 4.0])}, {"b_ih": (2,), "b_hh": (2,)})
    assert two_biases().carry(first)["bias"].tolist() == [3.0, 4.0]


def test_tied_tensors_that_differ_do_not_go_back() -> None:
    mapping = Mapping({"embed": (Source("w"),), "head": (Source("w", Rule((Permute((1, 0)),))),)}, {})
    table = np.arange(6.0).reshape(2, 3)
    equal = {"embed": table, "head": table.T}
    assert mapping.invert(equal, {"w": (2, 3)})["w"].tolist() == table.tolist()
    with pytest.raises(MappingError, match="no values of 'w' make 'embed'"):
        mapping.invert({"embed": table, "head": table.T + 1}, {"w": (2, 3)})


def test_a_file_gives_the_mapping_back(tmp_path) -> None:
    mapping = Mapping(
        {"q.kernel": (Source("qkv", Rule((Take(0, 0, 2), Permute((1, 0))))),), "bias": (Source("a"), Source("b"))},
        {"head.bias": "ignore= says so"},
        ("bias",),
    )
    mapping.save(tmp_path / "port.map.toml")
    assert Mapping.load(tmp_path / "port.map.toml") == mapping


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w | transpose 1 0", "operation 'transpose'; known ones: permute"),
        ("w | take 0", "arguments of 'take 0' do not fit; as in 'take 0 0:64'"),
        ("| permute 1 0", "names no tensor"),
    ],
)
def test_what_is_no_rule_is_named(text, message) -> None:
    with pytest.raises(MappingError, match=message.replace("|", r"\|")):
        parse_rule(text)
