"""How a model's layers are cut into pipeline stages: the cuts a framework offers, and what each stage of a cut holds.

A cut is a tuple per pipeline rank of the layer counts of its virtual chunks; in model order chunk ``c`` of rank ``r``
is number ``c * pp + r``. Ranks with the same contents as their neighbours are represented by the first (most
microbatches in flight, so most memory) and the last of them (latest start, so longest time).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from parsolve.functions import Array

Layers = tuple[tuple[int, ...], ...]


class Split(NamedTuple):
    """``layers[rank][chunk]`` and the way a launcher spells it.

    ``kind``: ``even``; ``embedding``, ``loss``, ``embedding+loss`` (counted as a layer); ``first-last`` (own counts for
    the first and last rank); ``layout`` (any other).
    """

    layers: Layers
    kind: str

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


def model_order(layers: Layers) -> list[int]:
    """Layer counts of the chunks in the order in which a token passes them."""
    return [rank[chunk] for chunk in range(len(layers[0])) for rank in layers]


def from_model_order(counts: Sequence[int], pp: int) -> Layers:
    """The inverse of ``model_order``; ``len(counts)`` must be a multiple of ``pp``."""
    return tuple(tuple(counts[rank::pp]) for rank in range(pp))


def balanced(num_layers: int, pp: int, vpp: int) -> Layers:
    """Chunks that differ by at most one layer, the fuller ones first."""
    small, fuller = divmod(num_layers, pp * vpp)
    return from_model_order([small + (i < fuller) for i in range(pp * vpp)], pp)


def classify(layers: Layers, num_layers: int) -> str:
    """The simplest spelling of a cut; see ``Split.kind``."""
    counts = model_order(layers)
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


def enumerate_splits(num_layers: int, shapes: Iterable[tuple[int, int]], uneven: bool) -> list[Split]:
    """The cuts on offer for each ``(pp, vpp)``.

    ``uneven``: what Megatron-LM's first/last and account-for flags can say; otherwise one cut for each shape, even
    where the chunks divide the layers, else balanced.
    """
    found: dict[Layers, None] = {}
    for pp, vpp in shapes:
        if pp * vpp > num_layers:
            continue
        if num_layers % (pp * vpp) == 0 or not uneven:
            found.setdefault(balanced(num_layers, pp, vpp))
        if not uneven or pp == 1:
            continue
        for first, last in ((1, 1), (1, 0), (0, 1)):
            slots, rest = divmod(num_layers + first + last, pp * vpp)
            if rest == 0 and slots > 0:
                counts = [slots] * (pp * vpp)
                counts[0] -= first
                counts[-1] -= last
                found.setdefault(from_model_order(counts, pp))
        for layers in _first_last(num_layers, pp, vpp, SPREAD):
            found.setdefault(layers)
    return [Split(layers, classify(layers, num_layers)) for layers in found]


class Splits:
    """A list of cuts with what every representative stage holds, as arrays over (split, stage slot).

    ``dense``/``moe``: layers of the rank; ``dense_ahead``/``moe_ahead``: layers in the first chunks of all earlier
    ranks; ``first``/``last``: 1 where the slot is the first/last rank; ``rank``: the pipeline rank;
    ``dense_chunks``/``moe_chunks``: (split, slot, chunk). ``weight``: share of all ranks that a slot stands for.
    """

    def __init__(self, layer_is_moe: Sequence[bool], cuts: Sequence[Split]) -> None:
        self.layer_is_moe, self.cuts = tuple(layer_is_moe), tuple(cuts)
        self.index = {cut.layers: i for i, cut in enumerate(self.cuts)}
        moe_prefix = np.concatenate(([0], np.cumsum(self.layer_is_moe))).astype(np.int64)
        stages = [self._stages(cut, moe_prefix) for cut in self.cuts]
        self.slots = max((len(rows) for _, _, rows in stages), default=1)
        shape = (len(self.cuts), self.slots)
        chunks = max((cut.vpp for cut in self.cuts), default=1)
        self.pp = np.array([cut.pp for cut in self.cuts], dtype=np.int64)
        self.vpp = np.array([cut.vpp for cut in self.cuts], dtype=np.int64)
        self.even = np.array([cut.even for cut in self.cuts], dtype=bool)
        self.kinds = np.array([cut.kind for cut in self.cuts])
        self.weight = np.zeros(shape)
        self.dense, self.moe = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.dense_ahead, self.moe_ahead = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.rank, self.first, self.last = (
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
        )
        self.dense_chunks = np.zeros((*shape, chunks), np.int64)
        self.moe_chunks = np.zeros((*shape, chunks), np.int64)
        for i, (dense, moe, rows) in enumerate(stages):
            # each slot stands for the ranks after the slot before it, up to itself: the weights add up to 1
            self.weight[i, : len(rows)] = np.diff([-1, *rows]) / len(dense)
            ranks = np.array(rows + [rows[-1]] * (self.slots - len(rows)))
            self.rank[i] = ranks
            self.first[i], self.last[i] = ranks == 0, ranks == len(dense) - 1
            self.dense[i], self.moe[i] = dense.sum(axis=1)[ranks], moe.sum(axis=1)[ranks]
            self.dense_ahead[i] = (np.cumsum(dense[:, 0]) - dense[:, 0])[ranks]
            self.moe_ahead[i] = (np.cumsum(moe[:, 0]) - moe[:, 0])[ranks]
            self.dense_chunks[i, :, : dense.shape[1]] = dense[ranks]
            self.moe_chunks[i, :, : moe.shape[1]] = moe[ranks]

    @staticmethod
    def _stages(cut: Split, moe_prefix: Array) -> tuple[Array, Array, list[int]]:
        """(rank, chunk) dense and MoE layer counts, and the representative ranks."""
        counts = np.array(cut.layers, dtype=np.int64)
        ends = np.cumsum(counts.T.ravel())
        clipped = np.minimum(ends, len(moe_prefix) - 1)
        before = np.minimum(ends - counts.T.ravel(), len(moe_prefix) - 1)
        moe = (moe_prefix[clipped] - moe_prefix[before]).reshape(counts.T.shape).T
        dense = counts - moe
        contents = np.concatenate((dense, moe), axis=1)
        changes = [0, *(np.flatnonzero((contents[1:] != contents[:-1]).any(axis=1)) + 1).tolist(), len(contents)]
        edges = {0, len(contents) - 1}
        if len(contents) > 2:
            inner = sorted({1, len(contents) - 1, *(c for c in changes if 1 <= c < len(contents) - 1)})
            for start, end in itertools.pairwise(inner):
                edges |= {start, end - 1}
        return dense, moe, sorted(edges)

    @property
    def texts(self) -> list[str]:
        """Each cut as chunk sizes in model order."""
        return ["|".join(map(str, model_order(cut.layers))) for cut in self.cuts]

    def with_cut(self, layers: Layers) -> Splits:
        """The same list with one more cut, if it is new."""
        if layers in self.index:
            return self
        cut = Split(layers, classify(layers, len(self.layer_is_moe)))
        return Splits(self.layer_is_moe, (*self.cuts, cut))
