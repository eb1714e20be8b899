"""Programs, drawn by hypothesis: plain data, so that one can be printed, sent to ranks and replayed.

A program is `{"ranks", "seed", "parts", "buffers", "frozen", "options", "hook", "timeout", "steps"}`. A step is
`{"zero", "ops"}`: how gradients are cleared, then operations, then a step of the optimizer. An operation is a dict with
`do` and its arguments; `only` says which ranks run it, and lists `fails` which ranks raise in it. Backward passes name
slots, which forwards fill.
"""

from typing import Any

from hypothesis import strategies as st

from fuzz.model import PARTS

Program = dict[str, Any]

CHANGES = ("freeze", "unfreeze", "add", "remove", "replace", "new layer", "cast")
INSIDE = ("freeze", "unfreeze", "add", "replace", "new layer")
HOOKS = (None, None, None, "custom", "torch_allreduce", "torch_fp16", "AllReduce", "Compressed")
TOGETHER_TIMEOUT, APART_TIMEOUT = 30, 2


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "gradient_as_bucket_view": draw(st.booleans()),
        "find_unused_parameters": draw(st.booleans()),
        "static_graph": draw(st.sampled_from([False, False, True])),
        "reduction": draw(st.sampled_from(["mean", "mean", "mean", "sum", "weighted_mean"])),
        "bucket_cap_mb": draw(st.sampled_from([None, 0.0001, 0.0002])),
        "forward_sync_buffers": draw(st.sampled_from([True, True, False])),
        "skip_all_reduce_unused_params": draw(st.sampled_from([False, False, False, True])),
        "check_replicas_every": draw(st.sampled_from([None, None, 2])),
    }
    return {name: value for name, value in drawn.items() if value not in (None, False, "mean")} | (
        {} if drawn["forward_sync_buffers"] else {"forward_sync_buffers": False}
    )


@st.composite
def operations(draw: st.DrawFn, has_hook: bool, ranks: int) -> list[dict[str, Any]]:
    """Forwards and backward passes, such that each backward pass has a graph that is still there."""
    ops: list[dict[str, Any]] = []
    alive: list[int] = []
    slots = 0
    if draw(st.integers(0, 3)) == 0:
        ops.append({"do": "change", **draw(changes(CHANGES))})
    for token in draw(st.lists(st.sampled_from("FBFBFBRMSG"), min_size=1, max_size=7)):
        if token in "BRMG" and not alive:
            token = "F"
        if token == "F":
            op: dict[str, Any] = {"do": "forward", "slot": slots}
            if draw(st.integers(0, 3)) == 0:
                op["no_sync"] = True
            if draw(st.integers(0, 3)) == 0:
                op["use"] = "".join(sorted(draw(st.sets(st.sampled_from(PARTS)))))
            if draw(st.integers(0, 5)) == 0:
                op["inside"] = draw(changes(INSIDE))
            alive.append(slots)
            slots += 1
        elif token == "S":
            op = {"do": "sync_gradients"}
        elif token == "G":
            op = {"do": "autograd_grad", "slot": draw(st.sampled_from(alive))}
        else:
            many = token == "M" and len(alive) > 1
            chosen = list(alive) if many else [draw(st.sampled_from(alive))]
            op = {"do": "backward", "slots": chosen}
            if token == "R":
                op["retain"] = True
            else:
                alive = [slot for slot in alive if slot not in chosen]
        ops.append(op)
    for slot in alive if draw(st.integers(0, 3)) else []:
        ops.append({"do": "backward", "slots": [slot]})
    if draw(st.integers(0, 5)) == 0:
        fail(draw, ops, list(range(ranks)), has_hook)
    return ops


def fail(draw: st.DrawFn, ops: list[dict[str, Any]], ranks: list[int], has_hook: bool) -> None:
    op = draw(st.sampled_from(ops))
    if op["do"] in ("forward", "backward"):
        where = "fails_hook" if has_hook and op["do"] == "backward" and draw(st.booleans()) else "fails"
        op[where] = ranks


@st.composite
def changes(draw: st.DrawFn, kinds: tuple[str, ...]) -> dict[str, Any]:
    kind = draw(st.sampled_from(kinds))
    return {
        "kind": kind,
        "part": draw(st.sampled_from(PARTS if kind == "freeze" else [*PARTS, "body"])),
        "seed": draw(st.integers(0, 9)),
    }


@st.composite
def programs(draw: st.DrawFn, ranks_apart: bool = False) -> Program:
    """Draws a program; if `ranks_apart`, one in which some ranks do something else."""
    ranks = draw(st.sampled_from([2, 2, 3]))
    hook = draw(st.sampled_from(HOOKS))
    steps = [
        {"zero": draw(st.sampled_from(["none", "none", "zeros", "keep"])), "ops": ops}
        for ops in draw(st.lists(operations(hook == "custom", ranks), min_size=1, max_size=3))
    ]
    program = {
        "ranks": ranks,
        "seed": draw(st.integers(0, 99)),
        "parts": draw(st.sampled_from(["ab", "abc", "a"])),
        "buffers": draw(st.booleans()),
        "frozen": draw(st.sampled_from(["", "", "", "a", "b"])),
        "options": draw(options()),
        "hook": hook,
        "timeout": APART_TIMEOUT if ranks_apart else TOGETHER_TIMEOUT,
        "steps": steps,
    }
    if ranks_apart:
        part_ranks(draw, program)
    return program


def part_ranks(draw: st.DrawFn, program: Program) -> None:
    ranks = program["ranks"]
    some = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1)))
    step = draw(st.sampled_from(program["steps"]))
    ops = step["ops"]
    match draw(st.sampled_from(["fail", "skip step", "extra", "less", "change", "no_sync", "options", "hook"])):
        case "fail":
            fail(draw, ops, some, program["hook"] == "custom")
        case "skip step":
            step["only"] = some
        case "extra":
            slot = 100
            ops.append({"do": "forward", "slot": slot, "only": some})
            if draw(st.booleans()):
                ops.append({"do": "backward", "slots": [slot], "only": some})
        case "less":
            draw(st.sampled_from(ops))["only"] = some
        case "change":
            ops.insert(0, {"do": "change", **draw(changes(CHANGES)), "only": some})
        case "no_sync":
            forwards = [op for op in ops if op["do"] == "forward"]
            if forwards:
                draw(st.sampled_from(forwards))["no_sync_on"] = some
        case "options":
            program["differs"] = {"find_unused_parameters": some}
        case "hook":
            program["hook_on"] = some
