"""What a rank says of itself when a collective fails."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest

from unified_ddp import MisuseError, ReductionError
from unified_ddp.ranks import progress, roll_call
from unified_ddp.ranks.progress import Progress


@dataclasses.dataclass
class Ranks:
    """A group, of which only this rank is there."""

    name: str
    rank: int = 0
    world_size: int = 2
    global_ranks: Sequence[int] = (0, 1)

    def all_gather_ints(self, value: int) -> list[int]:
        return [value] * self.world_size

    def all_gather_text(self, text: str) -> list[str]:
        return [text] * self.world_size


class Store(dict):
    def set(self, key: str, value: str) -> None:
        self[key] = value


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call.RollCall.__init__, "__defaults__", (0.0, lambda _: None, None))


def in_its_process(
    monkeypatch: pytest.MonkeyPatch, rank: int, store: Store, global_ranks: Sequence[int] = (0, 1)
) -> Progress:
    """Each process counts the wrappers of a group on its own."""
    monkeypatch.setattr(progress, "_wrappers", defaultdict(itertools.count))
    return Progress(Ranks("both", rank, global_ranks=global_ranks), lambda: store)


def fail(one: Progress, error: Exception, phase: str = "the sync") -> Exception:
    with pytest.raises(Exception) as caught, one.waiting(phase, "of buffers"):  # noqa: PT011
        raise error
    return caught.value


def test_passes_are_counted_and_named() -> None:
    one = Progress(Ranks("counting"), lambda: None)
    for sync in (True, False, True):
        one.forward(sync)
    one.backwards += 1
    assert (one.forwards, one.local_forwards) == (2, 1)
    assert one.forward_name == "synchronising forward 2"
    assert one.pass_name == "synchronising backward pass 1"


@pytest.mark.parametrize("store", [lambda: None, Store], ids=["no store", "one rank"])
def test_a_failure_is_named_where_no_other_rank_can_be_asked(store: Callable) -> None:
    ranks = Ranks("alone", world_size=1 if store is Store else 2)
    error = fail(Progress(ranks, store), RuntimeError("timed out"))
    assert isinstance(error, ReductionError)
    assert str(error) == "the sync, of buffers, failed on rank 0: timed out"
    assert str(error.__cause__) == "timed out"


def test_a_failure_names_the_ranks_that_did_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    first, second = (in_its_process(monkeypatch, rank, store) for rank in (0, 1))
    assert "failed on rank 1, and rank 0 did not arrive there" in str(fail(second, RuntimeError("no answer")))
    text = str(fail(first, RuntimeError("timed out")))
    assert text.startswith("the sync, of buffers, failed on rank 0, though every rank arrived there.")
    assert "after 0 synchronising forwards, 0 under no_sync and 0 synchronising backward passes" in text
    assert "rank 1 waited for the same: of buffers" in text
    text = str(fail(first, RuntimeError("timed out"), "synchronising backward pass 1"))
    assert "and rank 1 did not arrive there" in text
    assert "was in the sync (of buffers)" in text
    assert "RuntimeError: no answer" in text


def test_two_wrappers_of_a_group_are_not_mixed_up() -> None:
    store = Store()
    ranks = [Ranks("several", rank) for rank in (0, 1)]
    Progress(ranks[1], lambda: store).leave_sign("the sync", "of buffers", RuntimeError("no answer"))
    assert Progress(ranks[0], lambda: store).other_signs() == {1: None}


def test_named_errors_and_other_exceptions_pass_as_they_are() -> None:
    one = Progress(Ranks("named"), lambda: None)
    for error in (MisuseError("not now"), KeyError("x")):
        assert fail(one, error) is error


def test_ranks_of_a_part_of_all_processes_are_called_by_their_global_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    first, second = (in_its_process(monkeypatch, rank, store, (3, 7)) for rank in (0, 1))
    second.raised(ValueError("boom"))
    with pytest.raises(RuntimeError, match="rank 7 raised ValueError: boom"):
        first.require_pass_elsewhere()
    assert "failed on rank 7, and rank 3 did not arrive there" in str(fail(second, RuntimeError("no answer")))
    text = str(fail(first, RuntimeError("no answer")))
    assert "failed on rank 3, though every rank" in text
    assert "rank 7 waited for the same" in text


def test_a_rank_that_raised_is_met_in_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    waiting, raising = (in_its_process(monkeypatch, rank, store) for rank in range(2))
    for one in (waiting, raising):
        one.forward(True)
        one.backwards += 1
    waiting.require_pass_elsewhere()
    raising.raised(ValueError("boom"))
    with pytest.raises(RuntimeError, match="rank 1 raised ValueError: boom"):
        waiting.require_pass_elsewhere()
    # it stays until the other has met the exception
    assert raising.is_leaving
    assert not raising.others_know()
    assert "rank 1 did not arrive" in str(fail(waiting, RuntimeError("gave up waiting"), waiting.pass_name))
    assert raising.others_know()
    # the one that only waited has nothing to tell, whatever it raises then, and waits for nobody
    waiting.raised(RuntimeError("its own end"))
    assert not waiting.is_leaving
    # another pass is no concern of that exception's
    waiting.backwards += 1
    waiting.require_pass_elsewhere()


def test_a_rank_whose_pass_failed_is_met_in_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    waiting, failing = (in_its_process(monkeypatch, rank, store) for rank in range(2))
    for one in (waiting, failing):
        one.forward(True)
        one.backwards += 1
    fail(failing, RuntimeError("connection closed"), failing.pass_name)
    with pytest.raises(RuntimeError, match="rank 1 gave up waiting: RuntimeError: connection closed"):
        waiting.require_pass_elsewhere()
    assert not failing.is_leaving
    waiting.backwards += 1
    waiting.require_pass_elsewhere()


def test_named_errors_and_later_forwards_leave_no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    one = in_its_process(monkeypatch, 0, Store())
    one.raised(MisuseError("a call that was refused"))
    assert not one.is_leaving
    one.raised(ValueError("caught by the user"))
    assert one.is_leaving
    one.forward(True)
    assert not one.is_leaving


def test_without_a_store_nothing_is_waited_for() -> None:
    one = Progress(Ranks("no store"), lambda: None)
    one.raised(ValueError("boom"))
    one.require_pass_elsewhere()
    assert one.others_know()
