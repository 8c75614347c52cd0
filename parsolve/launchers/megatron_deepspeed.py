"""Megatron-DeepSpeed's own spelling of a model and a plan.

Source: deepspeedai/Megatron-DeepSpeed 4efb479d, megatron/arguments.py, initialize.py, model/gpt_model.py.
"""

from __future__ import annotations

from parsolve.config import Config
from parsolve.constraints.framework import megatron_deepspeed_gap
from parsolve.errors import NotExpressibleError
from parsolve.launchers.base import Arguments, ShellWord, add_megatron_schedule
from parsolve.problem import Problem
from parsolve.specs import Model, Recompute

DATA = ShellWord('"${DATA_PATH:-my-corpus_text_document}"')
NEWEST_DEEPSPEED = "0.19.6"
"""Its training loop imports deepspeed.compression, which 0.19.7 no longer has."""


def add_megatron_deepspeed(args: Arguments, problem: Problem, config: Config, config_file: str) -> dict[str, str]:
    """Every argument of pretrain_gpt.py; returns the environment it needs.

    Raises
    ------
    NotExpressibleError: Megatron-DeepSpeed has no such layers, or cannot run the plan.
    """
    _refuse(problem, config)
    _add_model(args, problem)
    _add_grid(args, problem, config)
    if config.recompute == Recompute.LIGHT:
        raise NotExpressibleError("recompute=light: Megatron-DeepSpeed recomputes core attention or whole layers")
    if config.recompute != Recompute.NONE:
        args.add("--deepspeed-activation-checkpointing")
        args.add("--recompute-granularity", config.recompute.text)
    if config.recompute == Recompute.FULL:
        args.add("--recompute-method", "uniform")
        args.add("--recompute-num-layers", 1)
    _add_training(args, problem, config)
    args.add("--deepspeed")
    args.add("--deepspeed_config", config_file)
    args.add("--zero-stage", config.zero)
    args.note(f"Megatron-DeepSpeed needs deepspeed<={NEWEST_DEEPSPEED}: pip install 'deepspeed<={NEWEST_DEEPSPEED}'")
    args.note("set DATA_PATH to a tokenised corpus, without .bin or .idx: Megatron-DeepSpeed has no synthetic data")
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if config.sequence_parallel and config.tp > 1 else {}


def _refuse(problem: Problem, config: Config) -> None:
    model, moe = problem.model, problem.model.moe
    gap = megatron_deepspeed_gap(problem)
    if gap:
        raise NotExpressibleError(f"{model.name}: Megatron-DeepSpeed has no {gap}")
    if moe and config.etp != config.tp:
        raise NotExpressibleError(f"etp={config.etp}: Megatron-DeepSpeed divides experts over the tp={config.tp} ranks")
    if moe and config.dp % config.ep:
        raise NotExpressibleError(f"ep={config.ep}: DeepSpeed's experts live inside the dp={config.dp} ranks")
    if model.num_kv_heads % config.tp:
        raise NotExpressibleError(f"tp={config.tp} does not divide the {model.num_kv_heads} key/value heads")


def _add_model(args: Arguments, problem: Problem) -> None:
    model, moe = problem.model, problem.model.moe
    args.add("--num-layers", model.num_layers)
    args.add("--hidden-size", model.hidden_size)
    args.add("--ffn-hidden-size", moe.ffn_size if moe else model.ffn_size)
    args.add("--num-attention-heads", model.num_heads)
    args.add("--num-key-value-heads", model.num_kv_heads)
    args.add("--kv-channels", model.head_dim)
    args.add("--seq-length", problem.workload.seq_len)
    table = model.max_positions if model.position == "learned" else None
    args.add("--max-position-embeddings", table or problem.workload.seq_len)
    if model.position == "rope":
        args.add("--use-rotary-position-embeddings")
        args.add("--rotary-position-embeddings-theta", round(model.rope_base))
        if model.rope_fraction != 1:
            args.add("--rotary-percent", model.rope_fraction)
    elif model.position == "none":
        args.add("--no-position-embedding")
    args.add("--normalization", "rmsnorm" if model.norm == "rms" else "layernorm")
    _add_biases(args, model)
    if model.gated_mlp:
        args.add("--swiglu")
    elif model.activation == "relu2":
        args.add("--squared-relu")
    elif model.activation != "gelu":
        args.note(f"GELU in place of {model.activation}: Megatron-DeepSpeed's MLP without a gate has no other")
    args.add("--attention-dropout", "0.0")
    args.add("--hidden-dropout", "0.0")
    args.add("--no-query-key-layer-scaling")
    if problem.cluster.gpu.compute_capability >= 8:
        args.add("--use-flash-attn-v2")
    if not model.tied_embeddings:
        args.add("--untie-embeddings-and-output-weights")
    if moe:
        args.add("--num-experts", moe.num_experts)
        args.add("--expert-interval", 1)
        args.add("--topk", moe.top_k)
        args.add("--create-moe-param-group")
    args.add("--tokenizer-type", "NullTokenizer")
    args.add("--vocab-size", model.vocab_size - 1)  # NullTokenizer adds one


def _add_biases(args: Arguments, model: Model) -> None:
    biases = [model.qkv_bias, model.attention_out_bias]
    biases.append(model.moe.expert_bias if model.moe else model.mlp_bias)
    if all(biases):
        return
    args.add("--disable-bias-linear")
    if any(biases):
        args.note("linear biases are left out: Megatron-DeepSpeed has all of them or none")


def _add_grid(args: Arguments, problem: Problem, config: Config) -> None:
    args.add("--tensor-model-parallel-size", config.tp)
    if config.sequence_parallel and config.tp > 1:
        args.add("--sequence-parallel")
    args.add("--pipeline-model-parallel-size", config.pp)
    if config.pp == 1:
        args.add("--no-pipeline-parallel")
    if config.cp > 1:
        args.add("--ds-sequence-parallel-size", config.cp)
    if problem.model.moe:
        args.add("--moe-expert-parallel-size", config.ep)
        if config.tp > 1:
            args.add("--enable-expert-tensor-parallelism")


def _add_training(args: Arguments, problem: Problem, config: Config) -> None:
    workload = problem.workload
    args.add("--fp16" if workload.precision == "fp16" else "--bf16")
    args.add("--optimizer", workload.optimizer)
    add_megatron_schedule(args, problem, config)
    args.add("--data-path", DATA)
    args.add("--data-impl", "mmap")
    args.add("--split", "949,50,1")
