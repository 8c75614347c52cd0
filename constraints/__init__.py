"""What is legal: one file a topic. ``RULES``, ``LIMITS`` and ``WARNINGS`` list everything built in."""

from __future__ import annotations

from parsolve.constraints import (
    batch,
    context,
    expert,
    framework,
    fsdp,
    memory,
    multi_token,
    pipeline,
    tensor,
    warnings,
    world,
)
from parsolve.constraints import zero as zero_stages
from parsolve.functions import Limit, Rule, Warning_

_TOPICS = (world, batch, tensor, context, expert, pipeline, zero_stages, framework, fsdp, multi_token)
RULES: tuple[Rule, ...] = tuple(rule for topic in _TOPICS for rule in topic.RULES)
LIMITS: tuple[Limit, ...] = memory.LIMITS
WARNINGS: tuple[Warning_, ...] = warnings.WARNINGS
