"""The sentences of a result: what was asked, what is proven, what stands beside it. Shared by tables and stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parsolve.render.text import clean, gib, percent, seconds, significant
from parsolve.specs import Recompute
from parsolve.units import fold_layers

Data = Mapping[str, Any]

ROUNDING = 1e-9
"""A gap below this is the last bits of two sums."""


def _count(value: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:g}"


SCHEDULES = {"gpipe": ", GPipe", "zero-bubble": ", zero bubble", "zbv": ", ZBV", "dualpipev": ", DualPipeV"}


def schedule_of(data: Data) -> str:
    """The pipeline schedule of a result."""
    return str(data["problem"]["workload"].get("schedule", "1f1b"))


def headline(data: Data) -> str:
    """Model, cluster and workload in one sentence."""
    problem = data["problem"]
    cluster, model, workload = problem["cluster"], problem["model"], problem["workload"]
    gpus = cluster["domains"] * cluster["gpus_per_domain"]
    active = (
        f", {_count(model['num_active_params'])} active" if model["num_active_params"] != model["num_params"] else ""
    )
    if workload.get("gbs") is not None:
        batch = f"{workload['gbs']} sequences"
    else:
        batch = f"{_count(workload['gbs_tokens'])} tokens"
    if workload.get("gbs_tolerance") is not None:
        batch += f" +- {100 * workload['gbs_tolerance']:g} %"
    framework = f"{problem['framework']} {problem['framework_version']}".strip()
    framework += SCHEDULES.get(schedule_of(data), "")
    return (
        f"{model['name']} ({_count(model['num_params'])} parameters{active}) on {cluster['name']} "
        f"({gpus} {cluster['gpu']['name']}), {framework}, {workload['precision']}, sequence {workload['seq_len']}, "
        f"batch {batch}"
    )


def config_text(config: Data, schedule: str) -> str:
    """The configuration as ``--config`` reads it."""
    names = ("tp", "pp", "cp", "ep", "etp", "dp", "zero", "mbs", "grad_acc", "vpp", "recompute")
    shown = [f"{name}={config[name]}" for name in names if config[name] != {"cp": 1, "ep": 1, "vpp": 1}.get(name)]
    if config["etp"] == config["tp"]:
        shown.remove(f"etp={config['etp']}")
    if config.get("recompute_layers"):
        shown.append(f"recompute_layers={config['recompute_layers']}")
    if config["tp"] > 1:
        shown.append(f"sequence_parallel={str(config['sequence_parallel']).lower()}")
    counts = {n for rank in config["layers_per_stage"] for n in rank}
    if len(counts) > 1:
        shown.append(f"layers_per_stage={fold_layers(config['layers_per_stage'], schedule)}")
    if config.get("mtp_apart"):
        shown.append("mtp_apart=true")
    return ",".join(shown)


def throughput(estimate: Data) -> str:
    """Rates and the two conventions of utilisation."""
    memory = estimate["memory_bytes"]
    return (
        f"step {seconds(estimate['step_time_s'])}, {estimate['tokens_per_s_per_gpu']:.0f} tokens/s/GPU, "
        f"{estimate['model_tflops_per_gpu']:.0f} TFLOPS/GPU, MFU {percent(estimate['mfu'])} % (causal attention "
        f"{percent(estimate['mfu_causal'])} %), memory {gib(memory['total'])} of {gib(memory['limit'])} GiB"
    )


def comparisons(data: Data) -> list[str]:
    """The rule of thumb and the best even cut."""
    lines = []
    baseline, even = data["baseline"], data["even_split"]
    if baseline:
        relation = _slower(baseline["relative"], data)
        step = seconds(baseline["step_time_s"])
        lines.append(f"rule of thumb: {config_text(baseline['config'], schedule_of(data))} takes {step}, {relation}")
    elif data["plans"] and data["status"] in ("optimal", "feasible"):
        lines.append("rule of thumb: finds no legal plan here")
    return [*lines, *_equal_stages(data, even)]


def _equal_stages(data: Data, even: Data | None) -> list[str]:
    """What unequal stages gain over the best plan with equal ones."""
    if not data["plans"] or data["status"] not in ("optimal", "feasible"):
        return []
    proven = data["solver"].get("even_split_proven", True)
    if even is None:
        if proven:
            return ["best equal stages: no equal cut is legal"]
        return ["best equal stages: none found before the time limit"]
    if even["config"] == data["plans"][0]["config"]:
        return [] if even["config"]["pp"] == 1 else ["best equal stages: the best plan itself has them"]
    step, found = seconds(even["step_time_s"]), "" if proven else " (not proven the best of them)"
    relation = _slower(even["relative"], data)
    return [f"best equal stages: {config_text(even['config'], schedule_of(data))} takes {step}, {relation}{found}"]


def _slower(relative: float, data: Data) -> str:
    per = " per token" if data["objective"]["unit"] == "s/token" else ""
    if relative < 1.0005:
        return f"as fast as the best plan{per}"
    return f"{relative:.2f} times slower{per}" if relative >= 1.005 else f"{100 * (relative - 1):.2f} % slower{per}"


def certificate(data: Data) -> str:
    """What is proven, in one sentence that claims no more than that."""
    status, solver, objective = data["status"], data["solver"], data["objective"]
    if status == "legal":
        return "legal: the configuration breaks no rule and fits"
    if status == "illegal":
        return f"illegal: {len(data['violations'])} rule(s) broken"
    where = _space(data)
    stopped = "interrupted" if solver.get("interrupted") else "the time limit ran out"
    if status == "infeasible":
        return f"infeasible: no configuration is legal, proven over {where}"
    if status == "unknown":
        return f"unknown: {stopped} before a legal plan was found or excluded, {where}; raise --time-limit"
    bound, gap = objective["bound"], objective["gap"]
    if data.get("pareto") and status == "optimal":
        claim = "no legal plan beats one of these in both (points at least 2 % of memory apart)"
        return f"the Pareto front of step time against memory: {claim}, {where}"
    if status == "optimal":
        first, comma, second = objective["name"].partition(",")
        if comma:
            measure, _, tolerance = first.partition("~")
            among = f"within {tolerance} of the best {measure}" if tolerance else f"with the best {measure}"
            return f"no legal plan in these domains {among} is better in {second} than plan 1 (optimal), {where}"
        proof = f"optimal; bound {_cost(bound, data)}, gap {_gap(gap)} %"
        claim = "faster" if objective["name"].startswith("step_time") else f"better in {objective['name']}"
        return f"no legal plan in these domains is {claim} than {_cost(objective['best'], data)} ({proof}), {where}"
    if data.get("pareto"):
        return f"the Pareto front as far as it was found, not complete: {stopped}, {where}"
    if not bound:
        return f"feasible, not proven optimal: {stopped} before there was any bound, {where}"
    return (
        f"feasible, not proven optimal: {stopped}; no legal plan in these domains is faster than {_cost(bound, data)}, "
        f"so the best one shown ({_cost(objective['best'], data)}) can be improved by {_gap(gap)} % at most, {where}"
    )


def _gap(gap: float | None) -> str:
    return significant(100 * gap, 2) if gap and gap > ROUNDING else "0"


def _cost(value: float, data: Data) -> str:
    """A cost in the objective's unit, six digits, so that near plans differ."""
    return f"{value:.6g} {data['objective']['unit']}"


