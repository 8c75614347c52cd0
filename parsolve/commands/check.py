"""``parsolve check``."""

from __future__ import annotations

from typing import Any

import click

from parsolve.commands.extras import EXTRAS, check_extras, write_extras
from parsolve.commands.options import OPEN_PROBLEM, RESTRICTIONS, build_problem, output_options


@click.command("check", short_help="What a configuration breaks, costs and looks like.")
@OPEN_PROBLEM
@click.option(
    "--config",
    metavar="AXES|FILE",
    help="tp=8,pp=4,mbs=1,zero=1,… or a JSON file; what is left out gets the framework's default. "
    "recompute=block,recompute_layers=4 recomputes the first 4 layers of every chunk; "
    "layers_per_stage=15|16*6|15 lists the layers of the pp*vpp chunks in model order; "
    "mtp_apart=true puts multi-token prediction on the stage before the output layer's.",
)
@click.option(
    "--from-megatron",
    metavar="LINE|FILE",
    help="Read the configuration, the workload and (without MODEL) the model from a Megatron-LM command: a line, a "
    "script, or a YAML table of its arguments.",
)
@click.option(
    "--from-deepspeed",
    metavar="FILE",
    help="Read batch, precision and ZeRO from a DeepSpeed JSON file; MODEL is given, and with --gbs and --config "
    "mbs=…,grad_acc=… what the file leaves 'auto'.",
)
@click.option("--better", is_flag=True, help="Solve the same problem, and show what would be better.")
@RESTRICTIONS
@click.option("--explain", is_flag=True, help="Add the formulas behind every figure.")
@EXTRAS
@click.option("--slurm", is_flag=True, help="With a launcher format: an sbatch script.")
@output_options("table", "json", "csv", launchers=True)
def command(**options: Any) -> int:
    """Every rule that a configuration breaks, what it costs, and its launch line.

    The configuration comes from --config, or from the command that runs today: --from-megatron, --from-deepspeed.

    \b
    Exit codes: 0 legal, 1 illegal, 2 usage or a bad spec.

    \b
    Examples:
      parsolve check h100-sxm:16x8 llama2-70b --seq-len 4096 --gbs 1024 \\
        --config tp=8,pp=4,mbs=1,zero=1
      parsolve check h100-sxm:16x8 --from-megatron train.sh --better
    """
    from parsolve.commands.output import Output
    from parsolve.commands.show import hint_at_groups, show
    from parsolve.commands.today import better, read_today, remark

    output = Output.of(options)
    check_extras(options)
    today = read_today(options)
    problem = build_problem(options)
    if today and today.stack:
        from parsolve.problem import replace_workload

        problem = replace_workload(problem, **today.stack)
    from parsolve.api import check_result

    result = check_result(problem, options["config"], today.violations if today else ())
    write_extras(result, options, output)
    data = result.to_json()
    if today:
        remark(today, output)
        data["today"] = {"notes": today.notes, "slow": today.slow}
    if options["better"]:
        data["better"] = better(problem, result, output)
    elif today:
        output.note("hint", "--better solves the same problem and shows the best plan beside this one")
    hint_at_groups(problem, result.plans[0], output)
    if options["explain"] and result.plans:
        from parsolve.explaining import plan_formulas

        data["formulas"] = plan_formulas(result.plans[0])
    return show(data, output, lambda index, launcher: result.plans[index].launch(launcher), slurm=options["slurm"])
