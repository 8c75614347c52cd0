"""Megatron-LM: a complete torchrun line for pretrain_gpt.py on synthetic data.

Source: megatron/training/arguments.py and megatron/core of the releases 0.12 to 0.20.
"""

from __future__ import annotations

from parsolve.config import Config
from parsolve.errors import NotExpressibleError
from parsolve.launchers.base import Arguments, Launch, add_megatron_schedule, shard_copies, torchrun
from parsolve.launchers.megatron_model import add_model, windowed
from parsolve.launchers.megatron_options import SINCE
from parsolve.problem import Problem
from parsolve.specs import Model, Recompute
from parsolve.splits import classify, model_order

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
FSDP_STRATEGY = {2: "optim_grads", 3: "optim_grads_params"}


class MegatronLauncher:
    """``torchrun … pretrain_gpt.py …``."""

    name = "megatron"
    framework = "megatron"

    def launch(self, problem: Problem, config: Config) -> Launch:
        """The torchrun line of a configuration; see ``Launcher.launch``."""
        args = Arguments("Megatron-LM", SINCE, problem.version)
        add_arguments(args, problem, config)
        argv = [*torchrun(args, problem), "pretrain_gpt.py", *args.words]
        return Launch(environment(problem, config), argv, notes=args.notes)


def add_arguments(args: Arguments, problem: Problem, config: Config) -> None:
    """Every argument of pretrain_gpt.py.

    Raises
    ------
    NotExpressibleError: Megatron-LM, or its version, has no words for the model or the plan.
    """
    add_model(args, problem, config.tp)
    _add_precision(args, problem)
    _add_grid(args, problem, config)
    _add_pipeline_cut(args, problem, config)
    _add_data_parallel(args, problem, config)
    _add_recompute(args, problem, config)
    _add_training(args, problem, config)


def environment(problem: Problem, config: Config) -> dict[str, str]:
    """Tensor and context parallelism before Blackwell want one hardware queue, FSDP wants several.

    Source: arguments.py, "Using tensor model parallelism or context parallelism require …".
    """
    if config.zero >= 2:
        return {CONNECTIONS: "8"}
    if problem.cluster.gpu.compute_capability < 10 and (config.tp > 1 or config.cp > 1):
        return {CONNECTIONS: "1"}
    return {}


def _add_precision(args: Arguments, problem: Problem) -> None:
    """16-bit weights; fp8 with current scaling, MX blocks from Blackwell on.

    Source: Transformer Engine, recipes Float8CurrentScaling and MXFP8BlockScaling.
    """
    precision = problem.workload.precision
    args.add("--fp16" if precision == "fp16" else "--bf16")
    if precision == "fp8":
        args.add("--fp8-format", "hybrid")
        args.add("--fp8-recipe", "mxfp8" if problem.cluster.gpu.compute_capability >= 10 else "tensorwise")


def _add_grid(args: Arguments, problem: Problem, config: Config) -> None:
    model = problem.model
    args.add("--tensor-model-parallel-size", config.tp)
    if config.sequence_parallel and config.tp > 1:
        args.add("--sequence-parallel")
    elif model.moe and config.tp > 1:
        raise NotExpressibleError(f"tp={config.tp} with experts needs sequence parallelism in Megatron-LM")
    args.add("--pipeline-model-parallel-size", config.pp)
    if config.cp > 1:
        args.add("--context-parallel-size", config.cp)
        args.add("--cp-comm-type", _context_exchange(args, problem, config))
    if model.moe:
        args.add("--expert-model-parallel-size", config.ep)
        args.add("--expert-tensor-parallel-size", config.etp)


def _context_exchange(args: Arguments, problem: Problem, config: Config) -> str:
    """How context-parallel ranks exchange keys and values.

    Point to point, but sliding windows need all-to-all or all-gather and attention sinks all-to-all; all-to-all
    exchanges whole heads. Source: Transformer Engine, attention/…/context_parallel.py.
    """
    model = problem.model
    if problem.cluster.gpu.compute_capability < 8:
        raise NotExpressibleError(
            f"context parallelism needs Transformer Engine's fused attention, which {problem.cluster.gpu.name} lacks"
        )
    if not windowed(problem) and not model.attention_sinks:
        return "p2p"
    heads, kv_heads = model.num_heads // config.tp, max(1, model.num_kv_heads // config.tp)
    if heads % config.cp == 0 and kv_heads % config.cp == 0:
        kind = "a2a"
    elif model.attention_sinks:
        raise NotExpressibleError(
            f"cp={config.cp} with attention sinks exchanges whole heads, and does not divide the {heads} query and "
            f"{kv_heads} key/value heads of a rank"
        )
    else:
        kind = "all_gather"
    args.note(f"context parallelism by {kind}, as this attention needs; the estimate counts point to point")
    return kind


