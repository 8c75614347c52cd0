"""``check --from-megatron`` and ``--from-deepspeed``: fills a command's options from what someone runs today."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from parsolve.commands.options import OPTIMIZERS, PRECISIONS
from parsolve.errors import SpecError

if TYPE_CHECKING:
    from parsolve.commands.output import Output
    from parsolve.from_megatron import Today
    from parsolve.problem import Problem
    from parsolve.result import Result

DEFAULTS = {"framework": "megatron", "precision": PRECISIONS[0], "optimizer": OPTIMIZERS[0]}
COMPARE_S = 30.0
"""Time limit of the search for something better, s."""


def read_today(options: dict[str, Any]) -> Today | None:
    """Read the command or file that is named, and complete the options with it.

    Raises
    ------
    SpecError: it cannot be read. UsageError: it and the options disagree, or something is missing.
    """
    if options["from_megatron"] is None and options["from_deepspeed"] is None:
        _need(options, "model", "seq_len", "config")
        return None
    if options["from_megatron"] is not None and options["from_deepspeed"] is not None:
        raise click.UsageError("give only one of --from-megatron and --from-deepspeed")
    from parsolve.loading import load_cluster, load_model
    from parsolve.problem import DEFAULT_VERSIONS

    cluster = load_cluster(options["cluster"])
    model = load_model(options["model"], options["text_only"]) if options["model"] else None
    if options["from_megatron"] is not None:
        from parsolve.from_megatron import read_megatron

        version = options["framework_version"] or DEFAULT_VERSIONS["megatron"]
        try:
            today = read_megatron(options["from_megatron"], cluster, model, _version(version))
        except SpecError as error:
            raise _in_file(options["from_megatron"], error) from None
        if options["config"]:
            raise click.UsageError("the configuration is on the line: leave out --config")
    else:
        from parsolve.from_deepspeed import read_deepspeed

        _need(options, "model", "seq_len")
        given = {name: options[name] for name in ("gbs", "precision", "optimizer")}
        today = read_deepspeed(options["from_deepspeed"], cluster, _axes(options["config"]), given)
    options["model"] = options["model"] or today.model
    for name, value in today.fields.items():
        given = options[name]
        if given not in (None, DEFAULTS.get(name)) and given != value:
            raise click.UsageError(f"--{name.replace('_', '-')} {given} is not what is run today: {value}")
        options[name] = value
    options["config"] = today.config
    return today


def _in_file(source: str, error: SpecError) -> SpecError:
    """The error with the file that was read, if it was one."""
    where = error.where or ""
    if not os.path.isfile(source) or where.startswith(source):
        return error
    return SpecError(error.message, f"{source}: {where}" if where else source)


def _need(options: dict[str, Any], *names: str) -> None:
    for name in names:
        if options[name] is None:
            shown = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{shown} is missing (or read a command of today with --from-megatron)")


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


def _axes(text: str | None) -> dict[str, int]:
    from parsolve.restrictions import axis_name, axis_value
    from parsolve.specs import Recompute

    pairs = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    names = [(axis_name(name.strip(), "--config"), value.strip()) for name, _, value in pairs]
    values = {axis: axis_value(axis, value, "--config") for axis, value in names}
    return {axis: Recompute(value) if axis == "recompute" else value for axis, value in values.items()}


def remark(today: Today, output: Output) -> None:
    """What was not understood and what is slow, on stderr."""
    output.notes("note", today.notes)
    output.notes("slow", today.slow)


def better(problem: Problem, checked: Result, output: Output) -> dict[str, Any] | None:
    """The best plan of the same problem beside the one checked."""
    from parsolve.api import solve
    from parsolve.render.text import seconds
    from parsolve.render.words import config_text
    from parsolve.splits import classify

    layers, schedule = checked.plans[0].config.layers_per_stage, problem.workload.schedule
    unequal = classify(layers, problem.model.num_layers, schedule) == "layout"
    found = solve(problem, top=1, time_limit=COMPARE_S, cuts="any" if unequal else "auto")
    if not found.plans:
        infeasible = found.status == "infeasible"
        output.note("better", "nothing is legal here" if infeasible else f"nothing found in {COMPARE_S:.0f} s")
        return None
    plan, today = found.plans[0], checked.plans[0].estimate
    per_token = problem.per_token
    now, then = (e.time_per_token_s if per_token else e.step_time_s for e in (today, plan.estimate))
    config = plan.config.to_json()
    relation = f"{now / then:.2f} times as fast" if now > 1.005 * then else "no faster than today's"
    text = config_text(config, schedule)
    best = "the best plan" if found.status == "optimal" else f"the best plan found in {COMPARE_S:.0f} s"
    best += "" if found.solver["all_cuts"] else " with cuts as listed"
    output.note("better", f"{best} takes {seconds(plan.estimate.step_time_s)} a step, {relation}: {text}")
    return {"config": config, "step_time_s": plan.estimate.step_time_s, "speedup": now / then, "status": found.status}
