"""What is legal: one file a topic. ``RULES``, ``LIMITS`` and ``WARNINGS`` list everything built in."""

from __future__ import annotations

from parsolve.constraints import batch, context, expert, framework, memory, pipeline, tensor, warnings, world, zero
from parsolve.functions import Limit, Rule, Warning_

RULES: tuple[Rule, ...] = (*world.RULES, *batch.RULES, *tensor.RULES, *context.RULES, *expert.RULES)
RULES = (*RULES, *pipeline.RULES, *zero.RULES, *framework.RULES)
LIMITS: tuple[Limit, ...] = memory.LIMITS
WARNINGS: tuple[Warning_, ...] = warnings.WARNINGS
