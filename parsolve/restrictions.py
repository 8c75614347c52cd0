"""Pins, forbids, minima and maxima on axes: read from text or Python values, turned into named rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from parsolve.errors import SpecError, UnknownNameError
from parsolve.functions import AXES, Rule
from parsolve.problem import Problem, replace_workload
from parsolve.specs import Recompute

PINNABLE = (*(axis for axis in AXES if axis not in ("split", "shards")), "sequence_parallel", "gbs")
LIMITS = {"zero": (0, 3), "recompute_layers": (0, 10**9)}
"""Lowest and highest value of an axis, where they are not 1 and 1,000,000,000."""
_SYNONYMS = {"microbatches": "grad_acc", "gradient_accumulation": "grad_acc"}


def axis_name(name: str, where: str, others: Iterable[str] = ()) -> str:
    """The canonical axis name, or an error with near misses, also of what ``others`` may be written there."""
    key = name.strip().lower().replace("-", "_")
    key = _SYNONYMS.get(key, key)
    if key not in PINNABLE:
        raise UnknownNameError("axis", name.strip(), (*PINNABLE, *_SYNONYMS, *others), where)
    return key


def axis_value(axis: str, value: Any, where: str) -> int:
    """One value of an axis as an integer; recompute by name, sequence_parallel as true/false."""
    text = str(value).strip().lower()
    if axis == "recompute":
        if isinstance(value, Recompute):
            return int(value)
        names = {r.text: int(r) for r in Recompute}
        if text not in names:
            raise UnknownNameError("recompute mode", value, names, where)
        return names[text]
    if axis == "sequence_parallel":
        return int(truth(axis, value, where))
    try:
        if isinstance(value, (bool, float)):
            raise ValueError
        number = int(text)
    except ValueError:
        raise SpecError(f"{axis} takes whole numbers, not {value!r}", where) from None
    lowest, highest = LIMITS.get(axis, (1, 10**9))
    if not lowest <= number <= highest:
        raise SpecError(f"{axis}={value} is out of range; {lowest} to {highest:,}", where)
    return number


def truth(name: str, value: Any, where: str) -> bool:
    """True or false, as written."""
    words = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
    text = str(value).strip().lower()
    if text not in words:
        raise SpecError(f"{name} takes true or false, not {value!r}", where)
    return words[text]


def _values(axis: str, value: Any, where: str) -> list[int]:
    if isinstance(value, str):
        parts: Iterable[Any] = value.split(",")
    elif isinstance(value, (set, frozenset, list, tuple, range)):
        parts = value
    else:
        parts = [value]
    found = sorted({axis_value(axis, part, where) for part in parts})
    if not found:
        raise SpecError(f"{axis} needs at least one value", where)
    return found


def show_value(axis: str, value: int) -> str:
    """``full`` for recompute=2, ``true`` for sequence_parallel=1, else the number."""
    if axis == "recompute":
        return Recompute(value).text
    return str(bool(value)).lower() if axis == "sequence_parallel" else str(value)


def _rule(kind: str, axis: str, text: str, holds: Any) -> Rule:
    name = f"{kind} {axis}={text}"
    doc = f"Asked for by the user: {name}."
    if axis == "gbs":
        return Rule(name, (), lambda p: holds(p.gbs), doc, "user", name + " (gbs is {p.gbs})")
    message = f"{name} excludes {axis}={{{axis}}}"
    return Rule(name, (axis,), lambda p, **values: holds(values[axis]), doc, "user", message)


def restrict(
    problem: Problem,
    pin: Mapping[str, Any] | None = None,
    forbid: Mapping[str, Any] | None = None,
    maximum: Mapping[str, Any] | None = None,
    minimum: Mapping[str, Any] | None = None,
    extra: Iterable[Rule] = (),
) -> Problem:
    """The problem with the user's restrictions as named rules.

    Raises
    ------
    SpecError: an unknown axis or a value that the axis cannot take.
    """
    rules: list[Rule] = []
    sequence_parallel: bool | None = None
    for kind, given in (("pin", pin), ("forbid", forbid), ("max", maximum), ("min", minimum)):
        for raw, value in (given or {}).items():
            where = f"--{kind}"
            axis = axis_name(raw, where)
            values = _values(axis, value, where)
            text = ",".join(show_value(axis, v) for v in values)
            if axis == "sequence_parallel":
                left = set(values) if kind == "pin" else {0, 1} - set(values)
                if kind not in ("pin", "forbid") or len(left) != 1:
                    raise SpecError("sequence_parallel can be pinned or forbidden as true or false", where)
                sequence_parallel = bool(left.pop())
                continue
            if kind in ("max", "min") and len(values) != 1:
                raise SpecError(f"{axis} takes one value", where)
            array = np.array(values)
            if kind == "pin":
                rules.append(_rule(kind, axis, text, lambda v, a=array: np.isin(v, a)))
            elif kind == "forbid":
                rules.append(_rule(kind, axis, text, lambda v, a=array: ~np.isin(v, a)))
            elif kind == "max":
                rules.append(_rule(kind, axis, text, lambda v, a=array: np.asarray(v) <= a[0]))
            else:
                rules.append(_rule(kind, axis, text, lambda v, a=array: np.asarray(v) >= a[0]))
    if sequence_parallel is not None:
        problem = replace_workload(problem, sequence_parallel=sequence_parallel)
    rules += extra
    return problem.with_(rules=(*problem.rules, *rules)) if rules else problem
