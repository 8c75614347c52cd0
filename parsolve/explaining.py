"""The catalogue of every rule, limit, warning, term and count, read from the functions themselves."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from parsolve.errors import UnknownNameError
from parsolve.functions import Count, Function, Limit, Rule, StageMax, Term, Warning_

if TYPE_CHECKING:
    from parsolve.result import Plan

KINDS = ("rule", "limit", "warning", "sum", "term", "count")


@dataclass(frozen=True)
class Entry:
    """One function: what it is, what it depends on, where it stands.

    ``line`` is the line of the breakdown that a term adds to; a sum lists the lines that it makes.
    """

    kind: str
    name: str
    axes: tuple[str, ...]
    unit: str
    lines: tuple[str, ...]
    doc: str
    source: str
    message: str
    frameworks: tuple[str, ...]
    function: Any

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, on one line."""
        first = self.doc.split("\n\n")[0]
        return " ".join(first.split())

    def place(self) -> str:
        """``parsolve.objectives.compute, line 56``."""
        code = inspect.unwrap(self.function).__code__
        return f"{self.function.__module__}, line {code.co_firstlineno}"

    def code(self) -> str:
        """The function as written."""
        try:
            return inspect.cleandoc("\n" + inspect.getsource(self.function))
        except OSError:  # no source files in this installation
            return ""

    def to_json(self, code: bool = True) -> dict[str, Any]:
        """Plain data."""
        data: dict[str, Any] = {
            "kind": self.kind,
            "name": self.name,
            "axes": list(self.axes),
            "unit": self.unit,
            "lines": list(self.lines),
            "formula": self.doc,
            "source": self.source,
            "message": self.message,
            "frameworks": list(self.frameworks),
        }
        return {**data, "place": self.place(), "code": self.code()} if code else data


@cache
def catalogue() -> tuple[Entry, ...]:
    """Everything built in, by kind in the order of ``KINDS``, then in the order of the files."""
    found: dict[Any, Entry] = {}
    for module in _modules():
        for value in _members(module):
            if isinstance(value, (Function, Limit)) and value not in found:
                found[value] = entry(value)
        for function in _sums(module):
            found.setdefault(function, _sum_entry(function))
    return tuple(sorted(found.values(), key=lambda item: KINDS.index(item.kind)))


def entry(function: Function | Limit) -> Entry:
    """The catalogue entry of one rule, limit, warning, term or count."""
    if isinstance(function, Limit):
        doc, source = inspect.cleandoc(function.doc), function.source
        return Entry(
            "limit", function.name, (), function.unit, (), doc, source, function.message, (), function.quantity
        )
    kind = {Rule: "rule", Warning_: "warning", Term: "term", Count: "count"}[type(function)]
    unit, message = "yes/no", ""
    lines: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ()
    if isinstance(function, Term):
        unit, lines = function.unit, ((function.label,) if function.label else ())
    elif isinstance(function, Count):
        unit = "1"
    elif isinstance(function, (Rule, Warning_)):
        message = function.message
        if isinstance(function, Rule):
            frameworks = tuple(sorted(function.frameworks or ()))
    doc, source = inspect.cleandoc(function.doc), function.source
    return Entry(kind, function.name, function.axes, unit, lines, doc, source, message, frameworks, function.compute)


def find(name: str) -> list[Entry]:
    """Entries of that name, else those that add to the breakdown line of that name.

    Raises
    ------
    UnknownNameError: with near misses.
    """
    key = name.strip().lower().replace("-", "_")
    entries = catalogue()
    named = [e for e in entries if e.name == key]
    adding = [e for e in entries if key in e.lines and e not in named]
    adding.sort(key=lambda e: e.kind == "sum")
    if not named and not adding:
        known = {e.name for e in entries} | {line for e in entries for line in e.lines} | {"profile"}
        raise UnknownNameError("rule or term", name, known)
    return [*named, *adding]


def plan_formulas(plan: Plan) -> list[dict[str, Any]]:
    """For every line of a plan's time and memory, the figure and the functions that it is made of."""
    from parsolve.constraints.memory import stage_memory
    from parsolve.evaluation import instance_of
    from parsolve.objectives.step_time import step_time

    p = instance_of(plan.problem, plan.config)
    estimate = plan.estimate
    memory = {name: amount for name, amount in estimate.memory_bytes.items() if name not in ("total", "limit")}
    return [
        *_formulas("s", estimate.terms_s, estimate.hidden_s, step_time(p)),
        *_formulas("B", memory, {}, (stage_memory(p),)),
    ]


def _formulas(
    unit: str, amounts: Mapping[str, float], hidden: Mapping[str, float], quantities: Iterable[StageMax]
) -> list[dict[str, Any]]:
    terms: dict[str, dict[Term, None]] = {}
    for quantity in quantities:
        for part in quantity.parts:
            line = quantity.name if quantity.at_least_zero else part.line
            if part.sign > 0:
                terms.setdefault(line, {})[part.term] = None
    return [
        {
            "line": line,
            "unit": unit,
            "value": amount,
            "hidden": hidden.get(line, 0.0),
            "functions": [entry(term).to_json(code=False) for term in terms.get(line, {})],
        }
        for line, amount in sorted(amounts.items(), key=lambda item: -item[1])
        if amount or hidden.get(line)
    ]


def _modules() -> Iterator[ModuleType]:
    for name in ("parsolve.constraints", "parsolve.objectives"):
        package = importlib.import_module(name)
        for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
            yield importlib.import_module(f"{name}.{info.name}")


def _members(module: ModuleType) -> Iterator[Any]:
    for value in vars(module).values():
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value


def _sums(module: ModuleType) -> Iterator[Any]:
    """Functions of an instance that build a worst-stage sum."""
    for value in vars(module).values():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            signature = inspect.signature(value)
            if signature.return_annotation in ("StageMax", StageMax) and list(signature.parameters) == ["p"]:
                yield value


@cache
def _sample() -> Any:
    """An instance with experts and recomputed layers, on which sums can be built to see which lines they make."""
    from parsolve.problem import Problem
    from parsolve.splits import Split, Splits, balanced

    problem = Problem("h100-sxm:1x8", "deepseek-v3", seq_len=4096, gbs=8)
    partly_recomputed = Split(balanced(problem.model.num_layers, 1, 1), "even", 1)
    return problem.instance(8, Splits(problem.model.layer_is_moe, [partly_recomputed]))


def _sum_entry(function: Any) -> Entry:
    quantity: StageMax = function(_sample())
    lines = (quantity.name,) if quantity.at_least_zero else tuple(dict.fromkeys(part.line for part in quantity.parts))
    unit = quantity.parts[0].term.unit if quantity.parts else "s"
    doc = inspect.getdoc(function) or ""
    return Entry("sum", function.__name__, (), unit, lines, doc, "", "", (), function)
