"""How a model's layers are cut into pipeline stages: the cuts a framework offers, and what each stage of a cut holds.

A cut is a tuple per pipeline rank of the layer counts of its virtual chunks; in model order chunk ``c`` of rank ``r``
is number ``c * pp + r``, or where a schedule places the stages in a V, ``c * pp + pp - 1 - r`` for odd ``c``.
Ranks with the same contents as their neighbours are represented by the first (most microbatches in flight, so most
memory) and the last of them (latest start, so longest time).

Where a launcher takes any cut there are astronomically many. A ``free`` cut then stands for all of them: what its slots
hold is never more than what some rank of any such cut holds. The exact cut is chosen afterwards (optimizer.any_cut).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from parsolve.functions import Array
from parsolve.specs.workload import FOLDED, SPLIT_BACKWARD

Layers = tuple[tuple[int, ...], ...]


class Split(NamedTuple):
    """``layers[rank][chunk]`` and the way a launcher spells it.

    ``kind``: ``even``; ``embedding``, ``loss``, ``embedding+loss`` (counted as a layer); ``first-last`` (own counts for
    the first and last rank); ``layout`` (any other); ``free``: stands for every cut of its shape, ``layers`` is
    meaningless. ``recomputed``: the first so many layers of every chunk are recomputed (recompute=block).
    ``mtp_apart``: prediction modules are on the stage before the output layer's, and no layers on the output layer's;
    else they are beside it. Only a layout can say so.
    """

    layers: Layers
    kind: str
    recomputed: int = 0
    mtp_apart: bool = False

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.layers)

    @property
    def vpp(self) -> int:
        """Chunks per rank."""
        return len(self.layers[0])

    @property
    def even(self) -> bool:
        """All chunks hold the same number of layers."""
        return self.kind == "even"

    @property
    def fullest(self) -> int:
        """Layers of the fullest chunk."""
        return max(map(max, self.layers))


def ranks_in_model_order(pp: int, vpp: int, schedule: str = "1f1b") -> Array:
    """(stage,) the rank that holds each stage."""
    ranks = np.tile(np.arange(pp), (vpp, 1))
    if schedule in FOLDED:
        ranks[1::2] = ranks[1::2, ::-1]
    return ranks.ravel()


def stages_in_model_order(of_chunks: Array, schedule: str = "1f1b") -> Array:
    """(stage,) what the chunks of each rank hold, given as (rank, chunk)."""
    if schedule not in FOLDED:
        return of_chunks.T.ravel()
    pp, vpp = of_chunks.shape
    return np.asarray(of_chunks[ranks_in_model_order(pp, vpp, schedule), np.repeat(np.arange(vpp), pp)])


def model_order(layers: Sequence[Sequence[int]], schedule: str = "1f1b") -> list[int]:
    """Layer counts of the chunks in the order in which a token passes them."""
    chunks = range(len(layers[0])) if layers else ()
    return [rank[chunk] for chunk in chunks for rank in (layers[::-1] if _turns(chunk, schedule) else layers)]


def from_model_order(counts: Sequence[int], pp: int, schedule: str = "1f1b") -> Layers:
    """The inverse of ``model_order``; ``len(counts)`` must be a multiple of ``pp``."""
    rows = [counts[start : start + pp] for start in range(0, len(counts), pp)]
    return tuple(zip(*(row[::-1] if _turns(chunk, schedule) else row for chunk, row in enumerate(rows)), strict=True))


def _turns(chunk: int, schedule: str) -> bool:
    return schedule in FOLDED and chunk % 2 == 1


def balanced(num_layers: int, pp: int, vpp: int, schedule: str = "1f1b") -> Layers:
    """Chunks that differ by at most one layer, the fuller ones first.

    With one chunk a rank this is the cut that DeepSpeed makes of Megatron-DeepSpeed's models, by
    ``partition_balanced`` over layers of weight 1 between ends of weight 0. Source: DeepSpeed runtime/utils.py,
    runtime/pipe/module.py (partition_method ``type:transformer``).
    """
    small, fuller = divmod(num_layers, pp * vpp)
    return from_model_order([small + (i < fuller) for i in range(pp * vpp)], pp, schedule)


def classify(layers: Layers, num_layers: int, schedule: str = "1f1b") -> str:
    """The simplest spelling of a cut; see ``Split.kind``."""
    counts = model_order(layers, schedule)
    pp, vpp = len(layers), len(layers[0])
    if len(set(counts)) == 1:
        return "even"
    for kind, first, last in (("embedding+loss", 1, 1), ("embedding", 1, 0), ("loss", 0, 1)):
        slots, rest = divmod(num_layers + first + last, pp * vpp)
        expected = [slots] * (pp * vpp)
        expected[0] -= first
        expected[-1] -= last
        if not rest and counts == expected:
            return kind
    uniform = all(len(set(rank)) == 1 for rank in layers)
    if uniform and (pp <= 2 or len({rank[0] for rank in layers[1:-1]}) == 1):
        return "first-last"
    return "layout"


def _first_last(num_layers: int, pp: int, vpp: int, extra: int) -> Iterator[Layers]:
    """Own layer counts for the first and last rank, in whole multiples of ``vpp``, no rank above the stated cap."""
    cap = (-(-num_layers // (pp * vpp)) + extra) * vpp
    if pp == 1:
        return
    for middle in range(vpp, cap + 1, vpp) if pp > 2 else (0,):
        ends = num_layers - (pp - 2) * middle
        for first in range(vpp, min(cap, ends - vpp) + 1, vpp):
            last = ends - first
            if last % vpp == 0 and vpp <= last <= cap:
                counts = [first, *[middle] * (pp - 2), last]
                yield tuple((n // vpp,) * vpp for n in counts)


SPREAD = 2
"""Stated domain of first/last layer counts: no rank holds over (ceil(layers / (pp*vpp)) + SPREAD) * vpp layers."""


def enumerate_splits(
    num_layers: int, shapes: Iterable[tuple[int, int]], uneven: bool, schedule: str = "1f1b"
) -> list[Split]:
    """The cuts on offer for each ``(pp, vpp)`` where they can be listed.

    ``uneven``: what Megatron-LM's first/last and account-for flags can say; otherwise one cut for each shape, even
    where the chunks divide the layers, else balanced.
    """
    found: dict[Layers, None] = {}
    for pp, vpp in shapes:
        if pp * vpp > num_layers:
            continue
        if num_layers % (pp * vpp) == 0 or not uneven:
            found.setdefault(balanced(num_layers, pp, vpp, schedule))
        if not uneven or pp == 1:
            continue
        for layers in accounted(num_layers, pp, vpp, schedule):
            found.setdefault(layers)
        for layers in _first_last(num_layers, pp, vpp, SPREAD):
            found.setdefault(layers)
    return [Split(layers, classify(layers, num_layers, schedule)) for layers in found]


def accounted(num_layers: int, pp: int, vpp: int, schedule: str = "1f1b") -> Iterator[Layers]:
    """Equal chunks when the embedding, the output layer, or both count as a layer."""
    for first, last in ((1, 1), (1, 0), (0, 1)):
        slots, rest = divmod(num_layers + first + last, pp * vpp)
        if rest == 0 and slots > 0:
            counts = [slots] * (pp * vpp)
            counts[0] -= first
            counts[-1] -= last
            yield from_model_order(counts, pp, schedule)


def bounds(num_layers: int, pp: int, vpp: int, mtp_apart: bool = False) -> tuple[Array, Array]:
    """Least and most layers of each chunk of a free cut, array (rank, chunk) each; see ``rank_cuts``."""
    share = num_layers / (pp * vpp)
    low = np.full((pp, vpp), max(1, math.floor(share / 2)), dtype=np.int64)
    high = np.full((pp, vpp), math.ceil(2 * share), dtype=np.int64)
    if pp > 1:
        low[0, 0] = low[-1, -1] = 0
    if mtp_apart:
        low[-2, -1] = high[-1, -1] = 0
    return low, high


class RankCuts(NamedTuple):
    """Chunk sizes that one rank may have, (cut, chunk), in the order of layers in all: ``total`` (cut,).

    ``fuller_first``, ``fuller_last``: (cut,) whether a cut goes together with those of other ranks of that kind.
    """

    sizes: Array
    total: Array
    fuller_first: Array
    fuller_last: Array

    def only(self, chosen: Array | slice) -> RankCuts:
        """Some of the cuts."""
        return RankCuts(*(column[chosen] for column in self))

    def window(self, least: int, most: int) -> slice:
        """Where those with so many layers in all stand."""
        return slice(*np.searchsorted(self.total, (least, most + 1)).tolist())


def rank_cuts(num_layers: int, pp: int, vpp: int, rank: int, mtp_apart: bool = False) -> RankCuts:
    """The stated domain of free cuts: chunk sizes that one rank may have.

    A chunk holds half to twice the even share. The chunks of a rank differ by at most one layer, and the fuller ones
    are its first or its last, on all ranks alike. The pipeline's first chunk (with the embedding) and its last (with
    the output layer) may hold fewer layers than the others of their rank, or none. With ``mtp_apart`` the last holds
    none, and that before it, with the prediction modules, may hold fewer or none.
    """
    of_last = ("none" if mtp_apart else "fewer") if pp > 1 and rank == pp - 1 else "alike"
    if mtp_apart and rank == pp - 2:
        of_last = "fewer"
    return _rank_cuts(num_layers, pp, vpp, pp > 1 and rank == 0, of_last)


@lru_cache(maxsize=512)
def _rank_cuts(num_layers: int, pp: int, vpp: int, first: bool, of_last: str) -> RankCuts:
    low, high = (int(b.max()) for b in bounds(num_layers, pp, vpp))
    totals = np.arange(min(num_layers, high * vpp) + 1)

    def level(totals: Array, chunks: int, fuller_first: bool) -> tuple[Array, Array]:
        """(total, chunk) sizes that differ by at most one, and which of them are in the domain."""
        small, fuller = np.divmod(totals, chunks)
        place = np.arange(chunks) if fuller_first else np.arange(chunks)[::-1]
        return small[:, None] + (place < fuller[:, None]), (small >= low) & (small + (fuller > 0) <= high)

    def one_kind(fuller_first: bool) -> Array:
        if of_last == "none" and vpp == 1:
            return np.zeros((1, 1), dtype=np.int64)
        sizes, inside = level(totals, vpp, fuller_first)
        found = [sizes[inside]] if of_last != "none" else []
        if (first or of_last != "alike") and vpp == 1:
            found.append(totals[totals <= high, None])
        elif first or of_last != "alike":
            fewer = np.arange(1 if of_last == "none" else high + 1)
            total, short = (grid.ravel() for grid in np.meshgrid(totals, fewer, indexing="ij"))
            others, inside = level(total - short, vpp - 1, fuller_first)
            inside &= short <= others.max(axis=1)
            parts = (short[inside, None], others[inside])
            found.append(np.hstack(parts if first else parts[::-1]))
        return np.concatenate(found)

    kinds = [one_kind(True), one_kind(False)]
    sizes = np.concatenate(kinds)
    # with its kind, the total and the end chunks make a cut; of equal chunks all kinds are one
    ends = np.stack((sizes.sum(axis=1), sizes[:, 0], sizes[:, -1]))
    keys, at, which = np.unique(
        np.ravel_multi_index(tuple(ends), (num_layers + 1,) * 3), return_index=True, return_inverse=True
    )
    kind = [np.zeros(len(keys), dtype=bool) for _ in kinds]
    kind[0][which[: len(kinds[0])]] = True
    kind[1][which[len(kinds[0]) :]] = True
    return RankCuts(sizes[at], sizes[at].sum(axis=1), *kind)


def free_shape(num_layers: int, pp: int, vpp: int, mtp_apart: bool = False) -> bool:
    """Whether some free cut of this shape may exist within the stated domain."""
    low, high = bounds(num_layers, pp, vpp, mtp_apart)
    return bool(low.sum() <= num_layers <= high.sum())


FREE = "free"


def free(pp: int, vpp: int, mtp_apart: bool = False) -> Split:
    """All free cuts of one shape."""
    return Split(((0,) * vpp,) * pp, FREE, mtp_apart=mtp_apart)


FEATURES = (
    "dense",
    "moe",
    "first",
    "last",
    "mtp",
    "dense_ahead",
    "moe_ahead",
    "embedding_ahead",
    "hops_ahead",
    "holds_dense",
    "holds_moe",
    "dense_hiding",
    "moe_hiding",
)
"""What a slot holds: layers of the rank; 1 on the first and last rank, and on that with the prediction modules; layers
in the first chunks of all earlier ranks, the embedding and the stage boundaries before it; 1 where the largest layer is
dense or MoE; layers again, for what counts against a cost: never fewer than some rank of a free cut has, where the
others are never more."""
IN_FLIGHT = ("dense_in_flight", "moe_in_flight", "embedding_in_flight", "mtp_in_flight")
"""Layers (the embedding, prediction modules) times the microbatches whose activations are held for them, at the rank's
worst moment for each of them."""
WAITING = ("dense_waiting", "moe_waiting", "head_waiting")
"""The same for microbatches between their input and their weight gradients, where a schedule splits them."""
RECOMPUTED = (
    "dense_recomputed",
    "moe_recomputed",
    "dense_recomputed_ahead",
    "moe_recomputed_ahead",
    "rebuilds_dense",
    "rebuilds_moe",
)
"""What a slot of a cut with recomputed layers holds of these: in all its chunks, in the first chunks of all earlier
ranks; and 1 where a layer of that kind is rebuilt while all the activations of the others are still held."""
KEPT_IN_FLIGHT = ("dense_kept_in_flight", "moe_kept_in_flight")
"""The same as IN_FLIGHT for layers that are not recomputed; 0 where the cut recomputes none."""


class Splits:
    """A list of cuts with what every representative stage holds, as arrays over (split, stage slot).

    ``features[name]``: see FEATURES and RECOMPUTED. ``rank``: the pipeline rank of the slot. ``weight``: share of all
    ranks that a slot stands for; only the mean slot of a relaxed cut has one. ``every_rank``: slot ``i`` is rank ``i``,
    so that a report can tell each; cuts of fewer ranks repeat their last. So it is under a ``schedule`` that splits the
    backward pass, where no rank need hold as much as a neighbour with the same layers; in a V each rank has a slot for
    either phase (``objectives.split_backward.moments``).
    """

    def __init__(
        self,
        layer_is_moe: Sequence[bool],
        cuts: Sequence[Split],
        every_rank: bool = False,
        schedule: str = "1f1b",
    ) -> None:
        self.layer_is_moe, self.cuts, self.schedule = tuple(layer_is_moe), tuple(cuts), schedule
        every_rank = every_rank or schedule in SPLIT_BACKWARD
        self._phases = 2 if schedule in FOLDED else 1
        self.index = {
            (cut.layers, cut.recomputed, cut.mtp_apart): i for i, cut in enumerate(self.cuts) if cut.kind != FREE
        }
        self.recomputed = np.array([cut.recomputed for cut in self.cuts], dtype=np.int64)
        self.with_recomputation = bool(self.recomputed.any())
        self.mtp_apart = np.array([cut.mtp_apart for cut in self.cuts], dtype=bool)
        self.empty_last = np.array([cut.kind == FREE or cut.layers[-1][-1] == 0 for cut in self.cuts], dtype=bool)
        number: dict[Split, int] = {}
        self._base = np.array(
            [number.setdefault(cut._replace(recomputed=0), len(number)) for cut in self.cuts], np.int64
        )
        bases = list(number)
        partly = set(self._base[self.recomputed > 0].tolist())
        stages = [_stages(cut, self.layer_is_moe, i in partly, schedule) for i, cut in enumerate(bases)]
        self._contents = [(dense, moe) for dense, moe, _ in stages]
        self.contents = [self._contents[base] for base in self._base.tolist()]
        """(rank, chunk) dense and MoE layers of each cut."""
        rows = [
            _relaxed_rows(cut, self.layer_is_moe)
            if cut.kind == FREE
            else _rows(dense, moe, list(range(cut.pp)) if every_rank else ranks, schedule, cut.mtp_apart)
            for cut, (dense, moe, ranks) in zip(bases, stages, strict=True)
        ]
        rows = [[row for row in slots for _ in range(self._phases)] for slots in rows]
        self.slots = max((len(r) for r in rows), default=1)
        self.pp = np.array([cut.pp for cut in bases], dtype=np.int64)[self._base]
        self.vpp = np.array([cut.vpp for cut in bases], dtype=np.int64)[self._base]
        self.even = np.array([cut.even for cut in bases], dtype=bool)[self._base]
        self.kinds = np.array([cut.kind for cut in bases])[self._base]
        self.fullest = np.array([cut.fullest for cut in bases], dtype=np.int64)[self._base]

        def column(name: str, beyond: bool = True) -> Array:
            """(split, slot); ``beyond``: the last slot is repeated, else followed by 0."""
            of_base = [[row.get(name, 0) for row in slots] for slots in rows]
            filled = [of + [of[-1] if beyond else 0] * (self.slots - len(of)) for of in of_base]
            return np.array(filled, dtype=float).reshape(-1, self.slots)[self._base]

        self.rank = column("rank").astype(np.int64)
        self.weight = column("weight", beyond=False) * (np.arange(self.slots) % self._phases == 0)
        self.features = {name: column(name) for name in FEATURES}
        self._chunks = {kind: self._chunk_layers(i) for i, kind in enumerate(("dense", "moe"))}
        uneven = [any(len(set(rank)) > 1 for layers in pair for rank in layers.tolist()) for pair in self._contents]
        self._free = np.array([cut.kind == FREE for cut in bases], dtype=bool)[self._base]
        self._own_moments = self._free | ((self.vpp > 1) & np.array(uneven, dtype=bool)[self._base])
        self._held: dict[tuple[str | int, ...], Array] = {}
        self._split = schedule in SPLIT_BACKWARD
        shapes, self._shape = np.unique(np.stack((self.pp, self.vpp)), axis=1, return_inverse=True)
        self._of_shape = [np.flatnonzero(self._shape == i) for i in range(shapes.shape[1])]
        self._partial = {base: _Partial.of(self, base, bases[base]) for base in sorted(partly)}
        if self.with_recomputation:
            self._add_recomputation()

    @cached_property
    def balanced(self) -> Array:
        """(split,) whether a cut is the ``balanced`` one of its shape."""
        layers, schedule = len(self.layer_is_moe), self.schedule
        return np.array([cut.layers == balanced(layers, cut.pp, cut.vpp, schedule) for cut in self.cuts], dtype=bool)

    def recomputed_contents(self, split: int) -> tuple[Array, Array] | None:
        """(rank, chunk) dense and MoE layers of a cut that are recomputed; None: none."""
        if not self.recomputed[split]:
            return None
        of, i = self._partial[int(self._base[split])], int(self.recomputed[split]) - 1
        return of.dense[i], of.moe[i]

    def _add_recomputation(self) -> None:
        """The features RECOMPUTED, and the layers of each chunk that are kept."""
        shape = self.rank.shape
        self.features |= {name: np.zeros(shape) for name in RECOMPUTED}
        kept = {kind: np.zeros((*shape, int(self.vpp.max()))) for kind in ("dense", "moe")}
        own = np.zeros(len(self.cuts), dtype=bool)
        for base, of in self._partial.items():
            here = np.flatnonzero((self._base == base) & (self.recomputed > 0))
            some, ranks = self.recomputed[here] - 1, self.rank[here[0]]
            for name in RECOMPUTED:
                self.features[name][here] = of.features[name][some][:, ranks]
            for kind, layers in (("dense", of.kept_dense), ("moe", of.kept_moe)):
                kept[kind][here, :, : layers.shape[2]] = layers[some][:, ranks]
                own[here] |= (layers[some].max(axis=2) != layers[some].min(axis=2)).any(axis=1)
        self._chunks |= {f"{kind}_kept": layers for kind, layers in kept.items()}
        self._own_kept_moments = own

    def _chunk_layers(self, kind: int) -> Array:
        """(split, slot, chunk) layers of one kind."""
        result = np.zeros((*self.rank.shape, int(self.vpp.max(initial=1))))
        _, first = np.unique(self._base, return_index=True)
        for i, pair in zip(first.tolist(), self._contents, strict=True):
            result[i, :, : pair[kind].shape[1]] = pair[kind][self.rank[i]]
        return result[first[self._base]] if len(first) else result

    def in_flight(self, name: str, split: Any, stage: Any, grad_acc: Any) -> Any:
        """One of IN_FLIGHT or KEPT_IN_FLIGHT for arrays of splits, slots and microbatch counts.

        At each rank's worst moment: with equal chunks on a rank any moment with the most chunks in flight will do; else
        all moments are looked at.
        """
        kept = name in KEPT_IN_FLIGHT
        if kept and not self.with_recomputation:
            return np.zeros(np.broadcast_shapes(np.shape(split), np.shape(stage), np.shape(grad_acc)))
        if name == "mtp_in_flight":
            return self.features["mtp"][split, stage] * self.mtp_microbatches(split, grad_acc)
        if self._split:
            return self._split_in_flight(name, split, stage, grad_acc)
        if name == "embedding_in_flight":
            result = np.minimum(grad_acc, self.pp[split]) * self.features["first"][split, stage]
        else:
            result = self._equal_chunks_in_flight(self._chunks[name.removesuffix("_in_flight")], split, stage, grad_acc)
        own = self._free if name == "embedding_in_flight" else (self._own_kept_moments if kept else self._own_moments)
        if not np.any(own[split]):
            return result
        cut, depth = np.broadcast_arrays(split, np.minimum(grad_acc, saturated(self.pp[split], self.vpp[split])))
        here, slot = own[cut], np.broadcast_to(stage, np.broadcast_shapes(np.shape(stage), cut.shape))
        alike = cut if kept else self._first_alike[cut]
        known, which = np.unique(np.stack((alike[here], depth[here])), axis=1, return_inverse=True)
        worst = np.stack([self._slots_in_flight(name, one, m) for one, m in known.T.tolist()])
        place = np.zeros(cut.shape, np.int64)
        place[here] = which.ravel()
        return np.where(here, worst[place, slot], result)

    def mtp_microbatches(self, split: Any, grad_acc: Any) -> Any:
        """Microbatches in flight on the stage with the prediction modules: one beside the output layer."""
        cut, m = np.broadcast_arrays(split, grad_acc)
        found = np.ones(cut.shape, dtype=np.int64)
        apart = self.mtp_apart[cut]
        if apart.any():
            here = cut[apart]
            depth = np.minimum(m[apart], saturated(self.pp[here], self.vpp[here]))
            known, which = np.unique(np.stack((self.pp[here], self.vpp[here], depth)), axis=1, return_inverse=True)
            found[apart] = np.array([held_before_last(*one) for one in known.T.tolist()])[which.ravel()]
        return found

    @cached_property
    def _first_alike(self) -> Array:
        """The first cut with the same layers, for each."""
        return np.unique(self._base, return_index=True)[1][self._base]

    def _equal_chunks_in_flight(self, layers: Array, split: Any, stage: Any, grad_acc: Any) -> Any:
        """1F1B: min(m, p-i) microbatches. Interleaved: min(m*v, 2*(p-1-i) + (v-1)*p + 1) chunks, in rounds of p."""
        pp, vpp, rank = self.pp[split], self.vpp[split], self.rank[split, stage]
        plain = np.minimum(grad_acc, pp - rank)
        interleaved = np.minimum(grad_acc * vpp, 2 * (pp - 1 - rank) + (vpp - 1) * pp + 1)
        chunks = np.where(vpp > 1, interleaved, plain)
        rounds, rest = chunks // (pp * vpp), chunks % (pp * vpp)
        full, part = rest // pp, rest % pp  # of the last round: chunks with all pp microbatches, and of the next
        behind = np.cumsum(layers, axis=2) - layers
        whole = layers.sum(axis=2)[split, stage]
        return rounds * pp * whole + pp * behind[split, stage, full] + part * layers[split, stage, full]

    def _slots_in_flight(self, name: str, split: int, microbatches: int) -> Array:
        """(slot,) of one cut."""
        kept = name in KEPT_IN_FLIGHT
        known = (name, int(self._base[split]), microbatches)
        if known not in self._held:
            compute = self._kept_in_flight if kept else self._compute_in_flight
            self._held[known] = compute(name, split, microbatches)
        found: Array = self._held[known]
        return found[self.recomputed[split] - 1] if kept else found

    def _compute_in_flight(self, name: str, split: int, microbatches: int) -> Array:
        from parsolve.objectives.schedule import Shape, held

        cut = self.cuts[split]
        if cut.kind == FREE:
            return _relaxed_in_flight(name, cut, self.layer_is_moe, microbatches, self.slots)
        layers = self.contents[split][0 if name == "dense_in_flight" else 1]
        shape = Shape(cut.pp, cut.vpp, microbatches)
        ranks = self.rank[split].tolist()
        worst = {r: float((held(shape, r) @ layers[r]).max()) if layers[r].any() else 0.0 for r in set(ranks)}
        return np.array([worst[r] for r in ranks])

    def _split_in_flight(self, name: str, split: Any, stage: Any, grad_acc: Any) -> Any:
        """One of IN_FLIGHT or WAITING under a schedule that splits the backward pass."""
        cut, m = np.broadcast_arrays(split, grad_acc)
        numbers, at = np.unique(m, return_inverse=True)
        at = at.reshape(cut.shape)
        asked = np.zeros((len(self._of_shape), len(numbers)), dtype=bool)
        asked[self._shape[cut], at] = True
        table = np.zeros((len(self.cuts), len(numbers), self.slots))
        for shape, number in np.argwhere(asked).tolist():
            table[self._of_shape[shape], number] = self._worst(name, shape, int(numbers[number]))
        return table[cut, at, stage]

    def _worst(self, name: str, shape: int, microbatches: int) -> Array:
        """(cut, slot) the most of each cut of a shape; without a pipeline nothing waits."""
        from parsolve.objectives import schedule

        cuts = self._of_shape[shape]
        pp, vpp = int(self.pp[cuts[0]]), int(self.vpp[cuts[0]])
        if pp == 1:
            plain = "first" if name == "embedding_in_flight" else name.removesuffix("_in_flight")
            return self.features[plain][cuts] if name in IN_FLIGHT else np.zeros((len(cuts), self.slots))
        order = schedule.saturated_shape(schedule.shape_of(pp, vpp, microbatches, self.schedule))
        known = (name, shape, order.microbatches)
        if known not in self._held:
            worst = [
                (self._per_chunk(name, cuts, rank * self._phases, vpp) @ phase[name in WAITING].T).max(axis=1)
                for rank in range(pp)
                for phase in (schedule.held_and_waiting(order, rank) * self._phases)[: self._phases]
            ]
            result = np.stack([worst[min(slot, len(worst) - 1)] for slot in range(self.slots)], axis=1).astype(float)
            # the microbatch whose input gradients are being made has its logits instead
            self._held[known] = np.maximum(result - 1.0, 0.0) if name == "head_waiting" else result
        return self._held[known]

    def _per_chunk(self, name: str, cuts: Array, slot: int, vpp: int) -> Array:
        """(cut, chunk) what each chunk of a rank holds of the thing counted."""
        if name in ("embedding_in_flight", "head_waiting"):
            feature, chunk = ("first", 0) if name == "embedding_in_flight" else ("last", vpp - 1)
            return np.asarray(self.features[feature][cuts, slot, None] * (np.arange(vpp) == chunk))
        return np.asarray(self._chunks[name.split("_")[0]][cuts, slot, :vpp])

    def _kept_in_flight(self, name: str, split: int, microbatches: int) -> Array:
        """(recomputed layers less one, slot) of all cuts with these layers."""
        from parsolve.objectives.schedule import Shape, held

        cut, of = self.cuts[split], self._partial[int(self._base[split])]
        layers = of.kept_dense if name == "dense_kept_in_flight" else of.kept_moe
        shape = Shape(cut.pp, cut.vpp, microbatches)
        ranks = self.rank[split].tolist()
        worst = {r: (held(shape, r) @ layers[:, r].T).max(axis=0) for r in set(ranks)}
        return np.stack([worst[r] for r in ranks], axis=1)

    @property
    def texts(self) -> list[str]:
        """Each cut as chunk sizes in model order."""
        return ["|".join(map(str, model_order(cut.layers, self.schedule))) for cut in self.cuts]


@lru_cache(maxsize=1024)
def held_before_last(pp: int, vpp: int, microbatches: int) -> int:
    """Microbatches in flight on the stage before the last, at most."""
    from parsolve.objectives.schedule import Shape, held

    return int(held(Shape(pp, vpp, microbatches), pp - 2)[:, -1].max())


def saturated(pp: Any, vpp: Any) -> Any:
    """A number of microbatches from which on no rank holds more: pp in plain 1F1B, a few groups when interleaved."""
    return np.where(vpp == 1, pp, 3 * pp)


@lru_cache(maxsize=16)
def _moe_before(layer_is_moe: tuple[bool, ...]) -> Array:
    """MoE layers before each layer, and in all."""
    return np.concatenate(([0], np.cumsum(layer_is_moe))).astype(np.int64)


def moe_layers(counts: Array, layer_is_moe: tuple[bool, ...]) -> Array:
    """MoE layers of each stage when the layers are dealt out in order, arrays (…, stage) in model order."""
    if len(set(layer_is_moe)) == 1:
        return counts * int(layer_is_moe[0])
    ends = np.cumsum(counts, axis=-1, dtype=np.intp)
    moe = _moe_before(layer_is_moe).take(ends, mode="clip")  # a cut that is only being checked may hold more
    moe[..., 1:] -= moe[..., :-1].copy()
    return moe


@dataclass(frozen=True)
class _Partial:
    """Recomputed and kept layers of a cut where the first 1, 2, ... of every chunk are recomputed.

    ``dense``, ``moe``, ``kept_dense``, ``kept_moe``: (recomputed less one, rank, chunk); ``features``: those of
    RECOMPUTED, (recomputed less one, rank).
    """

    dense: Array
    moe: Array
    kept_dense: Array
    kept_moe: Array
    features: dict[str, Array]

    @staticmethod
    def of(splits: Splits, base: int, cut: Split) -> _Partial:
        """All of one cut, up to as many layers as are asked for."""
        most = int(splits.recomputed[splits._base == base].max())
        all_dense, all_moe = splits._contents[base]
        sizes = all_dense + all_moe
        start = np.cumsum(sizes.T).reshape(sizes.T.shape).T - sizes
        before = _moe_before(splits.layer_is_moe)
        first = np.minimum(np.arange(1, most + 1)[:, None, None], sizes)
        moe = before.take(start + first, mode="clip") - before.take(start, mode="clip")
        dense = first - moe
        kept_dense, kept_moe = all_dense - dense, all_moe - moe
        of_moe = ((moe > 0) & (kept_moe == 0)).any(axis=2)
        of_dense = ((dense > 0) & (kept_dense + kept_moe == 0)).any(axis=2) & ~of_moe
        in_first = {"dense": dense[:, :, 0], "moe": moe[:, :, 0]}
        features = {
            "dense_recomputed": dense.sum(axis=2),
            "moe_recomputed": moe.sum(axis=2),
            **{f"{kind}_recomputed_ahead": layers.cumsum(axis=1) - layers for kind, layers in in_first.items()},
            "rebuilds_dense": of_dense,
            "rebuilds_moe": of_moe,
        }
        return _Partial(dense, moe, kept_dense, kept_moe, features)


def _patterns(counts: Array, layer_is_moe: tuple[bool, ...]) -> Array:
    """(rank, chunk) a number for the order of the kinds of the chunk's layers, equal where the orders are."""
    number: dict[tuple[bool, ...], int] = {}
    ends = np.cumsum(counts.T).reshape(counts.T.shape).T
    spans = zip((ends - counts).ravel().tolist(), ends.ravel().tolist(), strict=True)
    found = [number.setdefault(layer_is_moe[start:end], len(number)) for start, end in spans]
    return np.array(found, dtype=np.int64).reshape(counts.shape)