def _space(data: Data) -> str:
    domains = data["problem"]["domains"]
    idle = () if len(domains.get("recompute_layers", ())) > 1 else ("recompute_layers",)
    shown = {axis: values for axis, values in domains.items() if axis not in (*_IMPLIED, *idle)}
    text = "; ".join(f"{axis} {_values(axis, values)}" for axis, values in shown.items())
    size = data["solver"].get("search_space")
    cuts = _CUTS.get(data["solver"].get("cuts", ""), "")
    if data["solver"].get("cuts") in ("any", "first any") and len(domains.get("recompute_layers", ())) > 1:
        cuts += "; with recompute=block cuts as listed"
    if data["solver"].get("cuts") == "listed" and not data["solver"].get("all_cuts", True):
        cuts += " (--cuts any looks at all)"
    return (f"{size:,} combinations in domains {text}" if size is not None else f"domains {text}") + cuts


_CUTS = {
    "any": "; all cuts of the layers into chunks of half to twice the even share, alike within a rank but for one "
    "layer, the fuller chunks first on all ranks or last on all (the first and last chunk may hold fewer)",
    "first any": "; any cut of the layers for the first 20 plans, cuts as listed for the others",
    "listed": "; cuts of the layers as listed: equal chunks and the launcher's simple unequal forms",
}
"""What the proof covers; ``docs/solver.md`` states both domains."""
_IMPLIED = ("dp", "edp", "shards")


