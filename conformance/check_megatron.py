"""Megatron-LM's own parser, validation, configurations, process groups and layer counts over printed lines.

``MEGATRON=folder python check_megatron.py < plans``; the folder holds a megatron-core wheel. Real: everything but the
GPU, Transformer Engine and NCCL.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

import forks
import stubs
from megatron_groups import make_groups
from packaging.version import Version

sys.path.insert(0, os.environ["MEGATRON"])
stubs.newer_typing()
arguments = importlib.import_module("megatron.training.arguments")
training = importlib.import_module("megatron.training.training")
groups = importlib.import_module("megatron.core.parallel_state")
utilities = importlib.import_module("megatron.core.utils")
block = importlib.import_module("megatron.core.transformer.transformer_block")
microbatches = importlib.import_module("megatron.core.num_microbatches_calculator")
stubs.pretend_engine()  # after the imports, which would else look for its layers
utilities._te_version = Version(stubs.TRANSFORMER_ENGINE)
for module, prefix in (
    ("megatron.core.models.common.embeddings.rope_utils", "fused_apply_rotary"),
    ("megatron.core.transformer.moe.moe_utils", "fused_"),
):
    place = importlib.import_module(module)
    for name in [name for name, value in vars(place).items() if name.startswith(prefix) and value is None]:
        setattr(place, name, lambda *a, **k: None)


def parse(plan: dict[str, Any]) -> Any:
    """The line's arguments after Megatron-LM's validation, on the GPU of the plan."""
    stubs.pretend_gpu(plan["gpu"])
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS",):
        os.environ.pop(name, None)
    os.environ |= plan["env"]
    script, words = forks.torchrun_part(plan["argv"], plan["world"])
    forks.expect("the script", script, "pretrain_gpt.py")
    stubs.pretend_rank(plan["world"])
    sys.argv = [script, *words]
    args = arguments.parse_args(None)
    arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    return args


def model_config(args: Any) -> Any:
    """The transformer configuration that the model is built from."""
    try:
        return importlib.import_module("megatron.training.argument_utils").core_transformer_config_from_args(args)
    except (ImportError, AttributeError):
        return arguments.core_transformer_config_from_args(args)


def layer_counts(args: Any, config: Any) -> list[list[int]]:
    """Layers of every chunk of every pipeline rank, by Megatron's own function."""
    chunks = range(args.virtual_pipeline_model_parallel_size) if args.virtual_pipeline_model_parallel_size else [None]
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    count = layout.get_num_layers_to_build if layout is not None else None
    return [
        [
            count(vp_stage=chunk, pp_rank=rank)
            if count
            else block.get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
            for chunk in chunks
        ]
        for rank in range(args.pipeline_model_parallel_size)
    ]


def num_microbatches(args: Any) -> int:
    """Microbatches of a step by Megatron's calculator."""
    start = microbatches.init_num_microbatches_calculator
    values = {
        "rank": 0,
        "rampup_batch_size": None,
        "global_batch_size": args.global_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "data_parallel_size": args.data_parallel_size,
        "decrease_batch_size_if_needed": False,
        "seq_length": args.seq_length,
        "step_batch_size_schedule": None,
    }
    start(**{name: values[name] for name in inspect.signature(start).parameters if name in values})
    return int(microbatches.get_num_microbatches())


def check(plan: dict[str, Any]) -> None:
    """Parse, validate, build every configuration and group; compare with the plan."""
    wanted = plan["config"]
    args = parse(plan)
    config = model_config(args)
    training.get_megatron_optimizer_config(args)
    if hasattr(training, "get_megatron_ddp_config"):
        training.get_megatron_ddp_config(args)
    importlib.import_module("megatron.training.global_vars")._build_tokenizer(args)
    make_groups(args, args.num_distributed_optimizer_instances)
    seen = {
        "tp": groups.get_tensor_model_parallel_world_size(),
        "pp": groups.get_pipeline_model_parallel_world_size(),
        "cp": groups.get_context_parallel_world_size(),
        "dp": groups.get_data_parallel_world_size(),
        "ep": groups.get_expert_model_parallel_world_size(),
        "edp": groups.get_expert_data_parallel_world_size(),
        "mbs": args.micro_batch_size,
        "gbs": args.global_batch_size,
        "vpp": args.virtual_pipeline_model_parallel_size or 1,
        "sequence_parallel": bool(args.sequence_parallel),
        "microbatches": num_microbatches(args),
        "layers_per_stage": layer_counts(args, config),
    }
    for name, value in seen.items():
        forks.expect(name, value, wanted[name])
    copies = groups.get_data_parallel_world_size(with_context_parallel=True) // groups.get_data_parallel_world_size(
        with_context_parallel=True, partial_data_parallel=True
    )
    forks.expect("copies of the shards", copies, plan["shard_copies"])
    forks.expect("prediction modules", args.mtp_num_layers or 0, plan["mtp_layers"])
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is not None:
        kinds = importlib.import_module("megatron.core.transformer.enums").LayerType
        stage = layout.layout[-2 if wanted["mtp_apart"] else -1][-1]
        forks.expect("prediction modules of their stage", stage.count(kinds.mtp), plan["mtp_layers"])
    light = wanted["recompute"] == "light"
    granularity, layers = recomputation(args)
    forks.expect("recompute", granularity, "selective" if light else wanted["recompute"])
    forks.expect("recomputed layers of a chunk", layers, wanted["recompute_layers"])
    if light or wanted["recompute"] == "selective":
        modules = set(config.recompute_modules)
        forks.expect("core attention recomputed", "core_attn" in modules, not light)
        forks.expect("light modules recomputed", bool(modules & {"layernorm", "moe_act", "mla_up_proj"}), light)
    forks.expect("the distributed optimizer", bool(args.use_distributed_optimizer), wanted["zero"] >= 1)
    padded = args.padded_vocab_size
    if padded and padded % (128 * wanted["tp"]):
        raise forks.Refused(f"padded vocabulary {padded}")


def recomputation(of: Any) -> tuple[str, int]:
    """The kind in this project's words, and for the block method the layers of each chunk."""
    if of.recompute_granularity == "full" and of.recompute_method == "block":
        return "block", of.recompute_num_layers
    return of.recompute_granularity or "none", 0


if __name__ == "__main__":
    forks.run(check)
