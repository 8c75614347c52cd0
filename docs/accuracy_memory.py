"""Memory constants of the shipped profiles: set from what the stacks keep, checked against published peaks."""

GIB = 2**30
CHECKED = "checked against published peaks (docs/accuracy.md)"
CORE_LOGITS = (8.0, f"16-bit logits, a 32-bit copy that the loss overwrites and its gradient; {CHECKED}")
TORCH_LOGITS = (12.0, f"16-bit logits, a 32-bit copy, its log-softmax and both gradients in part; {CHECKED}")
MEMORY: dict[str, dict[str, tuple[float, str]]] = {
    "megatron-ampere": {
        "logits_memory": CORE_LOGITS,
        "outside_bytes": (2.83 * GIB, "fitted on which published layouts ran out of memory (aleph_alpha_2023)"),
        "fragmentation": (0.25, "fitted on which published layouts ran out of memory (aleph_alpha_2023)"),
        "activation_memory": (1.115, "fitted on which published layouts ran out of memory (aleph_alpha_2023)"),
    },
    "megatron-hopper": {"logits_memory": CORE_LOGITS},
    "megatron-blackwell": {"logits_memory": CORE_LOGITS},
    "megatron-deepspeed-ampere": {
        "gradient_bytes": (4.0, f"16-bit gradients and a flat copy for the reduction; {CHECKED}"),
    },
    "fsdp-ampere": {"logits_memory": TORCH_LOGITS},
    "fsdp-hopper": {"logits_memory": TORCH_LOGITS},
    "oneflow-volta": {
        "gradient_bytes": (2.0, "16-bit gradients (OneFlow)"),
        "reduction_bytes": (2.0, "16-bit gradients (OneFlow)"),
        "logits_memory": (5.0, f"fused loss; {CHECKED}"),
        "outside_bytes": (1.0 * GIB, f"context and NCCL of one process on a 16 GB card; {CHECKED}"),
    },
}
