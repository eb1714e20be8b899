"""What both sides are given."""

import dataclasses
import sys

import numpy as np
import pytest

from unified_ddp.equivalence.demo.config import VerifyConfig, VerifyError
from unified_ddp.equivalence.demo.data import PARAMS, initial_weights, make_shards


def test_shards_are_dealt_from_the_digits_by_seed():
    config = VerifyConfig(world_size=3, steps=4, batch_size=200)  # more than all images
    shards = make_shards(config)
    assert shards.images.shape == (4, 3, 200, 1, 8, 8)
    assert shards.images.dtype == np.float32
    assert (shards.images.min(), shards.images.max()) == (0, 1)
    assert shards.labels.shape == (4, 3, 200)
    assert set(shards.labels.ravel()) == set(range(10))
    np.testing.assert_array_equal(make_shards(config).images, shards.images)
    other = make_shards(dataclasses.replace(config, seed=1))
    assert not np.array_equal(other.images, shards.images)
    # One epoch of either holds each digit as often.
    assert np.array_equal(*(np.bincount(s.labels.ravel()[:1797]) for s in (shards, other)))


def test_weights_have_torchs_names_and_shapes():
    weights = initial_weights(VerifyConfig())
    assert {name: value.shape for name, value in weights.items()} == PARAMS
    assert not weights["fc1.bias"].any()
    assert (weights["bn1.weight"] == 1).all()
    assert weights["fc1.weight"].std() == pytest.approx(np.sqrt(2 / 256), rel=0.05)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    message = r"scikit-learn, which is not installed; run: pip install 'unified_ddp\[verify\]'"
    with pytest.raises(VerifyError, match=message):
        make_shards(VerifyConfig())
