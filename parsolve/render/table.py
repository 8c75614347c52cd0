"""The table format: the ranked plans, then the best one in detail, comparisons, the certificate and the launch line."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from parsolve.render import stages, words
from parsolve.render.text import clean, gib, percent, significant, wrap
from parsolve.units import fold_layers

JsonPlan = Mapping[str, Any]


@dataclass(frozen=True)
class Style:
    """How wide to draw, with which characters, and whether in colour."""

    width: int = 80
    color: bool = False
    unicode: bool = True


@dataclass(frozen=True)
class Column:
    """One column: two header lines, the cell's text, and when it says nothing and is hidden."""

    head: str
    cell: Callable[[JsonPlan], str]
    idle: str | None = None
    left: bool = False
    name: str = ""


def _axis(name: str, idle: str | None = None, head: str = "") -> Column:
    return Column(head or name, lambda plan: str(plan["config"][name]), idle)


def _figure(head: str, text: Callable[[Mapping[str, Any]], str], name: str = "") -> Column:
    return Column(head, lambda plan: text(plan["estimate"]) if plan["estimate"] else "-", name=name)


def _layers(plan: JsonPlan) -> str:
    counts = {n for rank in plan["config"]["layers_per_stage"] for n in rank}
    return "even" if len(counts) == 1 else "uneven"


def _recompute(plan: JsonPlan) -> str:
    kind = str(plan["config"]["recompute"])
    if kind == "block":
        return f"block {plan['config']['recompute_layers']}"
    return {"selective": "sel"}.get(kind, kind)


COLUMNS = (
    Column("#", lambda plan: str(plan["rank"])),
    _axis("tp"),
    _axis("pp"),
    _axis("cp", "1"),
    _axis("ep", "1"),
    Column("etp", lambda plan: str(plan["config"]["etp"]), None),
    _axis("dp"),
    _axis("zero", head="ze\nro"),
    _axis("mbs"),
    _axis("grad_acc", head="m"),
    _axis("vpp", "1"),
    _axis("gbs"),
    Column("re-\ncomp", _recompute, "none", left=True, name="recompute"),
    Column("layers", _layers, "even", left=True),
    _figure("step s", lambda e: significant(e["step_time_s"], 4)),
    Column("rela-\ntive", lambda plan: f"{plan['relative']:.3f}"),
    _figure("MFU\n%", lambda e: percent(e["mfu"])),
    _figure("tok/s\n/GPU", lambda e: f"{e['tokens_per_s_per_gpu']:.0f}", "tokens/s/GPU"),
    _figure("mem\nGiB", lambda e: f"{e['memory_bytes']['total'] / 2**30:.1f}"),
    _figure("bub-\nble%", lambda e: percent(e["bubble_fraction"]), "bubble"),
    Column("limited\nby", lambda plan: clean(plan["limited_by"] or "-"), left=True, name="limited by"),
)
DROPPED_FIRST = ("limited by", "bubble", "tokens/s/GPU", "recompute")
"""Columns that make way, in this order, where the terminal is too narrow; the details below have them."""


def render_table(data: Mapping[str, Any], style: Style | None = None, detail: int | None = None) -> str:
    """The whole result.

    Parameters
    ----------
    data: the JSON of a result.
    detail: rank of the plan to detail, the first when None.
    """
    style = style or Style()
    blocks: list[RenderableType] = [wrap(words.headline(data), style.width)]
    plans = data["plans"]
    shown = next((p for p in plans if detail is None or p["rank"] == detail), None)
    if plans:
        blocks += _plan_table(data, style)
    if shown is not None:
        blocks += _details(data, shown, style)
    blocks += [wrap(line, style.width, "  ", "") for line in words.violations(data)]
    blocks += [wrap(line, style.width, "  ", "") for line in words.conflict(data)]
    blocks += [wrap(line, style.width, "  ", "") for line in words.comparisons(data)]
    if shown is not None:
        blocks += [wrap(f"warning: {w['message']}", style.width, "  ", "") for w in shown["warnings"]]
    blocks.append(wrap(words.certificate(data), style.width, "  ", ""))
    choices = words.counterfactuals(data)
    if choices:
        blocks += ["", *(wrap(line, style.width, "      ", "  ") for line in choices)]
    formulas = words.formulas(data)
    if formulas:
        blocks += ["", "formulas (`parsolve explain NAME` shows the code)"]
        blocks += [wrap(line, style.width, "      ", "  ") for line in formulas]
    if shown is not None:
        blocks += words.launch_lines(data, shown)
    return _draw(blocks, style)


def _draw(blocks: Sequence[RenderableType], style: Style) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=style.width,
        force_terminal=style.color,
        color_system="standard" if style.color else None,
        no_color=not style.color,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    for block in blocks:
        if isinstance(block, str):
            out.write(block + "\n")
        else:
            console.print(block)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _new_table(style: Style, **options: Any) -> Table:
    kind = box.SIMPLE_HEAD if style.unicode else box.ASCII2
    options.setdefault("padding", (0, 1, 0, 0))
    return Table(box=kind, show_edge=False, pad_edge=False, header_style="bold", **options)


