"""``parsolve check``."""

from __future__ import annotations

from typing import Any

import click

from parsolve.commands.options import PROBLEM, RESTRICTIONS, build_problem, output_options


@click.command("check", short_help="What a configuration breaks, costs and looks like.")
@PROBLEM
@click.option(
    "--config",
    required=True,
    metavar="AXES|FILE",
    help="tp=8,pp=4,mbs=1,zero=1,… or a JSON file; what is left out gets the framework's default. "
    "layers_per_stage=15|16*6|15 lists the layers of the pp*vpp chunks in model order.",
)
@RESTRICTIONS
@click.option("--explain", is_flag=True, help="Add the formulas behind every figure.")
@output_options("table", "json", "csv", launchers=True)
def command(**options: Any) -> int:
    """Every rule that a configuration breaks, what it costs, and its launch line.

    \b
    Exit codes: 0 legal, 1 illegal, 2 usage or a bad spec.

    \b
    Example:
      parsolve check h100-sxm:16x8 llama2-70b --seq-len 4096 --gbs 1024 \\
        --config tp=8,pp=4,mbs=1,zero=1
    """
    from parsolve.commands.output import Output
    from parsolve.commands.show import show

    output = Output.of(options)
    problem = build_problem(options)
    from parsolve.api import check_result

    result = check_result(problem, options["config"])
    data = result.to_json()
    if options["explain"] and result.plans:
        from parsolve.explaining import plan_formulas

        data["formulas"] = plan_formulas(result.plans[0])
    return show(data, output, lambda index, launcher: result.plans[index].launch(launcher))
