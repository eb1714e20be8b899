"""How alike two modules' names are: words in the field's spellings, indices by their rank among their like."""

import re
from collections import defaultdict
from collections.abc import Sequence

_WORDS = {
    "q": ["query"],
    "k": ["key"],
    "v": ["value"],
    "o": ["out"],
    "output": ["out"],
    "fc": ["dense"],
    "linear": ["dense"],
    "lin": ["dense"],
    "bn": ["batch", "norm"],
    "batchnorm": ["batch", "norm"],
    "ln": ["layer", "norm"],
    "layernorm": ["layer", "norm"],
    "gn": ["group", "norm"],
    "groupnorm": ["group", "norm"],
    "rmsnorm": ["rms", "norm"],
    "emb": ["embed"],
    "embedding": ["embed"],
    "embeddings": ["embed"],
    "wte": ["embed"],
    "wpe": ["pos", "embed"],
    "position": ["pos"],
    "attn": ["attention"],
    "mha": ["attention"],
    "multihead": ["attention"],
    "ffn": ["mlp"],
    "feedforward": ["mlp"],
    "block": ["layer"],
    "blocks": ["layer"],
    "layers": ["layer"],
    "classifier": ["head"],
    "convolution": ["conv"],
    "downsample": ["shortcut"],
    "experts": ["expert"],
}
_SILENT = {"proj", "projection", "self", "module", "cell", "params", "model", "multi"}
_PIECE = re.compile(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Name:
    """A path in words and numbers.

    Attributes:
        words: in the spelling that all frameworks share, in order.
        numbers: (words before it, value) in order; `names_of` replaces values by ranks.
    """

    def __init__(self, path: str) -> None:
        self.words: list[str] = []
        self.numbers: list[tuple[tuple[str, ...], int]] = []
        for piece in _PIECE.findall(path):
            if piece.isdigit():
                self.numbers.append((tuple(self.words), int(piece)))
            else:
                word = piece.lower()
                self.words += [] if word in _SILENT else _WORDS.get(word, [word])
        if not self.words:  # silent words are better than none
            self.words = [piece.lower() for piece in _PIECE.findall(path) if not piece.isdigit()]


def names_of(paths: Sequence[str], kinds: Sequence[str]) -> list[Name]:
    """Returns the names, with each index replaced by its rank among modules of one kind with the same words.

    "conv1" and "Conv_0" are both the first of their kind so; so are "net.0" and "net.3" the first and second
    convolution of a sequence that has other modules in between.
    """
    names = [Name(path) for path in paths]
    seen: dict[tuple[object, ...], set[int]] = defaultdict(set)

    def context(name: Name, kind: str, depth: int) -> tuple[object, ...]:
        before = tuple(value for _, value in name.numbers[:depth])
        return (kind, tuple(name.words), depth, before)

    for name, kind in zip(names, kinds, strict=True):
        for depth, (_, value) in enumerate(name.numbers):
            seen[context(name, kind, depth)].add(value)
    for name, kind in zip(names, kinds, strict=True):
        ranked = [
            (words, sorted(seen[context(name, kind, depth)]).index(value))
            for depth, (words, value) in enumerate(name.numbers)
        ]
        name.numbers = ranked
    return names


def similarity(first: Name, second: Name) -> float:
    """Returns how alike two names are: 1.5 for the same, 0 for nothing in common, less where indices differ."""
    rest = list(second.words)
    common = 0
    for word in first.words:
        if word in rest:
            rest.remove(word)
            common += 1
    total = len(first.words) + len(second.words)
    score = 2 * common / total if total else 1.0
    if first.words[-1:] == second.words[-1:]:
        score += 0.5
    ours, theirs = ([value for _, value in name.numbers] for name in (first, second))
    score -= 0.4 * sum(a != b for a, b in zip(ours[::-1], theirs[::-1], strict=False))
    return score - 0.1 * abs(len(ours) - len(theirs))
