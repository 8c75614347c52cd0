"""The one idea: a rule, count, or cost term is a pure function whose keyword-only parameters are the axes it needs.

The evaluator, ``check``, ``explain``, the test oracle and the solver call the same function object; the solver sees it
tabulated over its axes. Every function takes numpy arrays as well as scalars for its axes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from parsolve.errors import SpecError

if TYPE_CHECKING:
    from parsolve.problem import Instance
    from parsolve.specs import Workload

Array = NDArray[Any]

AXES: dict[str, str] = {
    "tp": "tensor parallel size",
    "cp": "context parallel size",
    "pp": "pipeline parallel size",
    "ep": "expert parallel size",
    "etp": "expert tensor parallel size",
    "dp": "data parallel size (Megatron's: world / (tp*cp*pp))",
    "edp": "expert data parallel size: world / (etp*ep*pp)",
    "shards": "ranks that share dense optimizer states: dp*cp",
    "zero": "ZeRO stage, 0 to 3",
    "mbs": "micro-batch size, sequences",
    "grad_acc": "microbatches per step and data-parallel rank",
    "vpp": "virtual pipeline chunks per rank",
    "recompute": "activation recomputation: 0 none, 1 selective, 2 full, 3 block, 4 light",
    "recompute_layers": "layers at the start of every pipeline chunk that recompute=block recomputes, else 0",
    "split": "how the layers are cut into stages: an index into the problem's list of splits",
}
STAGE = "stage"
"""Not a decision: the slot of a representative pipeline rank, over which a maximum is taken."""


class Points(dict[str, Any]):
    """Values of the axes, at which an instance's functions are called once each; their answers are not to be changed.

    ``at_stages``: the same with all stage slots in front, arrays (slot, …).
    """

    def __init__(self, p: Instance, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.p = p
        self.known: dict[Function, Any] = {}

    @staticmethod
    def of(p: Instance, values: Mapping[str, Any]) -> Points:
        """These values, if they are not such already."""
        return values if isinstance(values, Points) and values.p is p else Points(p, values)

    @cached_property
    def at_stages(self) -> Points:
        ndim = max((np.ndim(value) for value in self.values()), default=0)
        return Points(self.p, {**self, STAGE: np.arange(self.p.splits.slots).reshape(-1, *[1] * ndim)})


@dataclass(frozen=True, eq=False)
class Function:
    """A pure function ``compute(p, *, axis, …)`` of the instance ``p`` and some axes."""

    name: str
    axes: tuple[str, ...]
    compute: Callable[..., Any]
    doc: str
    source: str

    def __call__(self, p: Instance, values: Mapping[str, Any]) -> Any:
        """Value(s) at ``values``, which may hold more axes than the function needs.

        Raises
        ------
        SpecError: the function raised; the message names both.
        """
        if isinstance(values, Points) and values.p is p:
            if self not in values.known:
                values.known[self] = self._computed(p, values)
            return values.known[self]
        return self._computed(p, values)

    def _computed(self, p: Instance, values: Mapping[str, Any]) -> Any:
        try:
            value = self.compute(p, **{axis: values[axis] for axis in self.axes})
            return np.asarray(value) if isinstance(value, list | tuple) else value
        except Exception as error:
            kind = type(self).__name__.strip("_").lower()
            raise SpecError(f"it raised {type(error).__name__}: {error}", f"{kind} {self.name}") from error


@dataclass(frozen=True, eq=False)
class Rule(Function):
    """A yes/no over few axes. ``message`` is formatted with ``p`` and the axes when the rule is broken.

    ``role``: ``grid`` rules are identities that are always kept, ``canonical`` rules give each plan one spelling,
    ``legal`` rules can be named in a conflict. It applies to some frameworks, and ``needs`` names a workload field
    without which it says nothing.
    """

    message: str = ""
    role: Literal["grid", "canonical", "legal"] = "legal"
    frameworks: frozenset[str] | None = None
    needs: str = ""

    def applies(self, workload: Workload) -> bool:
        """The rule has something to say about such a workload."""
        here = self.frameworks is None or workload.framework in self.frameworks
        return here and (not self.needs or getattr(workload, self.needs) is not None)

    def explain(self, p: Instance, values: Mapping[str, Any]) -> str:
        """The message with the values that break the rule."""
        return self.message.format(p=p, **{axis: _shown(axis, values[axis]) for axis in self.axes})


@dataclass(frozen=True, eq=False)
class Warning_(Function):
    """Legal but doubtful: true where the warning applies."""

    message: str = ""

    def explain(self, p: Instance, values: Mapping[str, Any]) -> str:
        """The message with its numbers."""
        return self.message.format(p=p, **{axis: _shown(axis, values[axis]) for axis in self.axes})


@dataclass(frozen=True, eq=False)
class Term(Function):
    """Seconds or bytes over few axes. ``label`` is the line of the printed breakdown that it adds to."""

    unit: str = "s"
    label: str = ""


@dataclass(frozen=True, eq=False)
class Count(Function):
    """A non-negative multiplier over ``split``, ``stage`` and ``grad_acc`` only, dimensionless."""


@dataclass(frozen=True)
class Part:
    """``sign * count * weight * term``: one summand of a stage's time or memory.

    ``weight`` is a term without unit over few axes (microbatches per pipeline share); ``label`` replaces the term's.
    """

    term: Term
    count: Count | None = None
    weight: Term | None = None
    sign: int = 1
    label: str = ""

    @property
    def line(self) -> str:
        """The line of the breakdown."""
        return self.label or self.term.label or self.term.name

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of weight times term, in canonical order."""
        return ordered({*self.term.axes, *(self.weight.axes if self.weight else ())})

    def leaf(self, p: Instance, values: Mapping[str, Any]) -> Any:
        """``weight * term`` without count and sign."""
        value = self.term(p, values)
        return value * self.weight(p, values) if self.weight else value


