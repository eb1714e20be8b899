import pytest

from unified_ddp.ranks.roll_call import RollCall, Sign


class Store:
    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.gone = False

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise ConnectionError("the store is gone")
        self.held[key] = value

    def get(self, key: str) -> str | None:
        if self.gone:
            raise ConnectionError("the store is gone")
        return self.held.get(key)


def sign(phase: str = "backward pass 3", at: float = 10.0, detail: str = "bucket 0 (a, b)") -> Sign:
    return Sign(phase, detail, "after 3 forwards", "RuntimeError: timed out", at)


def calls(ranks: int, store: Store, grace: float = 0.0) -> list[RollCall]:
    return [RollCall(store, rank, ranks, "wrapper 0", grace, lambda _: None) for rank in range(ranks)]


def test_a_rank_without_a_sign_did_not_arrive() -> None:
    first, second, _ = calls(3, Store())
    second.leave(sign())
    text = first.explain(sign(), first.read(0.0))
    assert text.startswith("backward pass 3, bucket 0 (a, b), failed on rank 0, and rank 2 did not arrive there.")
    assert "rank 1 waited for the same: bucket 0 (a, b)" in text
    assert "rank 2 gave no sign" in text
    assert "timed out" in text


def test_a_rank_elsewhere_is_told_with_what_it_met() -> None:
    first, second = calls(2, Store())
    second.leave(sign("forward 4", at=8.5, detail="the sync of buffers"))
    text = first.explain(sign(), first.read(0.0))
    assert "and rank 1 did not arrive there" in text
    assert "rank 1, 1.5 s before, was in forward 4 (the sync of buffers) after 3 forwards" in text


def test_all_arrived() -> None:
    first, second = calls(2, Store())
    second.leave(sign())
    assert "though every rank arrived there" in first.explain(sign(), first.read(0.0))


def test_an_old_sign_is_waited_on_and_a_new_one_is_not() -> None:
    store = Store()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        other.leave(sign(at=20.0))

    other = RollCall(store, 1, 2, "wrapper 0")
    other.leave(sign(at=5.0))
    call = RollCall(store, 0, 2, "wrapper 0", 60.0, wait)
    assert call.read(since=4.0) == {1: sign(at=5.0)}
    assert not waits
    assert call.read(since=15.0) == {1: sign(at=20.0)}
    assert len(waits) == 1


def test_a_store_that_is_gone_is_said() -> None:
    store = Store()
    first, _ = calls(2, store, grace=60.0)
    store.gone = True
    first.leave(sign())
    signs = first.read(0.0)
    assert signs is None
    text = first.explain(sign(), signs)
    assert "which rank did not arrive is not known" in text
    assert "rank 0 or the launcher" in text


@pytest.mark.parametrize("name", ["wrapper 1", "wrapper 10"])
def test_wrappers_do_not_read_each_others_signs(name: str) -> None:
    store = Store()
    RollCall(store, 1, 2, name).leave(sign())
    assert RollCall(store, 0, 2, "wrapper 0", 0.0).read(0.0) == {1: None}
