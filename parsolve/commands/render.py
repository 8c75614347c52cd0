"""``parsolve render``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from parsolve.commands.options import output_options
from parsolve.errors import SpecError

if TYPE_CHECKING:
    from parsolve.launchers import Launch


@click.command("render")
@click.argument("plan_json", metavar="PLAN.json")
@click.option("--plan", "rank", type=click.IntRange(min=1), help="Rank of the plan to print.  [default: the first]")
@click.option("--slurm", is_flag=True, help="With a launcher format: an sbatch script.")
@output_options("table", "json", "csv", launchers=True)
def command(plan_json: str, rank: int | None, **options: Any) -> int:
    """Print a saved result again, in any format, without solving.

    PLAN.json is what `solve -f json` or `check -f json` wrote; - reads stdin. With --plan, json and csv hold that plan
    alone.

    \b
    Example:
      parsolve render plan.json -f megatron --plan 2
    """
    from parsolve.commands.output import Output
    from parsolve.commands.show import show
    from parsolve.saved import read_saved, saved_plan

    output = Output.of(options)
    data = read_saved(plan_json)
    if rank is not None:
        chosen = [plan for plan in data["plans"] if plan["rank"] == rank]
        if not chosen:
            have = ", ".join(str(plan["rank"]) for plan in data["plans"][:20]) or "none"
            raise SpecError(f"the file has no plan {rank}; it has {have}", f"{plan_json}: plans")
        if output.format in ("json", "csv"):
            data = {**data, "plans": chosen}

    def launch(index: int, launcher: str) -> Launch:
        from parsolve.launchers import launch as launch_by

        return launch_by(launcher, *saved_plan(data, index, plan_json))

    return show(data, output, launch, rank, options["slurm"])
