"""``parsolve solve``."""

from __future__ import annotations

from typing import Any

import click

from parsolve.commands.extras import EXTRAS, check_extras, write_extras
from parsolve.commands.options import DURATION, FRACTION, PROBLEM, RESTRICTIONS, Top, build_problem, output_options


@click.command("solve", short_help="The fastest legal plans, and the proof that nothing is faster.")
@PROBLEM
@click.option(
    "--top", type=Top(), metavar="N|all", default="5", show_default=True, help="How many plans, or all legal ones."
)
@RESTRICTIONS
@click.option(
    "--time-limit", type=DURATION, default="30s", show_default=True, help="Stop then, and print the best so far."
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    metavar="N",
    default=1,
    show_default=True,
    help="Threads of CP-SAT; the answer is the same with any number.",
)
@click.option(
    "--cuts",
    type=click.Choice(["auto", "any", "listed"]),
    default="auto",
    show_default=True,
    help="Cuts of the layers into stages. listed: equal chunks, first/last counts, embedding and loss counted as"
    " layers; any: for each of up to 20 plans the best of all cuts whose chunks hold half to twice the even share and"
    " are alike within a rank but for one layer, the fuller ones first or last on all ranks (docs/solver.md), where"
    " the launcher takes layout strings, in seconds instead of tenths, for plans 0 to 6 % faster on the benchmark's"
    " problems; auto: listed, or any where no listed cut is legal. recompute=block takes listed cuts in any case.",
)
@click.option(
    "--within",
    type=FRACTION,
    metavar="5%",
    help="List every plan within this of the best, each with its best cut and recompute_layers, whatever --top.",
)
@click.option("--distinct", is_flag=True, help="Only the best plan of each (tp, pp, cp, ep).")
@click.option(
    "--objective",
    default="step_time",
    show_default=True,
    help="step_time, throughput, cost, memory; a pair: step_time~2%,memory or 0.7*step_time+0.3*memory.",
)
@click.option(
    "--pareto",
    is_flag=True,
    help="The front of step time against memory of the worst stage, in steps of 2 % of memory, whatever --top.",
)
@click.option("--hint", type=click.Path(), metavar="PLAN.json", help="Start from the plans of a saved result.")
@click.option(
    "--explain",
    is_flag=True,
    help="Add the formulas behind the best plan, and what other choices would cost (each question up to 10 s more).",
)
@EXTRAS
@click.option("--slurm", is_flag=True, help="With a launcher format: an sbatch script.")
@output_options("table", "json", "csv", launchers=True)
def command(**options: Any) -> int:
    """The fastest legal plans in exact order, and the proof that nothing legal is faster.

    CLUSTER is GPU:NxG (N fast domains with G GPUs used in each), a preset or a file. MODEL is a preset, a Hugging Face
    config.json or its folder, or a spec file. Axes: dp tp pp cp ep etp edp zero mbs grad_acc vpp recompute
    recompute_layers sequence_parallel gbs. recompute is none, selective, full, block: the first recompute_layers
    layers of every pipeline chunk (Megatron-LM, NeMo, generic), or light: what is cheap to have again
    (Megatron-LM, NeMo).

    \b
    Exit codes: 0 plans printed, 1 nothing is legal, 2 usage or a bad spec,
    3 time limit before any plan, 130 interrupted.

    \b
    Examples:
      parsolve solve h100-sxm:16x8 llama2-70b --seq-len 4096 --gbs 1024
      parsolve solve cluster.toml ./my-model/config.json --seq-len 8192 \\
        --gbs-tokens 4M --pin tp=4,8 --max pp=16 -f json -o plan.json
    """
    from parsolve.commands.output import Output, Progress
    from parsolve.commands.show import INTERRUPTED, hint_at_groups, show

    output = Output.of(options)
    check_extras(options)
    problem = build_problem(options)
    from parsolve.api import solve

    result = solve(
        problem,
        top=options["top"] or None,
        within=options["within"],
        distinct=options["distinct"],
        objective=options["objective"],
        pareto=options["pareto"],
        explain=options["explain"],
        hint=_hints(options["hint"]),
        time_limit=options["time_limit"],
        workers=options["workers"],
        cuts=options["cuts"],
        progress=Progress(output.quiet),
        log=output.verbose and not output.quiet,
    )
    write_extras(result, options, output)
    if options["cuts"] == "any" and result.solver["cuts"] == "listed":
        from parsolve.optimizer.ranking import GOAL_OF_OTHERS, why_listed

        output.note("cuts", f"as listed: {why_listed(problem) or GOAL_OF_OTHERS}")
    data = result.to_json()
    if options["explain"] and result.plans:
        from parsolve.explaining import plan_formulas

        data["formulas"] = plan_formulas(result.plans[0])
    if result.plans:
        hint_at_groups(problem, result.plans[0], output)
    code = show(data, output, lambda index, launcher: result.plans[index].launch(launcher), slurm=options["slurm"])
    return INTERRUPTED if result.solver.get("interrupted") else code


def _hints(name: str | None) -> list[Any]:
    """Configurations of a saved result."""
    if name is None:
        return []
    from parsolve.config import Config
    from parsolve.saved import read_saved

    return [Config.from_json(plan["config"]) for plan in read_saved(name)["plans"]]
