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
APART_SINCE = (0, 16)
"""First version that takes the modules on another stage than the output layer's."""
POSITIONS = ("rope", "none")


def takes_modules(problem: Problem) -> bool:
    """The launcher trains prediction modules of such a model."""
    return problem.megatron_core >= SINCE and problem.model.position in POSITIONS


def may_be_apart(problem: Problem) -> bool:
    """The launcher takes the modules on the stage before the output layer's."""
    layouts = problem.workload.framework in MEGATRON_LIKE and problem.megatron_core >= APART_SINCE
    return layouts and problem.mtp_layers > 0 and problem.workload.schedule == "1f1b"


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


@rule(
    "prediction modules go on the stage before the output layer's where there are some, in Megatron-LM from"
    " 0.16 on, with pp of 3 or more, --schedule 1f1b, and no layers on the output layer's stage ({p.splits.texts[0]}):"
    " leave mtp_apart out, or end layers_per_stage with |0",
    source="Megatron-Core pipeline_parallel_layer_layout.py, validate_layer_layout: behind all layers, not on rank 0",
)
def mtp_apart(p: Instance, *, split: Any) -> Any:
    """Prediction modules have a stage apart from the output layer where the launcher's layouts can say so."""
    possible = (p.splits.pp[split] > 2) & p.splits.empty_last[split] & may_be_apart(p.problem)
    return ~p.splits.mtp_apart[split] | possible


RULES = (mtp_launcher, mtp_since, mtp_positions, mtp_schedule, mtp_apart)
