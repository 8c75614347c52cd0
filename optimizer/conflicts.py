"""Why nothing is legal: a minimal set of rules and limits that exclude each other, and changes that help, computed.

Feasibility of a subset of rules is decided exactly by the same tables, filter and join as the ranking (CP-SAT where a
join would be cut off). The conflict is found by QuickXplain (Junker 2004): drop any one member and a plan exists.
Grids and canonical spellings are background. Every relaxation is solved before it is printed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from parsolve.config import Config
from parsolve.errors import SpecError
from parsolve.evaluation import Violation, active_limits, active_rules, instance_of, objective_value
from parsolve.functions import Array, Limit, Rule
from parsolve.optimizer import domains as domain_module
from parsolve.optimizer.any_cut import first_legal_cut
from parsolve.optimizer.bounds import Filter
from parsolve.optimizer.join import join
from parsolve.optimizer.ranking import Query, configs_of, rank, why_listed, within_limits
from parsolve.optimizer.spaces import Spaces
from parsolve.optimizer.tables import Table
from parsolve.problem import Instance, Problem, replace_workload
from parsolve.result import Infeasible, Relaxation
from parsolve.specs import Cluster, Recompute
from parsolve.splits import Splits
from parsolve.units import format_bytes

SAMPLE_ROWS = (300, 20_000, 2_000_000)
"""Partial assignments that a feasibility question keeps in its first, second and last join."""
HUNDREDTH_GIB = 2**30 / 100
"""Missing memory is rounded up to this, as it is printed."""
MAX_BATCH_DISTANCE = 2
"""Other batches are looked for up to this many times the batch away."""
MAX_MORE_DOMAINS = 128
"""Larger clusters are tried up to this many domains more."""
TIME_BUDGET_S, EACH_S = 20.0, 5.0
"""Without a time limit an explanation takes no longer in all, and each relaxation; what was found is printed."""


class OutOfTime(Exception):
    """The time for explaining ran out."""


def first_legal(
    problem: Problem,
    deadline: float = math.inf,
    spaces: Spaces | None = None,
    seen: Callable[[Instance, Table], None] = lambda p, table: None,
) -> Config | None:
    """Any legal plan, or None with certainty that there is none.

    ``spaces``: shared tables of a problem that this one narrows. ``seen`` is shown the joined rows, legal or not.

    Raises
    ------
    OutOfTime: ``time.perf_counter()`` passed the deadline.
    """
    spaces = spaces or Spaces(problem, objective=False)
    for gbs in domain_module.reachable_batches(problem):
        if time.perf_counter() > deadline:
            raise OutOfTime
        space = spaces.once(problem, gbs) if spaces.problem is problem else spaces.at(problem, gbs)
        for p, rows in space.parts():
            found = _first_of(p, rows, deadline, seen)
            if found is not None:
                return found
    return _any_cut(problem, spaces, deadline) if domain_module.takes_any_cut(problem) else None


def _first_of(p: Instance, work: Filter, deadline: float, seen: Callable[[Instance, Table], None]) -> Config | None:
    """The same among some rows."""
    for rows in SAMPLE_ROWS:
        if time.perf_counter() > deadline:
            raise OutOfTime
        joined = join(work, math.inf, rows)
        legal = within_limits(p, joined.table)
        if joined.table.size:
            seen(p, joined.table)
        if legal.any():
            return configs_of(p, joined.table, [int(legal.argmax())])[0]
        if joined.complete:
            return None
    return _by_cp_sat(p, work)


def _any_cut(problem: Problem, spaces: Spaces, deadline: float) -> Config | None:
    """The same with all cuts of the layers, where those that can be listed have failed."""
    for gbs in domain_module.reachable_batches(problem):
        if time.perf_counter() > deadline:
            raise OutOfTime
        space = spaces.with_any_cut().at(problem, gbs)
        try:
            found = first_legal_cut(space.p, space.rows, deadline) if space.rows is not None else None
        except TimeoutError:
            raise OutOfTime from None
        if found is not None:
            return found
    return None


def _by_cp_sat(p: Instance, work: Filter) -> Config | None:
    """The same question to CP-SAT, for spaces too large to join."""
    from parsolve.optimizer.model import CpModel

    model = CpModel(work.tables, work.alive, math.inf)
    while True:
        outcome = model.solve(None)
        if outcome.values is None:
            return None
        table = Table(tuple(outcome.values), {axis: np.array([v]) for axis, v in outcome.values.items()})
        if within_limits(p, table)[0]:
            return configs_of(p, table, [0])[0]
        model.block(outcome.values)


def keep_only(problem: Problem, kept: Sequence[Rule | Limit]) -> Problem:
    """The problem with just these droppable rules and limits."""
    names = {f.name for f in kept}
    built_in = {r.name for r in active_rules(problem) if r.role == "legal"} | {x.name for x in active_limits(problem)}
    own_rules = tuple(r for r in problem.rules if r.name in names)
    own_limits = tuple(x for x in problem.limits if x.name in names)
    own = {r.name for r in problem.rules} | {x.name for x in problem.limits}
    return problem.with_(rules=own_rules, limits=own_limits, without=problem.without | (built_in - names - own))


def droppable(problem: Problem) -> list[Rule | Limit]:
    """Rules and limits that may be named in a conflict; the user's own come last, so that they are kept longest."""
    rules = [r for r in active_rules(problem) if r.role == "legal" or r in problem.rules]
    return [*active_limits(problem), *rules]


