"""Multi-token prediction: who trains the modules, and what they exclude."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import rule
from parsolve.problem import Instance, Problem
from parsolve.specs.workload import MEGATRON_LIKE

SINCE = (0, 14)
"""Before, Megatron-Core neither recomputes the modules, nor shifts tokens across context-parallel ranks, nor has the
modules in layout strings."""
POSITIONS = ("rope", "none")


def takes_modules(problem: Problem) -> bool:
    """The launcher trains prediction modules of such a model."""
    return problem.megatron_core >= SINCE and problem.model.position in POSITIONS


@rule(
    "{p.framework} does not train the {p.mtp_layers} multi-token-prediction module(s): use --mtp-layers 0",
    frameworks=("deepspeed", "torchtitan", "accelerate"),
    needs="mtp_layers",
    source="only Megatron-Core among the launchers has such modules",
)
def mtp_launcher(p: Instance) -> Any:
    """Prediction modules need a launcher on Megatron-Core."""
    return np.bool_(p.mtp_layers == 0)


@rule(
    "multi-token prediction as it is modelled exists from Megatron-LM 0.14 on, not in {p.problem.framework_version}:"
    " use --mtp-layers 0",
    frameworks=MEGATRON_LIKE,
    needs="mtp_layers",
    source="Megatron-Core 0.13: multi_token_prediction.py, pipeline_parallel_layer_layout.py",
)
def mtp_since(p: Instance) -> Any:
    """Prediction modules that are recomputed and work with context parallelism exist from 0.14 on."""
    return np.bool_(p.mtp_layers == 0 or p.megatron_core >= SINCE)


@rule(
    "multi-token prediction with {p.model.position} positions: Megatron-LM has it for rope and none: use "
    "--mtp-layers 0",
    frameworks=MEGATRON_LIKE,
    needs="mtp_layers",
    source="megatron/training/arguments.py: --mtp-num-layers needs --position-embedding-type rope or none",
)
def mtp_positions(p: Instance) -> Any:
    """Prediction modules go with rotary positions or none."""
    return np.bool_(p.mtp_layers == 0 or p.model.position in POSITIONS)


@rule(
    "multi-token prediction with --schedule {p.workload.schedule}: the modules' weight gradients are not modelled"
    " apart: use --mtp-layers 0 or --schedule 1f1b",
    frameworks=("generic",),
    needs="mtp_layers",
    source="no launcher has both",
)
def mtp_schedule(p: Instance) -> Any:
    """Prediction modules go with schedules that make all gradients at once."""
    return np.bool_(p.mtp_layers == 0 or not p.workload.splits_backward)


RULES = (mtp_launcher, mtp_since, mtp_positions, mtp_schedule)
