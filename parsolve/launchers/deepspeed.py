"""DeepSpeed: the ``deepspeed`` launcher with its JSON file.

Plain ZeRO runs a Hugging Face model under transformers' run_clm.py; so does AutoTP, for dense models with layers that
Megatron-DeepSpeed lacks. Other tensor, pipeline, context or expert parallelism and selective recomputation need
Megatron-DeepSpeed.
Source: deepspeed 0.19, runtime/config.py, runtime/zero/config.py, launcher/runner.py; transformers' TrainingArguments.
"""

from __future__ import annotations

import json
from typing import Any

from parsolve.config import Config
from parsolve.constraints.framework import auto_tp
from parsolve.errors import NotExpressibleError
from parsolve.launchers.base import Arguments, Launch, shard_copies
from parsolve.launchers.hugging_face import add_run_clm
from parsolve.launchers.megatron_deepspeed import add_megatron_deepspeed
from parsolve.problem import Problem
from parsolve.specs import Recompute
from parsolve.splits import balanced

CONFIG_FILE, HOST_FILE, ENVIRONMENT_FILE = "ds_config.json", "hostfile", ".deepspeed_env"
BUCKET_ELEMENTS = 200_000_000
"""Gradients and weights per collective: 0.4 GB in 16 bits, several of which are in flight."""


class DeepSpeedLauncher:
    """``deepspeed … run_clm.py …`` or ``deepspeed … pretrain_gpt.py …`` and a JSON file."""

    name = "deepspeed"
    framework = "deepspeed"

    def launch(self, problem: Problem, config: Config) -> Launch:
        """The command, the JSON file, and on several hosts the host file; see ``Launcher.launch``."""
        _refuse(problem, config)
        args = Arguments("DeepSpeed")
        if is_hugging_face(problem, config):
            script, env = "run_clm.py", dict[str, str]()
            args.add("--deepspeed", CONFIG_FILE)
            add_run_clm(args, problem, config)
            if config.recompute == Recompute.FULL:
                args.add("--gradient_checkpointing")
            if config.tp > 1:
                args.note("AutoTP divides the layers that the model's base_model_tp_plan names")
        else:
            script = "pretrain_gpt.py"
            env = add_megatron_deepspeed(args, problem, config, CONFIG_FILE)
        content = deepspeed_config(problem, config)
        files = {CONFIG_FILE: json.dumps(content, indent=2) + "\n"}
        hosts, processes = problem.cluster.hosts, problem.cluster.processes_per_host
        argv = ["deepspeed"]
        if hosts > 1:
            argv += ["--hostfile", HOST_FILE, "--num_nodes", str(hosts)]
            files[HOST_FILE] = "".join(f"host{i} slots={processes}\n" for i in range(hosts))
            args.note(f"put the names of the {hosts} hosts into {HOST_FILE}; the launcher reaches them by ssh")
            if env:
                files[ENVIRONMENT_FILE] = "".join(f"{name}={value}\n" for name, value in env.items())
        argv += ["--num_gpus", str(processes), script, *args.words]
        return Launch(env, argv, files, args.notes, content, completed=frozenset({HOST_FILE}))


def is_hugging_face(problem: Problem, config: Config) -> bool:
    """Data parallelism alone, which any model can be trained with, or with AutoTP where that divides it."""
    alone = config.pp == config.cp == config.ep == 1 and (config.tp == 1 or auto_tp(problem))
    return alone and config.recompute in (Recompute.NONE, Recompute.FULL)


def _refuse(problem: Problem, config: Config) -> None:
    if problem.workload.precision == "fp8":
        raise NotExpressibleError("fp8 training is not part of DeepSpeed's own configuration: use bf16")
    if config.vpp > 1:
        raise NotExpressibleError(f"vpp={config.vpp}: DeepSpeed's pipeline engine has no virtual stages")
    if config.layers_per_stage != balanced(problem.model.num_layers, config.pp, config.vpp):
        raise NotExpressibleError(
            "these pipeline stages: DeepSpeed makes stages that differ by a layer at most, the fuller ones first"
        )
    if config.cp > 1 and (config.tp > 1 or config.pp > 1):
        raise NotExpressibleError(f"cp={config.cp}: DeepSpeed's sequence parallelism needs tp=1 and pp=1")
    if config.zero >= 2 and config.pp > 1:
        raise NotExpressibleError(f"zero={config.zero}: DeepSpeed's pipeline engine works with ZeRO 0 and 1 only")
    if config.tp > 1 and auto_tp(problem) and (config.zero > 2 or config.sequence_parallel):
        raise NotExpressibleError(
            f"zero={config.zero}, tp={config.tp}: AutoTP needs zero <= 2, no sequence parallelism"
        )
    if problem.model.moe and config.ep > 1 and config.zero >= 3:
        raise NotExpressibleError("ZeRO-3 does not work with DeepSpeed's own MoE layers: use zero <= 2")


def deepspeed_config(problem: Problem, config: Config) -> dict[str, Any]:
    """The JSON file: batch, precision, ZeRO. Sizes are elements."""
    precision = "fp16" if problem.workload.precision == "fp16" else "bf16"
    divided = config.tp > 1 and is_hugging_face(problem, config)
    content: dict[str, Any] = {
        **({} if divided else {"train_batch_size": config.gbs}),  # transformers would multiply by all processes
        "train_micro_batch_size_per_gpu": config.mbs,
        "gradient_accumulation_steps": config.grad_acc,
        precision: {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": _zero(problem, config),
    }
    if divided:
        content["tensor_parallel"] = {"autotp_size": config.tp}
    if problem.workload.optimizer != "adam" and config.zero >= 1:
        content["zero_allow_untested_optimizer"] = True
    if problem.workload.quantizes("gradients"):
        content["communication_data_type"] = "fp16"  # the quantising kernel takes the bits of any 16-bit type for fp16
    if problem.model.moe and config.pp > 1:
        content["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    return content


def _zero(problem: Problem, config: Config) -> dict[str, Any]:
    """One stage's section. Stage-3 sizes follow the hidden size, as transformers' ``auto`` does."""
    section: dict[str, Any] = {"stage": config.zero}
    if config.zero >= 1:
        section |= {"reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
    if config.zero >= 2:
        section |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if config.zero >= 3:
        hidden = problem.model.hidden_size
        del section["allgather_bucket_size"], section["reduce_scatter"]
        section |= {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": 9 * hidden * hidden // 10,
            "stage3_param_persistence_threshold": 10 * hidden,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        if shard_copies(problem, config) > 1:
            section["zero_hpz_partition_size"] = problem.workload.shard_group
        if problem.workload.quantizes("weights"):
            section["zero_quantized_weights"] = True
        if problem.workload.quantizes("gradients"):
            section["zero_quantized_gradients"] = True
    return section
