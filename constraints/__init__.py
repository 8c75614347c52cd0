"""What is legal: one file a topic. ``RULES``, ``LIMITS`` and ``WARNINGS`` list everything built in."""

from __future__ import annotations

from parsolve.constraints import batch, context, expert, framework, fsdp, memory, pipeline, tensor, warnings, world
from parsolve.constraints import zero as zero_stages
from parsolve.functions import Limit, Rule, Warning_

RULES: tuple[Rule, ...] = (*world.RULES, *batch.RULES, *tensor.RULES, *context.RULES, *expert.RULES)
RULES = (*RULES, *pipeline.RULES, *zero_stages.RULES, *framework.RULES, *fsdp.RULES)
LIMITS: tuple[Limit, ...] = memory.LIMITS
WARNINGS: tuple[Warning_, ...] = warnings.WARNINGS