def _idle(column: Column, plans: Sequence[JsonPlan], data: Mapping[str, Any]) -> bool:
    if column.head == "etp":
        return all(plan["config"]["etp"] == plan["config"]["tp"] for plan in plans)
    if column.head == "gbs":
        workload = data["problem"]["workload"]
        return workload.get("gbs") is not None and workload.get("gbs_tolerance") is None
    return column.idle is not None and all(column.cell(plan) == column.idle for plan in plans)


def _total(columns: Sequence[Column], plans: Sequence[JsonPlan], gap: int) -> int:
    """Width of the table with ``gap`` blanks between columns."""
    texts = ([*column.head.split("\n"), *(column.cell(plan) for plan in plans)] for column in columns)
    return sum(max(map(len, column)) + gap for column in texts)


def _plan_table(data: Mapping[str, Any], style: Style) -> list[RenderableType]:
    plans = data["plans"]
    columns = [column for column in COLUMNS if not _idle(column, plans, data)]
    gap = 2 if _total(columns, plans, 2) <= style.width else 1
    dropped = []
    for name in DROPPED_FIRST:
        if _total(columns, plans, gap) <= style.width:
            break
        dropped += [column.name for column in columns if column.name == name]
        columns = [column for column in columns if column.name != name]
    table = _new_table(style, padding=(0, gap - 1, 0, 0))
    for column in columns:
        table.add_column(Text(column.head), justify="left" if column.left else "right", no_wrap=True)
    for plan in plans:
        table.add_row(*(Text(column.cell(plan)) for column in columns), style="bold" if plan["rank"] == 1 else None)
    if not dropped:
        return [table]
    note = f"left out at {style.width} columns: {', '.join(dropped)} (-f csv has everything)"
    return [table, wrap(note, style.width)]


def _recomputed(config: Mapping[str, Any]) -> str:
    """How many layers of every chunk recompute=block recomputes."""
    most = max((n for rank in config["layers_per_stage"] for n in rank), default=0)
    layers = min(config.get("recompute_layers", 0), most)
    return f", of each the first {layers} recomputed" if layers else ""


def _modules(plan: JsonPlan) -> str:
    """Where prediction modules are that are trained."""
    apart = bool(plan["config"].get("mtp_apart"))
    of = stages.modules(plan["stages"][-2 if apart else -1])
    return of + (" on the last but one" if apart and of else "")


def _details(data: Mapping[str, Any], plan: JsonPlan, style: Style) -> list[RenderableType]:
    config, estimate, schedule = plan["config"], plan["estimate"], words.schedule_of(data)
    text = [
        "",
        f"plan {plan['rank']}: {words.config_text(config, schedule)}",
        f"layers per {'chunk' if config['vpp'] > 1 else 'stage'}: {fold_layers(config['layers_per_stage'], schedule)}"
        + _modules(plan)
        + _recomputed(config),
        f"placement: {', '.join(f'{axis} on {level}' for axis, level in plan['placement'].items() if level != 'none')}"
        if any(level != "none" for level in plan["placement"].values())
        else "placement: one GPU group, nothing to communicate",
    ]
    blocks: list[RenderableType] = [wrap(line, style.width, "  ", "") if line else "" for line in text]
    if estimate is None:
        return [*blocks, "no estimate can be computed for this configuration"]
    blocks.append(wrap(words.throughput(estimate), style.width, "  ", ""))
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(_times(estimate, style), _memory(estimate, style))
    rows = stages.bars(plan.get("stages", ()), style.width, style.unicode) if config["pp"] > 1 else []
    return [*blocks, "", grid, "", *rows, *([""] if rows else [])]


def _times(estimate: Mapping[str, Any], style: Style) -> Table:
    """Exposed and hidden time by term, the largest first."""
    table = _new_table(style)
    table.add_column(Text("time of a step"), no_wrap=True)
    for head in ("exposed s", "share %", "hidden s"):
        table.add_column(Text(head), justify="right", no_wrap=True)
    terms, hidden = estimate["terms_s"], estimate["hidden_s"]
    step = estimate["step_time_s"]
    for name in sorted({**terms, **hidden}, key=lambda n: -terms.get(n, 0.0)):
        exposed, behind = terms.get(name, 0.0), hidden.get(name, 0.0)
        if exposed or behind:
            share = percent(exposed / step) if step else "-"
            cells = (clean(name), significant(exposed), share, significant(behind) if behind else "")
            table.add_row(*map(Text, cells))
    table.add_row(*map(Text, ("step", significant(step, 4), "100.0", "")), style="bold")
    return table


def _memory(estimate: Mapping[str, Any], style: Style) -> Table:
    """Memory of the worst stage by part, the largest first."""
    memory = estimate["memory_bytes"]
    table = _new_table(style)
    table.add_column(Text(f"memory, stage {estimate['worst_stage']}"), no_wrap=True)
    table.add_column(Text("GiB"), justify="right", no_wrap=True)
    parts = {name: amount for name, amount in memory.items() if name not in ("total", "limit") and amount}
    for name in sorted(parts, key=lambda n: -parts[n]):
        table.add_row(Text(clean(name)), Text(gib(parts[name])))
    table.add_row(Text("total"), Text(gib(memory["total"])), style="bold")
    table.add_row(Text("limit"), Text(gib(memory["limit"])))
    return table
