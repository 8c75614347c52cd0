"""Accelerate's own launch parser, configuration file reader and FSDP plugin over printed commands."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import forks
from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import HfArgumentParser, TrainingArguments


def check(plan: dict[str, Any]) -> None:
    """The command parses with its file; the plugin that the processes build means what the plan says."""
    config = plan["config"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, text in plan["files"].items():
            Path(name).write_text(text)
        args = launch_command_parser().parse_args(plan["argv"][2:])
        args, _, _ = _validate_launch_command(args)
        forks.expect("the number of processes", args.num_processes, plan["world"])
        forks.expect("FSDP", bool(args.use_fsdp), config["zero"] > 0)
        if config["dp"] > 1:
            os.environ |= prepare_multi_gpu_env(args)
        if args.use_fsdp:
            plugin = FullyShardedDataParallelPlugin()
            forks.expect("the FSDP version", plugin.fsdp_version, 2)
            forks.expect("reshard_after_forward", plugin.reshard_after_forward, config["zero"] == 3)
            mesh = ParallelismConfig() if args.use_parallelism_config else None
            copies = mesh.dp_replicate_size if mesh else 1
            forks.expect("copies of the shards", copies, plan["shard_copies"])
            forks.expect("the mesh", mesh.total_size if mesh else plan["world"], plan["world"])
            forks.expect("recomputation", plugin.activation_checkpointing, config["recompute"] == "full")
        _trainer(args.training_script_args, config)


def _trainer(words: list[str], config: dict[str, Any]) -> None:
    """transformers' own reading of the script's arguments; those of the script itself are left over."""
    words = ["--use_cpu" if word == "--bf16" else word for word in words if word != "--fp16"]
    seen, _ = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words, return_remaining_strings=True)
    forks.expect("mbs", seen.per_device_train_batch_size, config["mbs"])
    forks.expect("grad_acc", seen.gradient_accumulation_steps, config["grad_acc"])
    if config["zero"] >= 2:
        each = seen.accelerator_config.gradient_accumulation_kwargs["sync_each_batch"]
        forks.expect("the reduction of every microbatch", each, True)


if __name__ == "__main__":
    forks.run(check)
