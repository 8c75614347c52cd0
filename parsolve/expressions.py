"""``--require 'tp*cp <= 8'``: arithmetic and comparisons over axes, parsed into a rule. Nothing else evaluates."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from parsolve.errors import SpecError, UnknownNameError
from parsolve.functions import AXES, Rule, ordered
from parsolve.specs import Recompute

MAX_LENGTH, MAX_NODES, MAX_NUMBER = 300, 100, 10**9


def _not_zero(divisor: Any) -> Any:
    if np.any(np.equal(divisor, 0)):
        raise ZeroDivisionError("a divisor is zero")
    return divisor


_NUMERIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: a // _not_zero(b),
    ast.Mod: lambda a, b: a % _not_zero(b),
    ast.Div: lambda a, b: a / _not_zero(b),
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
NAMES = (*(axis for axis in AXES if axis != "split"), "gbs")
_RECOMPUTE = {r.text: int(r) for r in Recompute}


def require_rule(text: str) -> Rule:
    """The rule that ``text`` holds.

    Allowed: whole and decimal numbers, axis names (and gbs; none, selective, full, block, light for recompute),
    + - * / // %,
    comparisons (chained too), and/or/not, parentheses.

    Raises
    ------
    SpecError: anything else, without evaluating it.
    """
    where = "--require"
    if len(text) > MAX_LENGTH:
        raise SpecError(f"the expression has {len(text)} characters; {MAX_LENGTH} are allowed", where)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"cannot read {text!r}: write a comparison over axes such as 'tp*cp <= 8'", where) from error
    nodes = list(ast.walk(tree))
    if len(nodes) > MAX_NODES:
        raise SpecError(f"{text[:60]!r}… is too long; split it into several --require", where)
    names: set[str] = set()
    for node in nodes:
        _check(node, text, names)
    if not _is_condition(tree):
        raise SpecError(f"{text!r} is a number, not a condition; compare it, as in 'tp*cp <= 8'", where)
    axes = ordered(names - {"gbs"})

    def compute(p: Any, **values: Any) -> Any:
        return _evaluate(tree, {**values, **_RECOMPUTE, "gbs": p.gbs})

    shown = ", ".join(f"{axis}={{{axis}}}" for axis in axes)
    name = f"require {text.strip()}"
    message = text.strip().replace("{", "{{").replace("}", "}}") + " does not hold" + (f" ({shown})" if shown else "")
    return Rule(name, axes, compute, f"Required by the user: {text.strip()}", "user", message)


def _check(node: ast.AST, text: str, names: set[str]) -> None:
    where = "--require"
    if isinstance(node, ast.Name):
        if node.id in _RECOMPUTE:
            return
        if node.id not in NAMES:
            raise UnknownNameError("axis", node.id, NAMES, where)
        names.add(node.id)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)) or abs(node.value) > MAX_NUMBER:
            raise SpecError(f"{str(node.value)[:40]!r} is not a number up to {MAX_NUMBER}", where)
    elif isinstance(node, ast.BinOp):
        if type(node.op) not in _NUMERIC:
            raise SpecError(f"{text!r} uses an operator that is not allowed; use + - * / // %", where)
    elif isinstance(node, ast.Compare):
        if any(type(op) not in _COMPARE for op in node.ops):
            raise SpecError(f"{text!r} uses a comparison that is not allowed; use == != < <= > >=", where)
    elif isinstance(node, ast.UnaryOp):
        if not isinstance(node.op, (ast.Not, ast.USub, ast.UAdd)):
            raise SpecError(f"{text!r} uses an operator that is not allowed; use not or a minus sign", where)
    elif not isinstance(node, (ast.BoolOp, ast.And, ast.Or, ast.operator, ast.cmpop, ast.unaryop, ast.expr_context)):
        raise SpecError(f"{text!r} may hold numbers, axes, arithmetic, comparisons, and/or/not, nothing else", where)


def _is_condition(node: ast.AST) -> bool:
    if isinstance(node, ast.BoolOp):
        return all(_is_condition(value) for value in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _is_condition(node.operand)
    return isinstance(node, ast.Compare)


def _evaluate(node: ast.AST, values: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.UnaryOp):
        operand = _evaluate(node.operand, values)
        if isinstance(node.op, ast.Not):
            return np.logical_not(operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp):
        return _NUMERIC[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values))
    if isinstance(node, ast.BoolOp):
        combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        result = _evaluate(node.values[0], values)
        for value in node.values[1:]:
            result = combine(result, _evaluate(value, values))
        return result
    assert isinstance(node, ast.Compare)
    left, result = _evaluate(node.left, values), np.bool_(True)
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(right_node, values)
        result = np.logical_and(result, _COMPARE[type(op)](left, right))
        left = right
    return result
