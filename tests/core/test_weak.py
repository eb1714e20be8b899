import gc
import weakref

from unified_ddp.weak import weak_call


class Owner:
    def add(self, a: int, b: int) -> int:
        return a + b


def test_it_calls_while_the_object_lives_and_keeps_nothing_alive() -> None:
    owner = Owner()
    call, gone = weak_call(owner.add), weakref.ref(owner)
    assert call(1, 2) == 3
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
    assert call(1, 2) is None
