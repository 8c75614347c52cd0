"""Expert parallelism: experts divide over ep, their width over etp; dense models have one spelling."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import rule
from parsolve.problem import Instance
from parsolve.specs.workload import MEGATRON_LIKE


@rule(
    "ep={ep} on a dense model: use ep=1",
    source="Megatron-LM arguments.py: expert parallelism needs --num-experts",
)
def experts_exist(p: Instance, *, ep: Any) -> Any:
    """Expert parallelism needs experts."""
    return (ep == 1) | (p.model.moe is not None)


@rule(
    "etp={etp} differs from tp={tp} on a dense model, where it has no meaning: leave it out",
    role="canonical",
)
def dense_expert_grid(p: Instance, *, etp: Any, tp: Any) -> Any:
    """Dense models are spelt with etp = tp, so that both grids hold."""
    return (etp == tp) | (p.model.moe is not None)


@rule(
    "ep={ep} does not divide the model's {p.model.moe.num_experts} experts",
    source="Megatron-LM arguments.py: num_experts % ep == 0",
)
def experts_divide(p: Instance, *, ep: Any) -> Any:
    """Every expert-parallel rank holds the same number of experts."""
    return p.model.moe.num_experts % ep == 0 if p.model.moe else ep > 0


@rule(
    "etp={etp} does not divide the experts' width {p.model.moe.ffn_size}",
    source="Megatron-Core tensor_parallel/layers.py: expert widths divide by etp",
)
def expert_width(p: Instance, *, etp: Any) -> Any:
    """The width of an expert divides over its tensor-parallel ranks."""
    return p.model.moe.ffn_size % etp == 0 if p.model.moe else etp > 0


@rule(
    "etp={etp}: experts with linear biases need etp=1",
    frameworks=MEGATRON_LIKE,
    source="Megatron-Core transformer_config.py: MoE with add_bias_linear needs expert tensor parallel size 1",
)
def expert_bias(p: Instance, *, etp: Any) -> Any:
    """Megatron's experts with biases are not divided over tensor-parallel ranks."""
    return (etp == 1) | (p.model.moe is None or not p.model.moe.expert_bias)


@rule(
    "etp={etp} leaves the fast domain of {p.domain} GPUs: it must divide {p.domain}",
    source="as tensor parallelism",
)
def etp_in_domain(p: Instance, *, etp: Any) -> Any:
    """Expert tensor-parallel groups align with the fast domain, unless the world is one domain."""
    return (p.domain % etp == 0) | (p.world <= p.domain)


@rule(
    "etp={etp} is not tp={tp}: Megatron-DeepSpeed divides experts over the same tensor-parallel ranks",
    frameworks=("deepspeed",),
    source="Megatron-DeepSpeed: --enable-expert-tensor-parallelism",
)
def deepspeed_expert_grid(p: Instance, *, etp: Any, tp: Any) -> Any:
    """Megatron-DeepSpeed has no expert tensor-parallel size of its own."""
    return (etp == tp) | (p.model.moe is None)


@rule(
    "ep={ep} does not divide dp={dp}: DeepSpeed's experts live inside the data-parallel ranks",
    frameworks=("deepspeed",),
    source="DeepSpeed groups.py: expert parallel size divides the data-parallel world",
)
def experts_in_data_parallel(p: Instance, *, ep: Any, dp: Any) -> Any:
    """DeepSpeed forms expert groups out of data-parallel ranks."""
    return np.asarray(dp) % ep == 0


RULES = (
    experts_exist,
    dense_expert_grid,
    experts_divide,
    expert_width,
    expert_bias,
    etp_in_domain,
    deepspeed_expert_grid,
    experts_in_data_parallel,
)
