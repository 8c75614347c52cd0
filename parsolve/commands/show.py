"""Prints a result, fresh or saved, in any format, with the notes that belong on stderr."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from parsolve.commands.output import Output
from parsolve.errors import NotExpressibleError
from parsolve.render import words
from parsolve.render.text import seconds

if TYPE_CHECKING:
    from parsolve.launchers import Launch
    from parsolve.problem import Problem
    from parsolve.result import Plan

EXIT_CODES = {"optimal": 0, "feasible": 0, "legal": 0, "infeasible": 1, "illegal": 1, "unknown": 3}
INTERRUPTED = 130


def show(
    data: Mapping[str, Any],
    output: Output,
    launch: Callable[[int, str], Launch],
    rank: int | None = None,
    slurm: bool = False,
) -> int:
    """Print the result and return its exit code.

    Parameters
    ----------
    data: the JSON of the result.
    launch: makes the launch of the plan at an index of ``plans`` by a launcher.
    rank: the plan that a table details and a launcher prints; the first when None.
    slurm: a launcher prints an sbatch script.

    Raises
    ------
    NotExpressibleError: the launcher asked for has no words for the plan.
    """
    output.notes("assumption", data["assumptions"])
    if output.format == "table":
        output.emit(_table(data, output, rank))
        return EXIT_CODES[data["status"]]
    plans = data["plans"]
    index = next((i for i, plan in enumerate(plans) if rank is None or plan["rank"] == rank), None)
    if index is not None:
        output.notes("warning", (w["message"] for w in plans[index]["warnings"]))
    output.notes("violation", (f"{v['rule']}: {v['message']}" for v in data.get("violations", ())))
    output.notes("conflict", words.conflict(data))
    output.note("status", words.certificate(data))
    if output.format == "json":
        from parsolve.render.data import to_json

        output.emit(to_json(data))
    elif output.format == "csv":
        from parsolve.render.data import to_csv

        output.emit(to_csv(data))
    elif index is not None and data["status"] != "illegal":
        _launch(data, output, launch, index, slurm)
    return EXIT_CODES[data["status"]]


def hint_at_groups(problem: Problem, plan: Plan, output: Output) -> None:
    """Say so where sharding inside a fast domain alone, or quantised traffic, would make a plan faster."""
    from parsolve.shard_hint import better_group, better_quantized

    if output.quiet or plan.estimate is None:
        return
    found = better_group(problem, plan.config)
    quantized = better_quantized(problem, plan.config)
    if quantized is not None:
        what, other = quantized
        output.note(
            "hint",
            f"with --zero-quantized {what} (ZeRO++: rounds what is sent, which may cost accuracy) plan {plan.rank} "
            f"would take {seconds(other.step_time_s)} a step",
        )
    if found is not None:
        group, other = found
        output.note(
            "hint",
            f"with --shard-group {group} (shards inside a fast domain, copies across) plan {plan.rank} would take "
            f"{seconds(other.step_time_s)} a step and {other.memory_bytes['total'] / 2**30:.1f} GiB",
        )


def _table(data: Mapping[str, Any], output: Output, rank: int | None) -> str:
    from parsolve.render.table import Style, render_table

    return render_table(data, Style(output.width, output.color, output.unicode), rank)


def _launch(
    data: Mapping[str, Any], output: Output, launch: Callable[[int, str], Launch], index: int, slurm: bool
) -> None:
    from parsolve.commands.launching import write_launch

    plan = data["plans"][index]
    text = words.config_text(plan["config"], words.schedule_of(data))
    try:
        made = launch(index, output.format)
    except NotExpressibleError as error:
        mend = f"solve with --framework {output.format}" if data["problem"]["framework"] != output.format else ""
        about = f"plan {plan['rank']} ({text}) has no {output.format} command"
        raise NotExpressibleError(f"{about}: {error}{f'; {mend}' if mend else ''}") from None
    name, step = data["problem"]["model"]["name"], plan["estimate"]["step_time_s"] if plan["estimate"] else None
    about = f"parsolve plan {plan['rank']} of {len(data['plans'])} for {name}: {text}"
    place = _place(data) if slurm else None
    write_launch(made, f"{about}, {seconds(step)} a step" if step else about, output, place)


def _place(data: Mapping[str, Any]) -> tuple[int, int]:
    """Hosts, and processes on each."""
    from parsolve.specs import Cluster

    cluster = Cluster.read(data["problem"]["cluster"], "problem.cluster")
    return cluster.hosts, cluster.processes_per_host