def _add_pipeline_cut(args: Arguments, problem: Problem, config: Config) -> None:
    """The flags of each kind of cut. Source: transformer_config.py, pipeline_parallel_layer_layout.py."""
    layers = config.layers_per_stage
    kind = classify(layers, problem.model.num_layers)
    if kind == "first-last" and not all(map(sum, layers)):
        kind = "layout"  # a rank without layers has no other word
    if kind == "layout" or config.mtp_apart:
        args.add(
            "--pipeline-model-parallel-layout",
            layout_text(model_order(layers), problem.mtp_layers, config.mtp_apart),
            why="this layer cut",
        )
        return
    if kind in ("embedding", "embedding+loss"):
        args.add("--account-for-embedding-in-pipeline-split")
    if kind in ("loss", "embedding+loss"):
        args.add("--account-for-loss-in-pipeline-split")
    if kind == "first-last":
        args.add("--decoder-first-pipeline-num-layers", sum(layers[0]))
        if config.pp > 2:  # of two ranks the other is what is left: with both, Megatron-LM divides by no middle stages
            args.add("--decoder-last-pipeline-num-layers", sum(layers[-1]))
    if config.vpp > 1 and kind == "even":
        args.add("--num-layers-per-virtual-pipeline-stage", layers[0][0])
    elif config.vpp > 1:
        args.add("--num-virtual-stages-per-pipeline-rank", config.vpp)


def layout_text(counts: list[int], modules: int = 0, apart: bool = False) -> str:
    """Layers per chunk in model order in Megatron's layout language: ``Et*3|(t*4|)*14t*2L``.

    ``modules``: of multi-token prediction, before the output layer: ``t*2mL``, or ``apart`` on the stage before its:
    ``t*2m|L``.
    """
    stages = [_repeated("t", n) for n in counts]
    stages[0] = "E" + stages[0]
    stages[-2 if apart else -1] += _repeated("m", modules)
    stages[-1] += "L"
    text, start = "", 0
    while start < len(stages):
        end = start + 1
        while end < len(stages) and stages[end] == stages[start]:
            end += 1
        if end - start > 1 and end < len(stages):
            text += f"({stages[start]}|)*{end - start}"
        else:
            text += "|".join(stages[start:end]) + ("|" if end < len(stages) else "")
        start = end
    return text


def _repeated(letter: str, times: int) -> str:
    return f"{letter}*{times}" if times > 1 else letter * times


def _add_data_parallel(args: Arguments, problem: Problem, config: Config) -> None:
    """ZeRO 1 is the distributed optimizer, 2 and 3 are Megatron-FSDP.

    Source: arguments.py; distrib_optimizer.py (Adam only); core/distributed/fsdp (recommended settings).
    """
    optimizer = problem.workload.optimizer
    if optimizer != "adam":
        args.add("--optimizer", optimizer)
        if config.zero >= 1:
            raise NotExpressibleError(f"Megatron-LM's distributed optimizer has no {optimizer}: use zero=0 or adam")
    if config.zero >= 2:
        args.add("--use-megatron-fsdp", why=f"zero={config.zero}")
        args.add("--data-parallel-sharding-strategy", FSDP_STRATEGY[config.zero])
        args.add("--no-gradient-accumulation-fusion")
        args.add("--ckpt-format", "fsdp_dtensor")
    if config.zero >= 3:
        args.add("--init-model-with-meta-device")
    if config.zero >= 1:
        args.add("--use-distributed-optimizer")
        args.add("--overlap-param-gather")
    copies = shard_copies(problem, config)
    if copies > 1:
        if config.zero >= 2:
            raise NotExpressibleError(f"zero={config.zero} over shard groups: Megatron-LM's plans have zero=1 there")
        args.add("--num-distributed-optimizer-instances", copies)
    if config.zero >= 1 or config.dp * config.cp > 1 or config.edp > 1:
        args.add("--overlap-grad-reduce")


def light_modules(model: Model) -> list[str]:
    """Megatron-Core's names of what light recomputation repeats; none without experts and without latent attention."""
    found = [*(["moe_act"] if model.moe else []), *(["mla_up_proj"] if model.mla else [])]
    return ["layernorm", *found] if found else []


def _add_recompute(args: Arguments, problem: Problem, config: Config) -> None:
    if config.recompute in (Recompute.FULL, Recompute.BLOCK):
        partly = config.recompute == Recompute.BLOCK
        args.add("--recompute-granularity", "full")
        args.add("--recompute-method", "block" if partly else "uniform")
        args.add("--recompute-num-layers", config.recompute_layers if partly else 1)
    elif config.recompute == Recompute.SELECTIVE:
        args.add("--recompute-granularity", "selective")
        args.add("--recompute-modules", "core_attn")
    elif config.recompute == Recompute.LIGHT:
        modules = light_modules(problem.model)
        if not modules:
            raise NotExpressibleError("recompute=light: its norms are one kernel with the products behind them")
        args.add("--recompute-granularity", "selective")
        args.add("--recompute-modules", *modules)


def _add_training(args: Arguments, problem: Problem, config: Config) -> None:
    add_megatron_schedule(args, problem, config)
    args.add("--mock-data")
    args.add("--no-create-attention-mask-in-dataloader")