def _stages(
    cut: Split, layer_is_moe: tuple[bool, ...], in_order: bool, schedule: str
) -> tuple[Array, Array, list[int]]:
    """(rank, chunk) dense and MoE layer counts, and the representative ranks.

    ``in_order``: ranks are alike only where their kinds of layers follow in the same order.
    """
    counts = np.array(cut.layers, dtype=np.int64)
    if schedule in FOLDED:
        of_stages = moe_layers(stages_in_model_order(counts, schedule), layer_is_moe)
        moe = np.array(from_model_order(of_stages.tolist(), cut.pp, schedule), dtype=np.int64)
    else:
        moe = moe_layers(counts.T.ravel(), layer_is_moe).reshape(counts.T.shape).T
    dense = counts - moe
    contents = np.concatenate((dense, moe), axis=1)
    if in_order and any(layer_is_moe) and not all(layer_is_moe):
        contents = np.concatenate((contents, _patterns(counts, layer_is_moe)), axis=1)
    if cut.mtp_apart:
        contents = np.concatenate((contents, np.arange(cut.pp)[:, None] == cut.pp - 2), axis=1)
    changes = [0, *(np.flatnonzero((contents[1:] != contents[:-1]).any(axis=1)) + 1).tolist(), len(contents)]
    edges = {0, len(contents) - 1}
    if len(contents) > 2:
        inner = sorted({1, len(contents) - 1, *(c for c in changes if 1 <= c < len(contents) - 1)})
        for start, end in itertools.pairwise(inner):
            edges |= {start, end - 1}
    return dense, moe, sorted(edges)


