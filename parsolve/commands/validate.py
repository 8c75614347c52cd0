"""``parsolve validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from parsolve.commands.options import ASSIGNMENT, output_options


@click.command(
    "validate",
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="Predicted against measured, for a table of runs.",
)
@click.argument("runs", type=click.Path(exists=True, dir_okay=False))
@click.option("--profile", metavar="NAME|FILE", help="Efficiency constants for all runs.  [default: by stack and GPU]")
@click.option("--where", type=ASSIGNMENT, multiple=True, help="Keep the rows with this value: pp=1.")
@click.option("--worst", type=click.IntRange(0), default=0, metavar="N", help="Show the N runs that are furthest off.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Write a picture: png, svg or pdf.")
@output_options("table", "json")
def command(
    runs: str, profile: str | None, where: tuple[tuple[str, str], ...], worst: int, plot: str | None, **options: Any
) -> int:
    """How far the estimates are from measured runs: step time, ranking of layouts, memory, out-of-memory.

    RUNS is a CSV file with a run a row; what a row does not state is assumed, and every assumption is counted.

    \b
    Example:
      parsolve validate runs.csv --where pp=1 --worst 20 --plot runs.png
    """
    from parsolve.commands.output import Output
    from parsolve.render.data import to_json
    from parsolve.validation import predict, read_runs, report, summarise

    output = Output.of(options)
    table = read_runs(runs, where=dict(where), profile=profile)
    prediction = predict(table.runs)
    summary = summarise(table, prediction)
    for line, number in table.assumptions().items():
        output.note("assumption", f"{line} ({number} runs)")
    if plot is not None:
        from parsolve.validation.plot import plot as draw

        draw(table, prediction, Path(plot))
    rows = report.worst(table, prediction, worst) if worst else []
    if output.format == "json":
        output.emit(to_json({**summary, "worst": rows} if worst else summary))
    else:
        output.emit("\n\n".join(filter(None, (report.table(summary), report.worst_text(rows)))))
    return 0
