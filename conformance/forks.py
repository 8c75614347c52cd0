"""Runs a check on each line of JSON from stdin in a process of its own, so that no global state leaks to the next.

What a check imports is imported here after the first one, so that the later ones start warm.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

LIMIT_S = 120


class Refused(Exception):
    """The real program does not take the line, or sees something else in it."""


def expect(what: str, seen: object, wanted: object) -> None:
    """Refuse where the real program sees another value than the plan has."""
    if seen != wanted:
        raise Refused(f"{what} is {seen}, the plan has {wanted}")


def run(check: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Print ``{"id": …, "ok": …, "error": …}`` for every plan."""
    out = os.dup(1)
    os.dup2(2, 1)  # whatever the checked programs print goes to stderr
    for line in sys.stdin:
        plan = json.loads(line)
        if "gap" in plan:
            continue
        answer = _in_child(check, plan)
        for name in answer.pop("imports", ()):
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        os.write(out, (json.dumps({"id": plan["id"], **answer}) + "\n").encode())


def _in_child(check: Callable[[dict[str, Any]], dict[str, Any] | None], plan: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(2, 1)
        known = set(sys.modules)
        try:
            answer: dict[str, Any] = {"ok": True, **(check(plan) or {})}
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            answer = {"ok": False, "error": f"{text} ({os.path.basename(where.filename)}:{where.lineno})"}
        answer["imports"] = [name for name in sys.modules if name not in known]
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"ok": False, "error": "the check died or ran out of time"}


def torchrun_part(argv: list[str], world: int) -> tuple[str, list[str]]:
    """Parse the torchrun part with the real parser; returns the script (or module) and its arguments."""
    from torch.distributed.run import get_args_parser

    if argv[0] != "torchrun":
        raise Refused(f"the line starts with {argv[0]}")
    args = get_args_parser().parse_args(argv[1:])
    expect("the number of processes", int(args.nnodes) * int(args.nproc_per_node), world)
    return args.training_script, list(args.training_script_args)
