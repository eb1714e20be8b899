"""The process of one side: `python -P -m unified_ddp.equivalence.processes.worker FD FILE FUNCTION`.

It answers requests (name of a method, arguments) that come over a socket, one by one, until that closes.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import unified_ddp
from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.processes.child import follow_parent
from unified_ddp.equivalence.processes.loading import Program, own_lines
from unified_ddp.equivalence.processes.messages import Closed, receive, send
from unified_ddp.equivalence.side import Side

METHODS = ("evaluate", "info", "randomness", "reduce", "tensors", "train", "update", "values")


def main(arguments: list[str]) -> None:
    """Serves a side."""
    follow_parent()
    descriptor, file, function = arguments
    os.set_inheritable(int(descriptor), False)
    program = Program(Path(file), function)
    with socket.socket(fileno=int(descriptor)) as stream:
        made = _answer(program, program.make)
        if "value" not in made:
            return send(stream, made)
        side, batches = made["value"]
        told = {
            "version": unified_ddp.__version__,
            "framework": side.framework,
            "has_optimizer": side.has_optimizer,
            "batches": batches,
        }
        _reply(stream, program, {"value": told})
        _serve(stream, program, side)


def _serve(stream: socket.socket, program: Program, side: Side) -> None:
    while True:
        try:
            method, positional, named = receive(stream)
        except Closed:
            return
        assert method in METHODS
        call = getattr(side, method)
        _reply(stream, program, _answer(program, call, *positional, **named))


def _reply(stream: socket.socket, program: Program, answer: dict[str, Any]) -> None:
    try:
        send(stream, answer)
    except EquivalenceError as error:  # it holds what cannot be sent
        send(stream, {"error": f"{program}: {error}", "cannot compare": True})


def _answer(program: Program, call: Any, *positional: Any, **named: Any) -> dict[str, Any]:
    try:
        return {"value": call(*positional, **named)}
    except EquivalenceError as error:
        return {"error": str(error), "cannot compare": True}
    except Exception as error:
        return {"error": own_lines(error, program.path), "cannot compare": False}


if __name__ == "__main__":
    main(sys.argv[1:])