def _rows(dense: Array, moe: Array, ranks: list[int], schedule: str, mtp_apart: bool) -> list[dict[str, float]]:
    """What each representative rank of a cut holds."""
    last = ranks_in_model_order(len(dense), dense.shape[1], schedule)[-1]
    with_modules = len(dense) - 2 if mtp_apart else last
    shares = np.diff([-1, *ranks]) / len(dense)
    dense_ahead, moe_ahead = ((np.cumsum(layers[:, 0]) - layers[:, 0]).tolist() for layers in (dense, moe))
    of_dense, of_moe = (layers.sum(axis=1).tolist() for layers in (dense, moe))
    return [
        {
            "rank": rank,
            "weight": share,
            "dense": of_dense[rank],
            "moe": of_moe[rank],
            "first": rank == 0,
            "last": rank == last,
            "mtp": rank == with_modules,
            "dense_ahead": dense_ahead[rank],
            "moe_ahead": moe_ahead[rank],
            "embedding_ahead": rank > 0,
            "hops_ahead": rank,
            "holds_dense": of_dense[rank] > 0 and of_moe[rank] == 0,
            "holds_moe": of_moe[rank] > 0,
            "dense_hiding": of_dense[rank],
            "moe_hiding": of_moe[rank],
        }
        for rank, share in zip(ranks, shares.tolist(), strict=True)
    ]


