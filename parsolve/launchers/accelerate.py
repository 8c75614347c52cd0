"""Hugging Face Accelerate: ``accelerate launch`` with an FSDP2 configuration for any Hugging Face model.

ZeRO-3 is ``reshard_after_forward``, ZeRO-2 keeps the gathered weights until the backward pass, ZeRO-0 is plain data
parallelism. A shard group is a device mesh of replicas by shards (hybrid sharding). Gradients are reduced after every
microbatch, so that they stay sharded.
Source: accelerate 1.15, commands/launch.py, commands/config/config_args.py, utils/dataclasses.py.
"""

from __future__ import annotations

import json
from typing import Any

from parsolve.config import Config
from parsolve.errors import NotExpressibleError
from parsolve.launchers.base import Arguments, Launch, ShellWord, shard_copies
from parsolve.launchers.hugging_face import add_run_clm
from parsolve.problem import Problem
from parsolve.specs import Recompute

CONFIG_FILE = "accelerate.yaml"
ADDRESS, PORT = ShellWord('"${MASTER_ADDR:-host0}"'), ShellWord('"${MASTER_PORT:-29500}"')
RANK = ShellWord('"${MACHINE_RANK:-0}"')
EVERY_BATCH = json.dumps({"gradient_accumulation_kwargs": {"sync_each_batch": True}})


class AccelerateLauncher:
    """``accelerate launch --config_file accelerate.yaml … run_clm.py …``."""

    name = "accelerate"
    framework = "accelerate"

    def launch(self, problem: Problem, config: Config) -> Launch:
        """The command and its configuration file; see ``Launcher.launch``."""
        _refuse(config)
        args = Arguments("Accelerate")
        add_run_clm(args, problem, config)
        if config.zero >= 2:
            args.add("--accelerator_config", EVERY_BATCH)
        elif config.recompute == Recompute.FULL:
            args.add("--gradient_checkpointing")
        argv = ["accelerate", "launch", "--config_file", CONFIG_FILE]
        if problem.cluster.hosts > 1:
            argv += ["--main_process_ip", ADDRESS, "--main_process_port", PORT, "--machine_rank", RANK]
            args.note(
                f"run the line on each of the {problem.cluster.hosts} hosts, with MASTER_ADDR set to one of them and "
                "MACHINE_RANK counting from 0"
            )
        import yaml  # a tenth of a second that only this file needs

        text = yaml.safe_dump(accelerate_config(problem, config), sort_keys=False)
        return Launch({}, [*argv, "run_clm.py", *args.words], {CONFIG_FILE: text}, args.notes)


def _refuse(config: Config) -> None:
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(config, axis) > 1:
            raise NotExpressibleError(f"{axis}={getattr(config, axis)}: Accelerate plans are data parallel alone")
    if config.zero == 1:
        raise NotExpressibleError("zero=1: FSDP2 shards gradients with the optimizer, use zero=0, 2 or 3")
    if config.recompute not in (Recompute.NONE, Recompute.FULL):
        raise NotExpressibleError(f"recompute={config.recompute.text}: Accelerate recomputes whole layers or nothing")


def accelerate_config(problem: Problem, config: Config) -> dict[str, Any]:
    """The configuration file's content."""
    hosts = problem.cluster.hosts
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if config.zero else "MULTI_GPU" if config.dp > 1 else "NO",
        "mixed_precision": problem.workload.precision,
        "num_machines": hosts,
        "num_processes": hosts * problem.cluster.processes_per_host,
        "main_training_function": "main",
    }
    if hosts > 1:
        content |= {"rdzv_backend": "c10d", "same_network": True}
    if config.zero:
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": config.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": config.recompute == Recompute.FULL,
            "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    copies = shard_copies(problem, config)
    if copies > 1:
        mesh = {"dp_replicate": copies, "dp_shard": config.dp // copies, "tp": 1, "cp": 1, "sp": 1}
        content["parallelism_config"] = {f"parallelism_config_{axis}_size": size for axis, size in mesh.items()}
    return content
