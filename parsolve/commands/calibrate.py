"""``parsolve calibrate``."""

from __future__ import annotations

from pathlib import Path

import click

from parsolve.commands.options import ASSIGNMENT


@click.command(
    "calibrate",
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="Fit the efficiency constants to measured runs.",
)
@click.argument("runs", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False), metavar="FILE", help="The profile, TOML."
)
@click.option("--profile", metavar="NAME|FILE", help="The profile to start from.  [default: by stack and GPU]")
@click.option("--where", type=ASSIGNMENT, multiple=True, help="Keep the rows with this value: gpu=H100-80GB-SXM.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
def command(runs: str, output: str, profile: str | None, where: tuple[tuple[str, str], ...], quiet: bool) -> int:
    """Fit a profile to the step times of a table of runs (at least 3), starting from a shipped one.

    Constants that the runs cannot determine stay as they are and are named. The error before and after is reported by
    leaving runs out in turn.

    \b
    Example:
      parsolve calibrate runs.csv -o my-cluster.toml
      parsolve solve h100-sxm:16x8 llama2-70b --seq-len 4096 --gbs 1024 --profile my-cluster.toml
    """
    from parsolve.calibration import calibrate
    from parsolve.commands.output import to_stderr, write_file
    from parsolve.validation import read_runs

    table = read_runs(runs, where=dict(where), profile=profile)
    result = calibrate(table.runs, name=Path(output).stem)
    write_file(Path(output), result.text)
    if not quiet:
        for reason, number in table.reasons().items():
            to_stderr(f"skipped: {number} x {reason}")
        for line in result.report():
            to_stderr(line)
    return 0