def _values(axis: str, values: list[int]) -> str:
    if not values:
        return "none"
    if axis == "recompute":
        names = {int(r): r.text for r in Recompute}
        return ",".join(names.get(v, str(v)) for v in values)
    if len(values) > 3 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}..{values[-1]}"
    return ",".join(map(str, values)) if len(values) <= 14 else f"{values[0]}..{values[-1]} ({len(values)} values)"


def conflict(data: Data) -> list[str]:
    """Why nothing is legal and what would help."""
    found = data["infeasible"]
    if not found:
        return []
    lines = [clean(found["explanation"])] if found["explanation"] else []
    lines += [f"- {clean(rule['rule'])}: {clean(rule['message'])}" for rule in found["conflict"]]
    if found["relaxations"]:
        lines.append("what would help:")
    for change in found["relaxations"]:
        most = "at most " if data["solver"].get("cuts") == "any" else ""  # its cuts are as listed
        step = f", then {most}{seconds(change['step_time_s'])} a step" if change["step_time_s"] is not None else ""
        lines.append(f"- {clean(change['change'])} (drops {clean(change['drops'])}){step}")
    return lines


def violations(data: Data) -> list[str]:
    """What a checked configuration breaks."""
    return [f"- {clean(v['rule'])}: {clean(v['message'])}" for v in data.get("violations", ())]


def formulas(data: Data) -> list[str]:
    """Every figure of the breakdown with the functions that it is made of."""
    lines: list[str] = []
    told: set[str] = set()
    for item in data.get("formulas", ()):
        if item["unit"] == "s":
            hidden = f", {seconds(item['hidden'])} hidden" if item["hidden"] else ""
            lines.append(f"{item['line']}: {seconds(item['value'])}{hidden}")
        else:
            lines.append(f"{item['line']}: {gib(item['value'])} GiB")
        again = []
        for function in item["functions"]:
            if function["name"] in told:
                again.append(function["name"])
                continue
            told.add(function["name"])
            axes = ", ".join(function["axes"])
            source = f" [{function['source']}]" if function["source"] else ""
            text = " ".join(function["formula"].split())
            lines.append(f"- {function['name']}({axes}), {function['unit']}: {text}{source}")
        if again:
            lines.append(f"- of functions above: {', '.join(again)}")
    return lines


def counterfactuals(data: Data) -> list[str]:
    """What other choices would cost, re-solved."""
    lines = []
    for item in data.get("counterfactuals", ()):
        if item["step_time_s"] is None:
            lines.append(f"- {item['change']}: {clean(item['cause'])}")
        else:
            per = f" per token, batch {item['config']['gbs']}" if data["objective"]["unit"] == "s/token" else ""
            most = "" if item["proven"] else "at most "
            step = f"{most}{seconds(item['step_time_s'])} a step, {item['relative']:.3f} times the best{per}"
            text = config_text(item["config"], schedule_of(data))
            lines.append(f"- {item['change']}: {step}; {item['cause']} ({text})")
    unproven = any(item["step_time_s"] is not None and not item["proven"] for item in data.get("counterfactuals", ()))
    head = "what other choices would cost" + (" (at most: found, not proven to be their best)" if unproven else "")
    return [f"{head}:", *lines] if lines else []


def launch_lines(data: Data, plan: Data) -> list[str]:
    """The command of the problem's framework (generic: Megatron's), never wrapped; or why there is none."""
    args = plan.get("args", {})
    own = data["problem"]["framework"] in args
    name = data["problem"]["framework"] if own else "megatron"
    made = args.get(name)
    if made is None:
        if data["status"] == "illegal" or not own:
            return []
        return ["", f"no {name} command: {clean(plan['not_expressible'].get(name, ''))}"]
    line = made["command"] if isinstance(made, dict) else made
    return ["", f"{name} (-f {name} prints it alone, over several lines):", clean(line)]
