"""Where hybrid sharding or quantised traffic pays: the same configuration with it."""

from __future__ import annotations

from parsolve.api import check, evaluate
from parsolve.config import Config
from parsolve.evaluation import Estimate
from parsolve.problem import Problem, replace_workload

WORTH = 0.99
"""Worth mentioning is what takes at most this share of the time."""
QUANTIZED_WORTH = 0.9
"""The same for what rounds weights and gradients."""


def better_group(problem: Problem, config: Config) -> tuple[int, Estimate] | None:
    """The group size that fills a fast domain, and its estimate, where that is legal, fits and is faster."""
    group = problem.cluster.gpus_per_domain // config.tp
    ranks = config.dp * config.cp
    if problem.workload.shard_group is not None or config.zero == 0 or group < 2 or ranks <= group:
        return None
    grouped = replace_workload(problem, shard_group=group)
    if check(grouped, config):
        return None
    before, after = evaluate(problem, config), evaluate(grouped, config)
    return (group, after) if after.step_time_s < WORTH * before.step_time_s else None


def better_quantized(problem: Problem, config: Config) -> tuple[str, Estimate] | None:
    """The fastest kind of quantised ZeRO-3 traffic, and its estimate, where DeepSpeed has it and it is faster."""
    workload = problem.workload
    if workload.framework != "deepspeed" or config.zero != 3 or workload.zero_quantized is not None:
        return None
    found = []
    for what in ("weights", "gradients", "both"):
        quantized = replace_workload(problem, zero_quantized=what)
        if not check(quantized, config):
            found.append((evaluate(quantized, config), what))
    if not found:
        return None
    after, what = min(found, key=lambda pair: pair[0].step_time_s)
    return (what, after) if after.step_time_s < QUANTIZED_WORTH * evaluate(problem, config).step_time_s else None
