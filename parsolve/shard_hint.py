"""Where hybrid sharding pays: the same configuration with shard groups that stay inside a fast domain."""

from __future__ import annotations

from parsolve.api import check, evaluate
from parsolve.config import Config
from parsolve.evaluation import Estimate
from parsolve.problem import Problem, replace_workload

WORTH = 0.99
"""A group is worth mentioning when it takes at most this share of the time."""


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
