"""Megatron-Core's process groups, all of them, without a network."""

from __future__ import annotations

import importlib
from typing import Any


def make_groups(sizes: Any, instances: int) -> Any:
    """Megatron-Core's module of groups after it made them.

    ``sizes``: what has Megatron's names for them, its arguments or a model provider. ``instances``: of the distributed
    optimizer.
    """
    groups = importlib.import_module("megatron.core.parallel_state")
    groups.initialize_model_parallel(
        sizes.tensor_model_parallel_size,
        sizes.pipeline_model_parallel_size,
        sizes.virtual_pipeline_model_parallel_size,
        context_parallel_size=sizes.context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=instances,
        create_gloo_process_groups=False,
    )
    return groups