@lru_cache(maxsize=1024)
def _relaxed_rows(cut: Split, layer_is_moe: tuple[bool, ...]) -> list[dict[str, float]]:
    """Four slots of which each holds no more than some rank of any free cut: mean, last, second, fullest."""
    pp, vpp, layers, moe = cut.pp, cut.vpp, len(layer_is_moe), sum(layer_is_moe)
    low, high = bounds(layers, pp, vpp, cut.mtp_apart)
    least, most = int(low.max()), int(high[0].sum())
    surely = pp - 2 - (cut.mtp_apart and vpp == 1)  # ranks between the ends that hold layers, whatever the cut
    hiding = {"dense_hiding": min(most, layers - moe), "moe_hiding": min(most, moe)}
    ends, middle = (vpp - 1) * least, int(low[1].sum()) if pp > 2 else vpp * least
    kind = "moe" if moe == layers else "dense"
    alike = moe in (0, layers)
    on_last = int(high[-1, :-1].sum()) if cut.mtp_apart else layers

    def fullest_of(n: int) -> int:
        """Layers of so many on some rank, whatever the last one holds of them."""
        return max(-(-n // pp), -(-(n - on_last) // (pp - 1)))

    mean = {
        "rank": pp - 1,
        "weight": 1.0,
        "dense": (layers - moe) / pp,
        "moe": moe / pp,
        "dense_hiding": (layers - moe) / pp,
        "moe_hiding": moe / pp,
        "first": 1 / pp,
        "last": 1 / pp,
        "mtp": 1 / pp,
        "embedding_ahead": (pp - 1) / pp,
        "hops_ahead": (pp - 1) / 2,
    }
    last = {"rank": pp - 1, "weight": 0.0, "last": 1, "embedding_ahead": 1, "hops_ahead": pp - 1, **hiding}
    last["mtp"] = not cut.mtp_apart
    second = {"rank": 1, "weight": 0.0, "embedding_ahead": pp > 2, "hops_ahead": pp > 2, **hiding}
    fullest = {"rank": pp - 1, "weight": 0.0, **hiding}
    if vpp == 1:
        last |= {"dense_ahead": layers - moe, "moe_ahead": moe}
    if alike:
        ahead = f"{kind}_ahead"
        on_first = low[1:-1, 0]  # of the ranks between the ends, all but the last ahead of the next
        before = float((on_first * np.arange(pp - 2, 0, -1)).sum())
        mean |= {f"holds_{kind}": max(0, surely) / pp, ahead: before / pp}
        last |= {kind: ends, f"holds_{kind}": ends > 0, ahead: layers - ends if vpp == 1 else int(on_first.sum())}
        second |= {kind: middle, f"holds_{kind}": middle > 0} if pp > 2 else {}
        fullest |= {kind: fullest_of(layers), f"holds_{kind}": 1}
    else:
        experts = max(0, middle - (layers - moe)) if pp > 2 else 0
        second |= {"moe": experts, "holds_moe": experts > 0}
        fullest |= {"moe": fullest_of(moe), "holds_moe": 1}
    return [mean, last, second, fullest]


def _relaxed_in_flight(name: str, cut: Split, layer_is_moe: tuple[bool, ...], microbatches: int, slots: int) -> Array:
    """No more than is held on the ranks that the relaxed slots stand for, array (slot,)."""
    from parsolve.objectives.schedule import Shape, held

    if name == "embedding_in_flight":
        return np.array([min(microbatches, cut.pp) / cut.pp] + [0.0] * (slots - 1))
    kind = name.removesuffix("_in_flight")
    rows = [row.get(kind, 0.0) for row in _relaxed_rows(cut, layer_is_moe)]
    if cut.pp > 2 and rows[2]:
        most = held(Shape(cut.pp, cut.vpp, microbatches), 1)
        if cut.vpp == 1:
            rows[2] *= float(most.max())
        elif all(layer_is_moe) or not any(layer_is_moe):
            rows[2] = float((most @ bounds(len(layer_is_moe), cut.pp, cut.vpp, cut.mtp_apart)[0][1]).max())
    return np.array([*rows, *([rows[-1]] * (slots - len(rows)))])


class Probe(Splits):
    """Shapes whose slots hold one unit of one thing each, to read off how a quantity depends on what a rank holds."""

    NAMES = ("nothing", *FEATURES, *IN_FLIGHT)

    def __init__(self, pp: Array, vpp: Array, mtp_apart: Array) -> None:
        shapes = zip(pp.tolist(), vpp.tolist(), mtp_apart.tolist(), strict=True)
        self.layer_is_moe, self.cuts, self.index = (), tuple(free(*shape) for shape in shapes), {}
        self.slots = len(self.NAMES)
        self.pp, self.vpp, self.mtp_apart = pp, vpp, mtp_apart
        self.recomputed, self.with_recomputation = np.zeros(len(pp), np.int64), False
        unit = np.eye(self.slots)
        self.features = {name: np.tile(unit[self.NAMES.index(name)], (len(pp), 1)) for name in (*FEATURES, *IN_FLIGHT)}
        self.rank = np.zeros((len(pp), self.slots), np.int64)

    def in_flight(self, name: str, split: Any, stage: Any, grad_acc: Any) -> Any:
        """The unit of the name's own slot."""
        return self.features[name][split, stage] + 0 * grad_acc