@dataclass(frozen=True)
class StageMax:
    """The maximum over pipeline ranks of a sum of parts; never below zero when ``at_least_zero``."""

    name: str
    parts: tuple[Part, ...]
    at_least_zero: bool = False

    def stages(self, p: Instance, values: Mapping[str, Any]) -> Any:
        """The sum of parts for each representative stage slot: array (slot, …) over scalar or array axis values."""
        points = Points.of(p, values)
        here = points.at_stages
        total: Any = np.zeros_like(here[STAGE], dtype=float)
        for part in self.parts:
            leaf = part.leaf(p, points)
            total = total + part.sign * (leaf * part.count(p, here) if part.count else leaf)
        return total

    def value(self, p: Instance, values: Mapping[str, Any]) -> Any:
        """Scalar or array: the worst stage."""
        worst = self.stages(p, values).max(axis=0)
        return np.maximum(worst, 0.0) if self.at_least_zero else worst


@dataclass(frozen=True, eq=False)
class Limit:
    """A quantity compared with a budget, seen by check, explain and conflicts like a rule.

    ``quantity`` builds the worst-stage sum for an instance, ``budget`` is in the same ``unit``; ``message`` is
    formatted with ``p``, ``value``, ``budget`` and ``excess`` (GiB when the unit is B).
    """

    name: str
    quantity: Callable[[Instance], StageMax]
    budget: Callable[[Instance], float]
    message: str
    unit: str = "B"
    doc: str = ""
    source: str = ""

    def holds(self, p: Instance, values: Mapping[str, Any]) -> Any:
        """True where the quantity is within the budget."""
        return self.quantity(p).value(p, values) <= self.budget(p)

    def explain(self, p: Instance, values: Mapping[str, Any]) -> str:
        """The message with its numbers."""
        scale = 2**30 if self.unit == "B" else 1.0
        value, budget = float(self.quantity(p).value(p, values)) / scale, self.budget(p) / scale
        return self.message.format(p=p, value=value, budget=budget, excess=value - budget)


def ordered(axes: Iterable[str]) -> tuple[str, ...]:
    """Axes in the order of ``AXES``."""
    present = set(axes)
    return tuple(axis for axis in (*AXES, STAGE) if axis in present)


def _shown(axis: str, value: Any) -> Any:
    """One value of an axis for a message."""
    from parsolve.specs import Recompute

    plain = value.item() if isinstance(value, np.generic) else value
    return Recompute(plain) if axis == "recompute" and plain in iter(Recompute) else plain


def _read_axes(function: Callable[..., Any], allowed: Iterable[str]) -> tuple[str, ...]:
    parameters = list(inspect.signature(function).parameters.values())
    name = getattr(function, "__name__", "function")
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise SpecError("the first parameter must be the problem instance p", name)
    axes = []
    for parameter in parameters[1:]:
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            raise SpecError(f"parameter {parameter.name!r} must be keyword-only: def {name}(p, *, tp, …)", name)
        if parameter.name not in allowed:
            raise SpecError(f"{parameter.name!r} is not an axis; axes: {', '.join(allowed)}", name)
        axes.append(parameter.name)
    return ordered(axes)


def _doc(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "")


def rule(
    message: str,
    *,
    name: str | None = None,
    role: Literal["grid", "canonical", "legal"] = "legal",
    frameworks: Iterable[str] | None = None,
    needs: str = "",
    source: str = "",
) -> Callable[[Callable[..., Any]], Rule]:
    """Make a rule of a function ``f(p, *, axis, …) -> bool``; ``message`` may use ``{p…}`` and ``{axis}``."""

    def make(function: Callable[..., Any]) -> Rule:
        only = frozenset(frameworks) if frameworks is not None else None
        axes = _read_axes(function, AXES)
        return Rule(name or function.__name__, axes, function, _doc(function), source, message, role, only, needs)

    return make


def warning(message: str, *, source: str = "") -> Callable[[Callable[..., Any]], Warning_]:
    """Make a warning of a function ``f(p, *, axis, …) -> bool`` that is true where the warning applies."""

    def make(function: Callable[..., Any]) -> Warning_:
        return Warning_(function.__name__, _read_axes(function, AXES), function, _doc(function), source, message)

    return make


def term(
    *, unit: str = "s", label: str = "", source: str = "", name: str | None = None
) -> Callable[[Callable[..., Any]], Term]:
    """Make a cost term of a function ``f(p, *, axis, …) -> float`` in ``unit`` (s, B, or 1 for a weight)."""

    def make(function: Callable[..., Any]) -> Term:
        axes = _read_axes(function, AXES)
        return Term(name or function.__name__, axes, function, _doc(function), source, unit, label)

    return make


def count(function: Callable[..., Any]) -> Count:
    """Make a multiplier of a function ``f(p, *, split, stage, grad_acc) -> int`` (any subset of these)."""
    axes = _read_axes(function, ("split", "grad_acc", STAGE))
    return Count(function.__name__, axes, function, _doc(function), "")


def limit(
    name: str,
    terms: Iterable[Term],
    budget: float | Callable[[Instance], float],
    *,
    message: str = "",
    unit: str = "B",
) -> Limit:
    """A user's own limit: the sum of ``terms`` must not exceed ``budget``."""
    amount = budget if callable(budget) else lambda p: float(budget)
    text = message or f"{name}: {{value:.2f}} exceeds {{budget:.2f}} {'GiB' if unit == 'B' else unit}"
    quantity = StageMax(name, tuple(Part(t) for t in terms))
    return Limit(name, lambda p: quantity, amount, text, unit)
