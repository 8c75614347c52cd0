"""Memory per pipeline rank as rows of text with bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parsolve.render.text import gib, wrap
from parsolve.units import fold_layers

Stage = Mapping[str, Any]

STATES = ("parameters", "gradients", "optimizer")
ACTIVATIONS = ("activations", "logits")
MARKS = {True: "█▓▒·", False: "#=+."}
"""By unicode: states; activations and logits; everything else; free."""
MAX_ROWS = 16
"""Where equal ranks leave more rows than this, neighbours with the same layers share one, which shows the fullest."""
MIN_BAR, MAX_BAR = 4, 60


def bars(stages: Sequence[Stage], width: int, unicode: bool = True) -> list[str]:
    """A heading, then a row for each run of equal neighbouring ranks: layers, GiB in all, and a bar up to the limit.

    Where memory is over the limit the bar goes on, and the row says by how much.
    """
    if not stages:
        return []
    limit = stages[0]["memory_bytes"]["limit"]
    groups = _runs(stages, exact=True)
    fullest = len(groups) > MAX_ROWS
    if fullest:
        groups = _runs(stages, exact=False)
    totals = [int(stage["memory_bytes"]["total"]) for stage, _ in groups]
    notes = [f"  over by {gib(total - limit)}" if total > limit else "" for total in totals]
    fixed = max(map(len, notes)) + MIN_BAR
    chunks = len(stages[0]["layers"]) > 1
    heads = ["rank", "layers/chunk" if chunks else "layers", "GiB"]
    rows = _cells(groups, [fold_layers([stage["layers"]]) + modules(stage) + _again(stage) for stage, _ in groups])
    if chunks and _width(rows, heads) + fixed > width:
        heads[1] = "layers"
        rows = _cells(groups, [f"{sum(stage['layers'])}{modules(stage)}{_again(stage)}" for stage, _ in groups])
    sizes = [max(len(head), *(len(row[i]) for row in rows)) for i, head in enumerate(heads)]
    if _width(rows, heads) + fixed > width:
        notes = [note and "  over" for note in notes]
    room = width - _width(rows, heads) - max(map(len, notes))
    scale = min(max(room, MIN_BAR), MAX_BAR) / max(1, limit, *totals)
    marks = MARKS[unicode]
    legend = f"{marks[0]} states, {marks[1]} activations, {marks[2]} other, {marks[3]} free, of {gib(limit)} GiB"
    lines = [
        wrap(f"memory of each rank{', the fullest of neighbours with the same layers' if fullest else ''}", width),
        wrap(legend, width, "  ", ""),
        "  ".join((heads[0].rjust(sizes[0]), heads[1].ljust(sizes[1]), heads[2].rjust(sizes[2]))),
    ]
    for (stage, _), row, note in zip(groups, rows, notes, strict=True):
        text = (row[0].rjust(sizes[0]), row[1].ljust(sizes[1]), row[2].rjust(sizes[2]))
        lines.append("  ".join((*text, _bar(stage["memory_bytes"], scale, marks))) + note)
    return lines


def modules(stage: Stage) -> str:
    """Prediction modules of a rank, written behind its layers."""
    return f" + {stage['mtp_layers']} MTP" if stage.get("mtp_layers") else ""


def _again(stage: Stage) -> str:
    """How many of a rank's layers recompute=block recomputes."""
    layers = sum(stage.get("recomputed", ()))
    return f", {layers} recomputed" if layers else ""


def _contents(stage: Stage) -> tuple[Any, ...]:
    return stage["layers"], stage.get("mtp_layers"), stage.get("recomputed")


def _runs(stages: Sequence[Stage], exact: bool) -> list[tuple[Stage, str]]:
    """Neighbouring ranks with the same layers (and, when exact, the same total): the fullest, and their numbers."""
    groups: list[list[Stage]] = []
    for stage in stages:
        last = groups[-1][-1] if groups else None
        alike = last is not None and _contents(last) == _contents(stage)
        if last is not None and alike and (not exact or last["memory_bytes"] == stage["memory_bytes"]):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return [
        (
            max(group, key=lambda stage: int(stage["memory_bytes"]["total"])),
            f"{group[0]['rank']}-{group[-1]['rank']}" if len(group) > 1 else str(group[0]["rank"]),
        )
        for group in groups
    ]


def _cells(groups: Sequence[tuple[Stage, str]], layers: Sequence[str]) -> list[tuple[str, str, str]]:
    return [
        (name, text, gib(stage["memory_bytes"]["total"])) for (stage, name), text in zip(groups, layers, strict=True)
    ]


def _width(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> int:
    return sum(max(len(head), *(len(row[i]) for row in rows)) + 2 for i, head in enumerate(heads))


def _bar(memory: Mapping[str, int], scale: float, marks: str) -> str:
    """States, activations, the rest, and what is free, each from where the one before ends."""
    states = sum(memory.get(name, 0) for name in STATES)
    activations = sum(memory.get(name, 0) for name in ACTIVATIONS)
    total = memory["total"]
    ends = [round(min(end, total) * scale) for end in (states, states + activations, total)]
    ends.append(max(ends[-1], round(memory["limit"] * scale)))
    return "".join(mark * (end - start) for mark, start, end in zip(marks, [0, *ends], ends, strict=False))