class Feasibility:
    """Which subsets of droppable rules and limits leave a plan: for a problem, and for it with more rules.

    The tables are built once, with the background rules only; a subset is a set of masks and budgets on them. Rows seen
    are remembered by the members that they satisfy, and so are refuted subsets: most questions need no search.
    """

    def __init__(self, problem: Problem, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.spaces = Spaces(keep_only(problem, []), objective=False, room=droppable(problem))
        self.satisfied: set[frozenset[Rule | Limit]] = set()
        self.refuted: list[frozenset[Rule | Limit]] = []
        batches = domain_module.reachable_batches(problem)
        grows = not problem.workload.splits_backward
        self.any_batch = _AnyBatch(problem, batches) if len(batches) > 1 and grows else None

    def conflict(self, problem: Problem) -> list[Rule | Limit]:
        """QuickXplain over the droppable rules and limits of an infeasible problem.

        Of the members alone, the others left out, a plan exists without any one. The problem is the one of this object,
        or it with more rules. Empty when the background alone excludes every plan.

        Raises
        ------
        OutOfTime: the deadline passed.
        """
        members = droppable(problem)
        hopeless: list[Rule | Limit] = [
            m for m in members if isinstance(m, Rule) and not m.axes and not _ever_holds(problem, m)
        ]
        if hopeless:  # whatever is chosen: nothing tells more
            return hopeless[:1]

        def explain(background: list[Rule | Limit], delta: bool, some: list[Rule | Limit]) -> list[Rule | Limit]:
            if delta and not self._holds(problem, members, background):
                return []
            if len(some) == 1:
                return some
            half = len(some) // 2
            first, second = some[:half], some[half:]
            from_second = explain([*background, *first], bool(first), second)
            from_first = explain([*background, *from_second], bool(from_second), first)
            return [*from_first, *from_second]

        return explain([], False, members) if self._holds(problem, members, []) else []

    def without(self, problem: Problem, one: Rule | Limit) -> bool:
        """Whether some plan obeys all but one of the droppable rules and limits.

        Raises
        ------
        OutOfTime: the deadline passed.
        """
        members = droppable(problem)
        return self._holds(problem, members, [m for m in members if m is not one])

    def _holds(self, problem: Problem, members: Sequence[Rule | Limit], kept: Sequence[Rule | Limit]) -> bool:
        """Whether some plan obeys the background and all of ``kept``."""
        asked = frozenset(kept)
        if any(asked <= known for known in self.satisfied):
            return True
        if any(known <= asked for known in self.refuted):
            return False
        if self.any_batch is None or not self.any_batch.refutes(problem, kept):

            def remember(p: Instance, table: Table) -> None:
                part = table.keep(np.arange(0, table.size, -(-table.size // SAMPLE_ROWS[0])))
                self.satisfied |= _patterns(p, part, members)

            if first_legal(keep_only(problem, kept), self.deadline, self.spaces, remember) is not None:
                self.satisfied.add(asked)
                return True
        self.refuted.append(asked)
        return False


def _ever_holds(problem: Problem, rule: Rule) -> bool:
    """Whether a rule without axes holds at some batch size."""
    batches = domain_module.reachable_batches(problem)
    return any(bool(np.all(rule(problem.instance(gbs, Splits((), ())), {}))) for gbs in batches)


def _patterns(p: Instance, table: Table, members: Sequence[Rule | Limit]) -> set[frozenset[Rule | Limit]]:
    """The sets of members that some row satisfies."""
    holds = np.empty((table.size, len(members)), dtype=bool)
    for i, member in enumerate(members):
        answer = member(p, table.values) if isinstance(member, Rule) else member.holds(p, table.values)
        holds[:, i] = np.asarray(answer, dtype=bool)
    patterns = np.unique(holds, axis=0)
    return {frozenset(m for m, held in zip(members, pattern, strict=True) if held) for pattern in patterns}


class _AnyBatch:
    """A relaxation of all batch sizes at once: one microbatch of any size on offer, no rule that counts microbatches.

    Memory only grows with the number of microbatches, so what is impossible here is impossible at every batch size. Not
    so where the backward pass is split: of unequal chunks other ones may wait for their weight gradients.
    """

    def __init__(self, problem: Problem, batches: Sequence[int]) -> None:
        self.batches = batches
        sizes = {v for gbs in batches for v in domain_module.batch_domains(problem, gbs)["mbs"]}
        domains = {"mbs": tuple(sorted(sizes)), "grad_acc": (1,)}
        self.some_batch: dict[Rule, Rule] = {}
        room = [m for m in droppable(problem) if self._simple(m)]
        self.spaces = Spaces(keep_only(problem, []), objective=False, room=room, domains=domains)

    def _simple(self, member: Rule | Limit) -> bool:
        return "grad_acc" not in member.axes if isinstance(member, Rule) else member.name == "memory"

    def _stand_in(self, problem: Problem, rule: Rule) -> Rule:
        """A user's rule, which may look at the batch: whatever it allows at some batch size."""

        def compute(p: Instance, **values: Array) -> Array:
            instances = [problem.instance(gbs, p.splits) for gbs in self.batches]
            found: Array = np.any([np.asarray(rule(q, values)) for q in instances], axis=0)
            return found

        if rule not in self.some_batch:
            self.some_batch[rule] = replace(rule, compute=compute)
        return self.some_batch[rule]

    def refutes(self, problem: Problem, members: Iterable[Rule | Limit]) -> bool:
        """True when no batch size has a plan under these members; False when that is open."""
        kept = [m for m in members if self._simple(m)]
        own = [self._stand_in(problem, m) for m in kept if isinstance(m, Rule) and m in problem.rules]
        asked = keep_only(problem, [m for m in kept if m not in problem.rules]).with_(rules=own)
        for p, rows in self.spaces.at(asked, self.batches[0]).parts():
            joined = join(rows, math.inf, SAMPLE_ROWS[1])
            if not joined.complete or within_limits(p, joined.table).any():
                return False
        return True


@dataclass
class _Watch:
    deadline: float

    @staticmethod
    def within(time_limit: float | None) -> _Watch:
        """From now on as long as there is time, or the budget of an explanation where there is no limit."""
        budget = TIME_BUDGET_S if time_limit is None else max(1.0, time_limit)
        return _Watch(time.perf_counter() + budget)

    def left(self) -> float:
        return self.deadline - time.perf_counter()


def explain_infeasible(problem: Problem, time_limit: float | None = None) -> Infeasible:
    """The conflict in words and the relaxations that were solved, cheapest change first.

    What the time limit does not allow is left out and said.
    """
    watch = _Watch.within(time_limit)
    try:
        feasibility = Feasibility(problem, watch.deadline)
        members = feasibility.conflict(problem)
    except OutOfTime:
        return Infeasible((), "proven; the time limit ended the search for the reason, raise --time-limit", ())
    need = least_memory(problem, watch.left()) if any(m.name == "memory" for m in members) else None
    described = tuple(_describe(problem, member, need) for member in members)
    relaxations = tuple(_relaxations(problem, members, need, watch))
    if not members:
        text = f"no split of {problem.cluster.num_gpus} GPUs satisfies both grids within the stated domains"
    else:
        text = _exclusion(problem, members, feasibility)
    return Infeasible(described, text, relaxations)


def _exclusion(problem: Problem, members: Sequence[Rule | Limit], feasibility: Feasibility) -> str:
    """What a conflict excludes, and which of its members a plan needs to be rid of, as far as the time allows."""
    names = ", ".join(member.name for member in members)
    start = f"{names} alone excludes every plan" if len(members) == 1 else f"these exclude each other: {names}"
    try:
        enough = [member.name for member in members if feasibility.without(problem, member)]
    except OutOfTime:
        return f"{start}; whether others do as well was not settled in time"
    if len(members) == 1 and not enough:
        return f"{start}; to be rid of it is not enough, others exclude every plan as well"
    if len(enough) == len(members):
        return f"{start}; without {'it' if len(members) == 1 else 'any one of them'} a plan exists"
    if enough:
        return f"{start}; without {' or without '.join(enough)} a plan exists"
    return f"{start}; to be rid of one of them is not enough, others exclude every plan as well"


def only_cuts(problem: Problem, time_limit: float | None = None, with_memory: bool = False) -> Infeasible | None:
    """Said when the cuts that can be listed are the only obstacle: some other cut of the layers is legal.

    ``with_memory``: the objective has memory in it, with which all cuts are not searched.
    """
    watch = _Watch.within(time_limit)
    try:
        found = first_legal(problem, watch.deadline)
    except OutOfTime:
        return None
    if found is None:
        return None
    text = f"no listed cut of the layers is legal; {found.layers_text(problem.workload.schedule)} is: "
    if (why := why_listed(problem)) is not None:
        return Infeasible((), f"{text}check takes it, but all cuts cannot be searched: {why}", ())
    how = "--cuts any with the step time as the objective" if with_memory else "--cuts any"
    ranking = rank(problem, Query(1, cuts="any"), max(0.0, watch.left()))
    step = ranking.plans[0].step_time_s if ranking.complete and ranking.plans else None
    return Infeasible((), f"{text}take {how}", (Relaxation(f"any cut of the layers ({how})", "listed cuts", step),))


def least_memory(problem: Problem, time_limit: float | None = None) -> float | None:
    """Bytes per GPU that the leanest plan needs on its worst stage when only memory is in the way; None: not proven."""
    watch = _Watch.within(time_limit)
    unlimited = problem.with_(without=problem.without | {"memory"}, goal=((1.0, "memory"),))
    ranking = rank(unlimited, Query(1), time_limit)
    if not ranking.complete:
        return None
    need = ranking.plans[0].key if ranking.plans else None
    if not domain_module.takes_any_cut(problem):
        return need
    try:
        return _least_with_any_cut(problem, unlimited, need, watch.deadline)
    except OutOfTime:
        return None


def _least_with_any_cut(problem: Problem, unlimited: Problem, need: float | None, deadline: float) -> float | None:
    """The same over all cuts, to a hundredth of a GiB. ``need``: of the leanest cut that can be listed."""

    def leaner(within: Problem) -> float | None:
        """What some legal plan needs, bytes."""
        found = _any_cut(within, Spaces(within, objective=False), deadline)
        return None if found is None else objective_value(instance_of(unlimited, found), found)

    need = leaner(unlimited) if need is None else need
    if need is None:
        return None
    usable = problem.cluster.gpu.memory_bytes - problem.workload.memory_reserve
    enough, too_little = missing_hundredths(need, usable), 0
    tried = enough - 1  # as a rule no other cut is leaner
    while tried > too_little:
        found = leaner(with_usable_memory(problem, usable + tried * HUNDREDTH_GIB))
        if found is None:
            too_little = tried
        else:
            need, enough = found, missing_hundredths(found, usable)
        tried = (enough + too_little) // 2
    return need


def missing_hundredths(need: float, usable: float) -> int:
    """Hundredths of a GiB that are missing, rounded up."""
    return math.ceil((need * (1 + 1e-9) - usable) / HUNDREDTH_GIB)


def _describe(problem: Problem, member: Rule | Limit, need: float | None) -> Violation:
    if member.name == "memory":
        usable = problem.cluster.gpu.memory_bytes - problem.workload.memory_reserve
        least = (
            f"the leanest layout needs {format_bytes(need)} on its worst stage"
            if need
            else "what the leanest layout needs is not settled"
        )
        gpu = problem.cluster.gpu.name
        return Violation("memory", f"{gpu} has {format_bytes(usable)} usable per GPU; {least}", {})
    first_line = (member.doc or member.name).split("\n")[0]
    facts = {
        "global_batch": f" (GBS {problem.gbs_target[0]}, {problem.cluster.num_gpus} GPUs)",
        "attention_heads": f" ({problem.model.num_heads} heads)",
        "kv_heads": f" ({problem.model.num_kv_heads} key/value heads)",
        "experts_divide": f" ({problem.model.moe.num_experts if problem.model.moe else 0} experts)",
        "tp_in_domain": f" ({problem.cluster.gpus_per_domain} GPUs)",
        "layers_divide": f" ({problem.model.num_layers} layers)",
    }
    return Violation(member.name, first_line + facts.get(member.name, ""), {})


def _step_time(problem: Problem, watch: _Watch) -> float | None:
    """Best step time, s; None when nothing is legal.

    Raises
    ------
    OutOfTime: the time ran out before that was proven.
    """
    ranking = rank(problem, Query(top=1), max(0.0, watch.left()))
    if not ranking.complete:
        raise OutOfTime
    return ranking.plans[0].step_time_s if ranking.plans else None


def _relaxations(
    problem: Problem, members: Sequence[Rule | Limit], need: float | None, watch: _Watch
) -> Iterator[Relaxation]:
    """Changes that make the problem feasible, each solved."""
    names = {member.name for member in members}
    makers: list[Callable[[_Watch], Relaxation | None]] = []
    for member in members:
        if member in problem.rules or member in problem.limits:
            makers.append(partial(_without, problem, member))
    if "memory" in names:
        if set(Recompute) - set(problem.workload.recompute):
            makers.append(partial(_recompute, problem))
        makers += [partial(_more_memory, problem, need), partial(_shorter, problem)]
    if "global_batch" in names:
        makers.append(partial(_other_batch, problem))
    if names & {"memory", "global_batch"} or not members:
        makers.append(partial(_more_domains, problem))
    if "memory" not in names or not members:
        makers.append(partial(_fewer_gpus, problem))
    for make in makers:
        if watch.left() <= 0:
            return
        try:
            found = make(_Watch(min(watch.deadline, time.perf_counter() + EACH_S)))
        except OutOfTime:
            continue
        if found is not None:
            yield found


def _without(problem: Problem, member: Rule | Limit, watch: _Watch) -> Relaxation | None:
    rules = tuple(r for r in problem.rules if r is not member)
    limits = tuple(x for x in problem.limits if x is not member)
    step = _step_time(problem.with_(rules=rules, limits=limits), watch)
    return None if step is None else Relaxation(f"drop {member.name}", member.name, step)


def _recompute(problem: Problem, watch: _Watch) -> Relaxation | None:
    step = _step_time(replace_workload(problem, recompute=tuple(Recompute)), watch)
    return None if step is None else Relaxation("allow recomputation of whole layers", "memory", step)


def with_usable_memory(problem: Problem, usable: float) -> Problem:
    """The problem on GPUs that leave this many bytes after the reserve."""
    total = math.ceil(usable + problem.workload.memory_reserve)
    data = problem.cluster.model_dump()
    gpu = {**data["gpu"], "memory_bytes": total}
    return problem.with_(cluster=Cluster.read({**data, "gpu": gpu}, "cluster"))


def _more_memory(problem: Problem, need: float | None, watch: _Watch) -> Relaxation | None:
    """The memory that is missing, rounded up to the digits that are printed."""
    if need is None:
        return None
    usable = problem.cluster.gpu.memory_bytes - problem.workload.memory_reserve
    missing = missing_hundredths(need, usable) * HUNDREDTH_GIB
    step = _step_time(with_usable_memory(problem, usable + missing), watch)
    if step is None:
        return None
    return Relaxation(f"{missing / 2**30:.2f} GiB more memory per GPU", "memory", step)


def _shorter(problem: Problem, watch: _Watch) -> Relaxation | None:
    """Half the sequence length, or half of that, and so on."""
    length = problem.workload.seq_len
    for divisor in (2, 4, 8):
        if length % divisor or length // divisor < 512:
            return None
        step = _step_time(replace_workload(problem, seq_len=length // divisor), watch)
        if step is not None:
            return Relaxation(f"sequence length {length // divisor} instead of {length}", "memory", step)
    return None


class _Blind:
    """An instance that shows nothing."""

    def __getattr__(self, name: str) -> object:
        raise LookupError(name)


def _ignores_the_batch(problem: Problem, member: Rule | Limit) -> bool:
    """Whether a rule is the same at every batch: it counts no sequences, and a user's does not see the instance."""
    if not isinstance(member, Rule) or not member.axes or {"mbs", "grad_acc"} & set(member.axes):
        return False
    if member not in problem.rules:
        return True
    try:
        member.compute(_Blind(), **{axis: np.ones(1, dtype=np.int64) for axis in member.axes})
    except Exception:
        return False
    return True


def _data_parallel_sizes(problem: Problem) -> list[int]:
    """Values of dp that some plan may have at some batch size: the rules that ignore the batch allow them."""
    kept = [member for member in droppable(problem) if _ignores_the_batch(problem, member)]
    rows = Spaces(problem, objective=False).once(keep_only(problem, kept), 1).rows
    return [] if rows is None else [int(dp) for dp in rows.axis_values("dp")]


def _other_batch(problem: Problem, watch: _Watch) -> Relaxation | None:
    """The nearest exact batch with a plan: the multiples of every possible dp, by their distance."""
    gbs = problem.workload.gbs
    if problem.per_token or gbs is None:
        return None
    sizes = _data_parallel_sizes(problem)
    for distance in range(1, MAX_BATCH_DISTANCE * gbs):
        for candidate in (gbs + distance, gbs - distance):
            if candidate < 1 or not any(candidate % dp == 0 for dp in sizes):
                continue
            changed = replace_workload(problem, gbs=candidate)
            if first_legal(changed, watch.deadline) is not None:
                step = _step_time(changed, watch)
                return Relaxation(f"a global batch of {candidate} instead of {gbs} sequences", "global_batch", step)
    return None


def resized(problem: Problem, **sizes: int) -> Problem | None:
    """The problem on another number of ``domains`` or ``gpus_per_domain``; None where the cluster allows no such."""
    try:
        return problem.with_(cluster=Cluster.read({**problem.cluster.model_dump(), **sizes}, "cluster"))
    except SpecError:
        return None


def _more_domains(problem: Problem, watch: _Watch) -> Relaxation | None:
    """The fewest more fast domains with a plan, each number tried in turn."""
    now = problem.cluster.domains
    for domains in range(now + 1, now + MAX_MORE_DOMAINS + 1):
        changed = resized(problem, domains=domains)
        if changed is not None and first_legal(changed, watch.deadline) is not None:
            step, gpus = _step_time(changed, watch), changed.cluster.num_gpus
            return Relaxation(f"{domains - now} more domain(s): {domains} with {gpus} GPUs in all", "world_size", step)
    return None


def _fewer_gpus(problem: Problem, watch: _Watch) -> Relaxation | None:
    """The most domains that have a plan; where none has, the most GPUs in each domain."""
    cluster = problem.cluster
    for domains in range(cluster.domains - 1, 0, -1):
        changed = resized(problem, domains=domains)
        if changed is not None and first_legal(changed, watch.deadline) is not None:
            gpus = changed.cluster.num_gpus
            change = f"use {domains} of the {cluster.domains} domains ({gpus} GPUs)"
            return Relaxation(change, "world_size", _step_time(changed, watch))
    for gpus in range(cluster.gpus_per_domain - 1, 0, -1):
        changed = resized(problem, gpus_per_domain=gpus)
        if changed is not None and first_legal(changed, watch.deadline) is not None:
            change = f"use {gpus} of the {cluster.gpus_per_domain} GPUs in each domain"
            return Relaxation(change, "world_size", _step_time(changed, watch))
    return None
