"""Megatron-Bridge's own recipe, override grammar and validation over printed lines.

``BRIDGE=folder MEGATRON=folder python check_nemo.py < plans``. Real: the recipe without latent attention, Hydra's
parser, ConfigContainer.validate with Megatron-Core's configurations. The recipe of latent attention needs the hub: a
provider of the same class with Megatron-Bridge's defaults stands in for it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import forks
import stubs
from megatron_groups import make_groups

sys.path[:0] = [os.environ["MEGATRON"], os.path.join(os.environ["BRIDGE"], "deps")]
stubs.newer_typing()
stubs.pretend_packages(*os.environ.get("PRETEND", "").split(","))
megatron = importlib.import_module("megatron")
megatron.__path__.append(os.path.join(os.environ["BRIDGE"], "megatron"))
settings = importlib.import_module("megatron.bridge.training.config")
overriding = importlib.import_module("megatron.bridge.training.utils.omegaconf_utils")
recipe = importlib.import_module("megatron.bridge.recipes.gpt.vanilla_gpt")
latent = importlib.import_module("megatron.bridge.models.mla_provider")
block = importlib.import_module("megatron.core.transformer.transformer_block")


def check(plan: dict[str, Any]) -> None:
    """Apply the overrides to the recipe, let it validate itself, compare with the plan."""
    config = plan["config"]
    stubs.pretend_gpu(plan["gpu"])
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= plan["env"]
    script, words = forks.torchrun_part(plan["argv"], plan["world"])
    forks.expect("the script", script, "scripts/training/run_recipe.py")
    forks.expect("the first word", words[0], "--recipe")
    stubs.pretend_rank(plan["world"])
    container = recipe.vanilla_gpt_pretrain_config()
    if words[1] != "vanilla_gpt_pretrain_config":
        container.model = latent.MLAModelProvider()
    container = overriding.process_config_with_overrides(container, cli_overrides=words[2:])
    settings.runtime_config_update(container)
    model, train = container.model, container.train
    seen = {
        "tp": model.tensor_model_parallel_size,
        "pp": model.pipeline_model_parallel_size,
        "cp": model.context_parallel_size,
        "dp": container.data_parallel_size,
        "mbs": train.micro_batch_size,
        "gbs": train.global_batch_size,
        "vpp": model.virtual_pipeline_model_parallel_size or 1,
        "sequence_parallel": bool(model.sequence_parallel),
    }
    partly = model.recompute_granularity == "full" and model.recompute_method == "block"
    seen["recompute"] = "block" if partly else _recompute(model)
    seen["recompute_layers"] = model.recompute_num_layers if partly else 0
    if model.num_moe_experts:
        seen |= {"ep": model.expert_model_parallel_size, "etp": model.expert_tensor_parallel_size}
    for name, value in seen.items():
        forks.expect(name, value, config[name])
    forks.expect("prediction modules", model.mtp_num_layers or 0, plan["mtp_layers"])
    forks.expect("copies of the shards", container.ddp.num_distributed_optimizer_instances, plan["shard_copies"])
    forks.expect("the distributed optimizer", container.ddp.use_distributed_optimizer, config["zero"] >= 1)
    _groups(container, config)
    _cut(model, config)


def _recompute(model: Any) -> str:
    kind = model.recompute_granularity or "none"
    return "light" if kind == "selective" and "layernorm" in model.recompute_modules else kind


def _groups(container: Any, config: dict[str, Any]) -> None:
    """Megatron-Core's process groups as Megatron-Bridge's initialize.py makes them."""
    model = container.model
    groups = make_groups(model, container.ddp.num_distributed_optimizer_instances)
    forks.expect("the data-parallel group", groups.get_data_parallel_world_size(), config["dp"])
    if model.num_moe_experts:
        forks.expect("the expert-data-parallel group", groups.get_expert_data_parallel_world_size(), config["edp"])


def _cut(model: Any, config: dict[str, Any]) -> None:
    chunks = range(config["vpp"]) if config["vpp"] > 1 else [None]
    layout = model.pipeline_model_parallel_layout
    counts = [
        [
            layout.get_num_layers_to_build(vp_stage=chunk, pp_rank=rank)
            if layout is not None
            else block.get_num_layers_to_build(model, vp_stage=chunk, pp_rank=rank)
            for chunk in chunks
        ]
        for rank in range(config["pp"])
    ]
    forks.expect("layers per stage", counts, config["layers_per_stage"])


if __name__ == "__main__":
    forks.run(check)
