"""All named errors have one base, are the built-in errors that users would catch, and travel between processes."""

import pickle

import pytest

import unified_ddp
from unified_ddp import ParamSpec, PlanError, ReadinessError, UnifiedDDPError, errors
from unified_ddp._core import Readiness

ERRORS = [error for error in vars(errors).values() if isinstance(error, type)]


def test_the_package_exports_all() -> None:
    assert {error.__name__ for error in ERRORS} == set(errors.__all__)
    assert all(getattr(unified_ddp, error.__name__) is error for error in ERRORS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_one_base_and_pickling(error: type[Exception]) -> None:
    assert issubclass(error, UnifiedDDPError)
    assert error.__module__ == "unified_ddp.errors"
    assert error.__doc__
    again = pickle.loads(pickle.dumps(error("what, where", 3)))
    assert (type(again), again.args) == (error, ("what, where", 3))


def test_native_code_raises_them() -> None:
    with pytest.raises(PlanError, match="unknown dtype") as caught:
        ParamSpec("a", [1], "float31")
    assert isinstance(caught.value, UnifiedDDPError)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(ReadinessError, match="outside a backward pass") as refused:
        Readiness(["a"], [[0]], [False], print, print, print).flush()
    assert isinstance(refused.value, UnifiedDDPError)
    assert isinstance(refused.value, RuntimeError)
    assert isinstance(pickle.loads(pickle.dumps(refused.value)), ReadinessError)
