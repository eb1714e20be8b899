"""Which parameters take part in an iteration, and what is said of those that should and do not.

An iteration is what lies between two synchronising forwards; it may hold several backward passes. The fragments of the
messages that name indices and flags are torch's, as users and their tests know them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from unified_ddp.errors import UnusedParameterError

_PRIOR = "Expected to have finished reduction in the prior iteration before starting a new one. "
_NOT_DECLARED = (
    "Some parameters were not used in producing the loss. Their gradients were reduced, this rank counting as zero, so "
    "nothing differs between ranks; but nothing said that they might be unused. If they may be, say so by passing the "
    "keyword argument `find_unused_parameters=True` to DistributedDataParallel; if they should not be, make sure that "
    "all `forward` function outputs participate in calculating loss."
)
_USED_LESS = (
    "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
    "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to True."
)
_USED_MORE = (
    "Your training graph has changed in this iteration: parameters that the first iteration did not use got a "
    "gradient. It was reduced, but this is not compatible with static_graph set to True."
)


class Usage:
    """Follows the used parameters through iterations.

    Args:
        names: of the parameters.
        exempt: parameters that may be unused in any case.
        find_unused: any parameter may be unused.
        static: the first iteration tells which parameters are used in all.
        hint: says, behind an error, how to see more.
    """

    def __init__(
        self,
        names: Sequence[str],
        exempt: Collection[int],
        *,
        find_unused: bool,
        static: bool,
        hint: Callable[[], str] = str,
    ) -> None:
        self._names = names
        self._hint = hint
        self._exempt = set(exempt)
        self._find_unused = find_unused
        self.static = static
        self.known: list[int] | None = None
        # One object for the common case, in which every parameter is used: what is asked of it below is then free.
        self._all = frozenset(range(len(names)))
        self._required = self._all - self._exempt
        self._covered: frozenset[int] = frozenset()
        self._excused: set[int] = set()
        self._lent: set[int] = set()
        self._counts: list[int] | None = None
        self._passes = 0
        self._shadow = False
        self._frozen = False
        self._undeclared: list[int] = []
        self._patterns: set[frozenset[int]] = set()
        self.iterations = 0

    @property
    def varies(self) -> bool:
        """Whether the set of used parameters may differ from one iteration to the next."""
        return self._find_unused and not self.static

    @property
    def is_asked(self) -> bool:
        """Whether ranks tell each other what they used; all ranks agree on this."""
        return self.varies or self.needs_counts

    @property
    def needs_counts(self) -> bool:
        """Whether `add` wants the ranks' answers."""
        return self.static and self.known is None

    @property
    def under_way(self) -> bool:
        """Whether this iteration held a synchronising backward pass already."""
        return self._passes > 0

    @property
    def unused(self) -> list[int]:
        """Parameters without a gradient so far in this iteration."""
        return [i for i in range(len(self._names)) if i not in self._covered]

    @property
    def never_changed(self) -> bool:
        """Whether all iterations used the same parameters."""
        now = {self._covered} if self._passes and not self._shadow else set()
        return len(self._patterns | now) <= 1

    def add(
        self,
        params: Sequence[int],
        counts: list[int] | None,
        shadow: bool = False,
        incomplete: Callable[[], tuple[Iterable[int], Iterable[int]]] = lambda: ((), ()),
    ) -> None:
        """Hears, at the end of a synchronising backward pass, who got a gradient.

        Args:
            params: those with a gradient, each once.
            counts: on how many ranks each has one, if that was asked.
            shadow: this rank only took part with zeros, having joined.
            incomplete: tells, if some got none, which parameters do not ask for one now, and for which of them other
                ranks had one.

        Raises:
            UnusedParameterError: the graph is static, and more is used than in its first iteration.
        """
        self._passes += 1
        self._shadow |= shadow
        used = self._all if len(params) == len(self._all) else frozenset(params)
        self._covered = used if used is self._all or not self._covered else self._covered | used
        if self._covered is not self._all:
            frozen, lent = incomplete()
            self._excused.update(frozen)
            self._lent.update(lent)
        if counts is not None:
            before = self._counts or [0] * len(counts)
            self._counts = [max(a, b) for a, b in zip(before, counts, strict=True)]
        if self._frozen:
            more = sorted(used - self._required - self._exempt)
            if more:
                self._undeclared = more
                raise UnusedParameterError(f"{_USED_MORE} Parameters: {', '.join(self._names[i] for i in more)}")

    def next_iteration(self, rank: int) -> None:
        """Ends an iteration, if it held a synchronising backward pass, and starts the next.

        Raises:
            UnusedParameterError: it left a parameter without a gradient that should have one.
        """
        if not self._passes:
            return
        self.require_covered(rank)
        if self.static:
            self.known = self.known or self._counts
            if not self._shadow and not self._frozen:
                self._required = self._covered - self._exempt
                self._frozen = True
        if not self._shadow:
            self._patterns.add(self._covered)
        self.iterations += 1
        self._passes, self._covered, self._shadow = 0, frozenset(), False
        self._excused, self._lent = set(), set()

    def require_covered(self, rank: int) -> None:
        """Raises UnusedParameterError if the iteration so far left out a parameter that it should have used."""
        if self._undeclared:
            raise UnusedParameterError(self._message(self._undeclared, f"{rank} in the first iteration"))
        if self.varies or not self._passes or self._shadow or (self.static and not self._frozen):
            return
        missing = sorted(self._required - self._covered - self._excused) if self._covered is not self._all else []
        if missing:
            raise UnusedParameterError(self._message(missing, rank))

    def restart(self) -> None:
        """Forgets everything, as after construction."""
        self.__init__(  # type: ignore[misc]
            self._names, self._exempt, find_unused=self._find_unused, static=self.static, hint=self._hint
        )

    def _message(self, missing: Sequence[int], rank: int | str) -> str:
        text = _PRIOR + (_USED_LESS if self.static else _NOT_DECLARED)
        text += f"\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}"
        names = ", ".join(self._names[i] for i in missing)
        text += f"\nParameters which did not receive grad for rank {rank}: {names}"
        lent = [self._names[i] for i in missing if i in self._lent]
        nowhere = [self._names[i] for i in missing if i not in self._lent]
        if lent:
            text += f"\nOther ranks had a gradient for: {', '.join(lent)}"
        if nowhere and not self._undeclared:
            text += f"\nNo rank had a gradient for: {', '.join(nowhere)}"
        return text + self._hint()
