"""Necessary conditions for cuts, rank by rank: how many layers a rank can hold, and in which chunks.

Computed for all configurations of one pipeline size, or of one shape, at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from parsolve.functions import Array
from parsolve.objectives.schedule import Shape, shape_of
from parsolve.objectives.schedule_paths import plain_paths
from parsolve.objectives.step_time import Items
from parsolve.optimizer.cut_forms import SLACK, Form, Forms, cheapest, fixed, kinds, moments, without_layers
from parsolve.problem import Instance
from parsolve.splits import RankCuts, bounds, rank_cuts, saturated


@dataclass(frozen=True)
class Caps:
    """The most layers that each rank can hold within a value to beat and the limits, and the least that is then left.

    Arrays (row, rank); ``possible``: (row,) false where the ranks together cannot hold the model.
    """

    most: Array
    least: Array
    possible: Array


class _Ranks(NamedTuple):
    """What each rank of a schedule can hold, arrays (rank,).

    ``least``, ``most``: layers; ``first``: least layers of its first chunk. ``dense``, ``moe``: see ``reachable``.
    ``at_once``: microbatches of which it may hold any one chunk at once. ``held``: (rank, number) what a rank with 0 to
    all layers, or more, has in flight at least at its worst moment; inf: it cannot.
    """

    least: Array
    most: Array
    first: Array
    dense: Array
    moe: Array
    at_once: Array
    held: Array


@lru_cache(maxsize=1024)
def _ranks(layer_is_moe: tuple[bool, ...], shape: Shape, apart: bool) -> _Ranks:
    layers, (pp, vpp) = len(layer_is_moe), shape[:2]
    low, high = bounds(layers, pp, vpp, apart)
    dense, moe = (reachable(layer_is_moe, kind, pp, vpp) for kind in ("dense", "moe"))
    ranks = range(pp)
    at_once = np.array([_most_at_once(shape, rank) for rank in ranks])
    held = np.stack([_least_held(layers, shape, rank, apart) for rank in ranks])
    return _Ranks(low.sum(axis=1), np.minimum(high.sum(axis=1), layers), low[:, 0], dense, moe, at_once, held)


def caps(p: Instance, all_forms: Forms, values: Mapping[str, Array], to_beat: Array) -> Caps:
    """Necessary conditions, rank by rank, for rows of one pipeline size that are to cost at most ``to_beat``.

    A rank's layers count as of the cheaper kind as far as there can be such. A rank waits for the first chunks before
    it, and holds in flight what its leanest cut would.
    """
    pp, vpp, layers = int(values["pp"][0]), values["vpp"], p.model.num_layers
    depths = np.minimum(values["grad_acc"], saturated(pp, vpp))
    orders = np.stack((vpp, depths, p.splits.mtp_apart[values["split"]]))
    orders, which = np.unique(orders, axis=1, return_inverse=True)
    of_orders = [_ranks(p.model.layer_is_moe, Shape(pp, v, m), bool(apart)) for v, m, apart in orders.T.tolist()]
    *of_ranks, held = (np.stack(each) for each in zip(*of_orders, strict=True))
    least, most, first, dense, moe, at_once = (each[which.ravel()] for each in of_ranks)
    there = {kind: n for kind, n in (("dense", dense), ("moe", moe)) if kind in kinds(p)}
    rest, pipeline = others(p, all_forms, len(to_beat), pp, 0, int(most.max())), all_forms.pipeline
    room = to_beat[:, None] * (1 + SLACK) - rest[:, None] + np.zeros(pp)
    if pipeline is not None:
        weight, units = pipeline.weight, pipeline.units
        ends = fixed(units, pp, values["grad_acc"])

        def in_time(most: Array) -> Array:
            """What each rank can compute within the value to beat."""
            nonlocal room
            ahead = _ahead(p, units, _left_over(most, least, layers), first, vpp)
            room = to_beat[:, None] * (1 + SLACK) - rest[:, None] - weight * (ends + ahead)
            found = most_mix(_of_kinds(p, units), there, room / weight)
            return np.asarray(np.clip(found, -1, most).astype(np.int64))

        most = in_time(in_time(most))
    at_once_there = {kind: at_once * n for kind, n in there.items()}
    for form in all_forms.limits:
        outside = fixed(form.units, pp, values["grad_acc"])
        each, each_in_flight = (_of_kinds(p, form.units, suffix) for suffix in ("", "_in_flight"))

        def need(numbers: Array, outside: Array = outside, each: Any = each, flying: Any = each_in_flight) -> Array:
            """What ranks with so many layers need at least."""
            of_numbers = held[which.reshape(-1, 1), np.arange(pp), numbers]
            return np.asarray(outside + least_mix(each, there, numbers) + least_mix(flying, at_once_there, of_numbers))

        most = _most(need, form.budget * (1 + SLACK), least, most)
    if pipeline is not None:
        most = in_time(most)
    possible = np.all(most >= least, axis=1) & (most.sum(axis=1) >= layers)
    if pipeline is not None:
        everything = weight * sum(units[kind] * n for kind, n in kinds(p).items())
        possible &= ~(np.maximum(room, 0.0).sum(axis=1) < everything)
    return Caps(most, _left_over(most, least, layers), possible)


def mtp_apart(p: Instance, values: Mapping[str, Array]) -> bool:
    """Whether the prediction modules of some rows of one pipeline shape are on the stage before the last: of all."""
    return bool(p.splits.mtp_apart[values["split"][0]])


def _most(need: Callable[[Array], Array], budget: float, least: Array, most: Array) -> Array:
    """(row, rank) the highest number from ``least`` to ``most`` for which no more than the budget is needed.

    Below ``least`` where there is none. ``need``: (row, rank) for such numbers, never falling with them.
    """
    known, beyond = least - 1, most + 1
    while np.any(undecided := beyond - known > 1):
        between = (known + beyond) // 2
        fit = need(np.maximum(between, least)) <= budget
        known, beyond = np.where(undecided & fit, between, known), np.where(undecided & ~fit, between, beyond)
    return np.asarray(known)


def _left_over(most: Array, least: Array, layers: int) -> Array:
    """(row, rank) the least layers of a rank when all others hold their most."""
    return np.asarray(np.maximum(least, layers - (most.sum(axis=1)[:, None] - most)))


def _ahead(p: Instance, units: Mapping[str, Array], least: Array, first: Array, vpp: Array) -> Array:
    """(row, rank) at least the time that passes before a rank's first and after its last pass."""
    pp = least.shape[1]
    short = (vpp > 1)[:, None] & (np.arange(pp) == 0)  # the first chunk may hold fewer than the others of its rank
    chunk = np.where(short, first, np.maximum(least // vpp[:, None], first)).astype(float)
    before = np.cumsum(chunk, axis=1) - chunk
    return np.asarray(waits(units, pp) + cheapest(p, units, "_ahead")[:, None] * before)


def waits(units: Mapping[str, Array], pp: int) -> Array:
    """(row, rank) what passes before a rank's first and after its last pass beside layers: embedding and transfers."""
    ranks = np.arange(pp)
    return np.asarray(units["embedding_ahead"][:, None] * (ranks > 0) + units["hops_ahead"][:, None] * ranks)


@lru_cache(maxsize=4096)
def in_flight(layers: int, shape: Shape, rank: int, apart: bool) -> Array:
    """(cut,) layers times microbatches that a rank holds at its worst moment with each of its ``rank_cuts``."""
    sizes = rank_cuts(layers, shape.pp, shape.vpp, rank, apart).sizes
    return np.asarray((moments(shape, rank).astype(float) @ sizes.T.astype(float)).max(axis=0))


def _least_held(layers: int, shape: Shape, rank: int, apart: bool) -> Array:
    """One rank's part of ``_Ranks.held``."""
    least = np.full(layers + 1, math.inf)
    total = rank_cuts(layers, shape.pp, shape.vpp, rank, apart).total
    np.minimum.at(least, total, in_flight(layers, shape, rank, apart))
    return np.asarray(np.minimum.accumulate(least[::-1])[::-1])


@dataclass(frozen=True)
class ShapeRows:
    """Configurations of one pipeline shape without their cuts: forms, times, axes, and what each may take.

    ``most``, ``least``: (row, rank) layers. ``beat``: (row,) what a cut of each must cost less than to matter.
    """

    forms: Forms
    times: Items
    values: Mapping[str, Array]
    most: Array
    least: Array
    beat: Array

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return int(self.most.shape[1])

    @property
    def vpp(self) -> int:
        """Chunks of a rank."""
        return int(self.values["vpp"][0])

    def rows(self, some: slice) -> ShapeRows:
        """Some of them."""
        values = {axis: column[some] for axis, column in self.values.items()}
        caps_of = (self.most[some], self.least[some], self.beat[some])
        return ShapeRows(self.forms.rows(some), self.times.rows(some), values, *caps_of)


@dataclass(frozen=True)
class Domains:
    """For each rank the chunk sizes that some row of one pipeline shape may take there, and which row which.

    ``allowed[rank]``: (row, option) false where a limit breaks whatever the other ranks hold.
    """

    options: tuple[RankCuts, ...]
    allowed: tuple[Array, ...]

    def alone(self, i: int) -> Domains:
        """What one row may take."""
        options = tuple(cuts.only(allowed[i]) for cuts, allowed in zip(self.options, self.allowed, strict=True))
        return Domains(options, tuple(np.ones((1, len(cuts.total)), dtype=bool) for cuts in options))

    def in_time(self, p: Instance, of: ShapeRows, room: Array) -> Domains:
        """Those with which the rows' schedules may end in time. ``room``: (row,) s."""
        allowed = [
            fits & (_least_time(p, of, rank, cuts.sizes) <= room[:, None] * (1 + SLACK))
            for rank, (cuts, fits) in enumerate(zip(self.options, self.allowed, strict=True))
        ]
        return _filled(self.options, allowed, p.model.num_layers)


def domains(p: Instance, of: ShapeRows) -> Domains:
    """The chunk sizes of each rank within its caps and the limits.

    What a rank needs is exact where all layers that it can hold are of one kind, else no more than it will need.
    """
    pp, vpp, layers, grad_acc = of.pp, of.vpp, p.model.num_layers, of.values["grad_acc"]
    depths, which = np.unique(np.minimum(grad_acc, saturated(pp, vpp)), return_inverse=True)
    apart = mtp_apart(p, of.values)
    fixed_of = [fixed(form.units, pp, grad_acc) for form in of.forms.limits]
    windows, allowed = [], []
    for rank in range(pp):
        every = rank_cuts(layers, pp, vpp, rank, apart)
        most, least = of.most[:, rank, None], of.least[:, rank, None]
        window = every.window(int(least.min()), int(most.max()))
        cuts = every.only(window)
        fits = (cuts.total >= least) & (cuts.total <= most)
        flying = np.stack([in_flight(layers, Shape(pp, vpp, m), rank, apart)[window] for m in depths.tolist()])[which]
        there = _kinds_on(p, pp, vpp, rank)
        at_once = np.array([[_most_at_once(Shape(pp, vpp, m), rank)] for m in depths.tolist()])[which]
        in_flight_there = {kind: n * at_once for kind, n in there.items()}
        for form, outside in zip(of.forms.limits, fixed_of, strict=True):
            each, held, holds = (
                {kind: form.units[prefix + kind + suffix][:, None] for kind in there}
                for prefix, suffix in (("", ""), ("", "_in_flight"), ("holds_", ""))
            )
            need = outside[:, rank, None] + least_mix(each, there, cuts.total)
            need = need + least_mix(held, in_flight_there, flying) + least_mix(holds, there, cuts.total > 0)
            fits &= need <= form.budget * (1 + SLACK)
        windows.append(cuts)
        allowed.append(fits)
    return _filled(windows, allowed, layers)


def _filled(options: Sequence[RankCuts], allowed: list[Array], layers: int) -> Domains:
    """What some row may take, without what leaves more or fewer layers than the other ranks can hold."""
    totals = [cuts.total for cuts in options]
    most = np.stack([np.where(a, t, 0).max(axis=1, initial=0) for t, a in zip(totals, allowed, strict=True)], axis=1)
    least = np.stack(
        [np.where(a, t, layers).min(axis=1, initial=layers) for t, a in zip(totals, allowed, strict=True)], axis=1
    )
    for rank, (total, fits) in enumerate(zip(totals, allowed, strict=True)):
        others_most, others_least = (of.sum(axis=1) - of[:, rank] for of in (most, least))
        fits &= (total + others_most[:, None] >= layers) & (total + others_least[:, None] <= layers)
    some = [fits.any(axis=0) for fits in allowed]
    return Domains(
        tuple(cuts.only(np.asarray(any_row)) for cuts, any_row in zip(options, some, strict=True)),
        tuple(fits[:, any_row] for fits, any_row in zip(allowed, some, strict=True)),
    )


def _least_time(p: Instance, of: ShapeRows, rank: int, sizes: Array) -> Array:
    """(row, option) no more than the schedule takes when a rank has chunks of ``sizes`` (option, chunk), s.

    The longest of the plain paths through the rank. Passes that all other stages have on a path come to those of all
    layers; of passes that some have, each rank's least layers count.
    """
    pp, vpp, layers, grad_acc = of.pp, of.vpp, p.model.num_layers, of.values["grad_acc"]
    there, least = _kinds_on(p, pp, vpp, rank), of.least.min(axis=0)
    apart = mtp_apart(p, of.values)
    chunks = np.maximum(bounds(layers, pp, vpp, apart)[0], least[:, None] // vpp)
    if vpp > 1:
        chunks[0, 0] = chunks[-1, -1] = 0  # may hold fewer than the others of their rank
        chunks[-2, -1] *= not apart
    surely = chunks.T.ravel()
    found = np.zeros((len(grad_acc), len(sizes)))
    mine = np.arange(pp * vpp) % pp == rank
    for m in np.unique(grad_acc).tolist():
        here = np.flatnonzero(grad_acc == m)
        paths = plain_paths(shape_of(pp, vpp, m))[rank]
        of_rows = of.times.rows((here, None))
        length = without_layers(paths, of_rows)[:, None, :]
        for way, passes in enumerate((paths.forward, paths.backward)):
            shared = passes[:, ~mine].min(axis=1)
            more = passes[:, mine] - shared[:, None]
            own, most = sizes @ more.T, more.max(axis=1)
            extra = (passes[:, ~mine] - shared[:, None]) @ surely[~mine]
            each = {kind: getattr(of_rows, kind)[way] for kind in kinds(p)}
            everything = sum(n * each[kind] for kind, n in kinds(p).items())
            length = length + (shared * everything + extra * np.min(list(each.values()), axis=0))[:, None, :]
            mine_each = {kind: each[kind][:, None] for kind in there}
            length = length + least_mix(mine_each, {kind: n * most for kind, n in there.items()}, own)
        found[here] = length.max(axis=2)
    return found


def _kinds_on(p: Instance, pp: int, vpp: int, rank: int) -> dict[str, int]:
    """The kinds of layers that a rank can hold, and how many of each at most."""
    there = {kind: int(reachable(p.model.layer_is_moe, kind, pp, vpp)[rank]) for kind in kinds(p)}
    return {kind: n for kind, n in there.items() if n}


def least_mix(each: Mapping[str, Array], there: Mapping[str, Any], numbers: Array) -> Any:
    """What ``numbers`` of things cost at least, of kinds that cost ``each``, of which there are no more than ``there``.

    One or two kinds; of two the dearer one makes up what the cheaper one lacks. Arrays broadcast.
    """
    if not each:
        return 0.0
    if len(each) == 1:
        return next(iter(each.values())) * numbers
    (one, two), (of_one, of_two) = each.values(), there.values()
    cheap = np.minimum(numbers, np.where(one <= two, of_one, of_two))
    return np.minimum(one, two) * cheap + np.maximum(one, two) * (numbers - cheap)


def most_mix(each: Mapping[str, Array], there: Mapping[str, Any], room: Array) -> Array:
    """How many things ``least_mix`` has for no more than ``room``: whole numbers, below zero where there is none."""
    costs, of_kinds = list(each.values()), list(there.values())
    with np.errstate(divide="ignore", invalid="ignore"):
        if len(costs) == 1:
            found = room / costs[0]
        else:
            one, two = costs
            cheap, dear, of_cheap = np.minimum(one, two), np.maximum(one, two), np.where(one <= two, *of_kinds)
            left = room - cheap * of_cheap
            found = np.where(left > 0, of_cheap + left / dear, room / cheap)
    found = np.where(room < 0, -1.0, np.where(np.isnan(found), np.inf, found))
    return np.asarray(np.floor(found * (1 + SLACK)))


@lru_cache(maxsize=4096)
def _most_at_once(shape: Shape, rank: int) -> int:
    """Microbatches of which a rank may hold any one chunk at once."""
    return int(moments(shape, rank).max())


@lru_cache(maxsize=256)
def reachable(layer_is_moe: tuple[bool, ...], kind: str, pp: int, vpp: int) -> Array:
    """(rank,) layers of a kind that do not certainly lie on earlier stages than the rank's first."""
    low = bounds(len(layer_is_moe), pp, vpp)[0][:, 0]
    of_kind = np.array(layer_is_moe) == (kind == "moe")
    after = np.append(np.cumsum(of_kind[::-1])[::-1], 0)
    return np.asarray(after[np.minimum(np.cumsum(low) - low, len(of_kind))])


def _of_kinds(p: Instance, units: Mapping[str, Any], suffix: str = "") -> dict[str, Array]:
    """What a layer of each kind costs, (…, 1)."""
    return {kind: np.asarray(units[kind + suffix])[..., None] for kind in kinds(p)}


def at_least(p: Instance, units: Mapping[str, Any], numbers: Array, pp: int, vpp: int) -> Array:
    """(…, rank) what ``numbers`` (…, rank) of layers cost when as many as there can be are of the cheaper kind.

    Of one kind they cost the same on every rank, whose axis then has one place if that of ``numbers`` has.
    """
    there = {kind: reachable(p.model.layer_is_moe, kind, pp, vpp) for kind in kinds(p)}
    return np.asarray(least_mix(_of_kinds(p, units), there, numbers))


def others(p: Instance, all_forms: Forms, size: int, pp: int, low: int, high: int) -> Array:
    """(row,) at least what all terms but the pipeline cost, for ``size`` rows.

    ``low``, ``high``: least and most layers of a rank.
    """
    return np.asarray(sum((_at_least_of(p, form, pp, low, high) for form in all_forms.others), np.zeros(size)))


def _at_least_of(p: Instance, form: Form, pp: int, low: int, high: int) -> Any:
    """At least what one term costs: its mean over the ranks, or its first or last rank's part."""
    units = form.units
    mean = units["nothing"] + (units["first"] + units["last"] + units["before_last"]) / pp
    mean = mean + sum(units[kind] * n / pp for kind, n in kinds(p).items())
    each = cheapest(p, units)
    layers = np.where(each < 0, each * high, each * low)
    ends = units["nothing"] + np.maximum(units["first"], units["last"]) + layers
    least = np.maximum(mean, ends)
    return form.weight * (np.maximum(least, 0.0) if form.at_least_zero else least)
