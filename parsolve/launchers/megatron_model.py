"""How Megatron-LM is told the shape of a model, and what it cannot be told.

A model whose layers Megatron-LM does not have is refused. Where only vectors (biases, norm weights) or an elementwise
function differ, the nearest model is trained and a note says so.
Source: megatron/training/arguments.py, argument_utils.py; megatron/core/transformer.
"""

from __future__ import annotations

from collections.abc import Sequence

from parsolve.constraints.framework import GROUPED_PRODUCTS_SINCE, megatron_lm_gap
from parsolve.errors import NotExpressibleError
from parsolve.launchers.base import Arguments
from parsolve.problem import Problem
from parsolve.specs import MLA, Model, MoE

EXACT_NULL_VOCABULARY = (0, 18)
"""Up to 0.17 NullTokenizer adds one token to --vocab-size."""


MTP_LOSS_SCALE = 0.1
"""Weight of the mean loss of the prediction modules: Megatron-LM's default."""


def windowed(problem: Problem) -> bool:
    """Some layer attends to a window shorter than the sequence."""
    window = problem.model.window
    return window is not None and window < problem.workload.seq_len


def add_model(args: Arguments, problem: Problem, tp: int) -> None:
    """Every option that describes the model; ``tp`` are its tensor-parallel ranks.

    Raises
    ------
    NotExpressibleError: Megatron-LM has no such layers.
    """
    model = problem.model
    _refuse(model)
    args.add("--num-layers", model.num_layers)
    args.add("--hidden-size", model.hidden_size)
    args.add("--ffn-hidden-size", _ffn_size(model, tp))
    args.add("--num-attention-heads", model.num_heads)
    if model.mla:
        _add_latent_attention(args, model, model.mla)
    else:
        _add_attention(args, model)
    if windowed(problem):
        _add_window(args, problem)
    if model.attention_sinks:
        args.add("--softmax-type", "learnable", why="attention with sinks")
    _add_positions(args, problem)
    _add_norms(args, model)
    biases = _add_biases(args, model)
    _add_activation(args, model, biases)
    args.add("--attention-dropout", "0.0")
    args.add("--hidden-dropout", "0.0")
    if not model.tied_embeddings:
        args.add("--untie-embeddings-and-output-weights")
    if model.head_bias:
        args.note("the output layer's bias is left out: Megatron-LM has none")
    if problem.mtp_layers:
        args.add("--mtp-num-layers", problem.mtp_layers)
        args.add("--mtp-loss-scaling-factor", MTP_LOSS_SCALE)
    elif model.mtp_layers:
        args.note("multi-token-prediction layers are left out, as in the estimate")
    if model.moe:
        _add_experts(args, problem, model.moe)
    args.add("--tokenizer-type", "NullTokenizer")
    args.add("--vocab-size", model.vocab_size - (0 if args.version >= EXACT_NULL_VOCABULARY else 1))


def _refuse(model: Model) -> None:
    gap = megatron_lm_gap(model)
    if gap:
        raise NotExpressibleError(f"{model.name}: Megatron-LM has no {gap}")


def _ffn_size(model: Model, tp: int) -> int:
    """Width of the dense MLPs; where there are none, any width that divides will do, the experts' first."""
    if model.num_dense_layers or model.moe is None:
        return model.ffn_size
    return model.moe.ffn_size if model.moe.ffn_size % tp == 0 else 4 * model.hidden_size


def _add_attention(args: Arguments, model: Model) -> None:
    args.add("--kv-channels", model.head_dim)
    if model.num_kv_heads != model.num_heads:
        args.add("--group-query-attention")
        args.add("--num-query-groups", model.num_kv_heads)
    if model.qk_norm != "none":
        args.add("--qk-layernorm")
    if model.qk_norm == "full":
        args.note("queries and keys are normalised per head: Megatron-LM has no norm over all heads")


def _add_latent_attention(args: Arguments, model: Model, mla: MLA) -> None:
    args.add("--multi-latent-attention")
    if mla.q_lora_rank:
        args.add("--q-lora-rank", mla.q_lora_rank)
    args.add("--kv-lora-rank", mla.kv_lora_rank)
    args.add("--qk-head-dim", mla.qk_nope_head_dim)
    args.add("--qk-pos-emb-head-dim", mla.qk_rope_head_dim)
    args.add("--v-head-dim", mla.v_head_dim)
    args.add("--qk-layernorm")
    if model.hidden_size % model.num_heads:
        args.add("--kv-channels", mla.v_head_dim)  # unused, but its default must be a whole number


def _add_window(args: Arguments, problem: Problem) -> None:
    model = problem.model
    args.add("--window-size", f"{(model.window or 1) - 1},0", why="a sliding window")
    layers = set(model.window_layers)
    if len(layers) < model.num_layers:
        args.add("--window-attn-skip-freq", pattern([int(i in layers) for i in range(model.num_layers)]))


def _add_positions(args: Arguments, problem: Problem) -> None:
    model = problem.model
    args.add("--seq-length", problem.workload.seq_len)
    table = model.max_positions if model.position == "learned" else None
    args.add("--max-position-embeddings", table or problem.workload.seq_len)
    args.add("--position-embedding-type", {"learned": "learned_absolute"}.get(model.position, model.position))
    if model.position != "rope":
        return
    if model.rope_base != int(model.rope_base):
        args.note(f"the rotary base {model.rope_base} is rounded: --rotary-base takes whole numbers")
    args.add("--rotary-base", round(model.rope_base))
    if model.rope_fraction != 1:
        args.add("--rotary-percent", model.rope_fraction)
    if model.mla:
        if args.has("--rope-type"):
            args.add("--rope-type", "rope")
        args.add("--no-rope-fusion")


def _add_norms(args: Arguments, model: Model) -> None:
    if model.norm == "rms":
        args.add("--normalization", "RMSNorm")
    else:
        args.add("--normalization", "LayerNorm")
        if not model.norm_bias:
            args.note("layer norms get biases: Megatron-LM has none without")
    if not model.norms_per_layer or not model.final_norm:
        args.note("every norm gets weights, and the last layer is followed by one, as in all of Megatron-LM")


def _add_biases(args: Arguments, model: Model) -> bool:
    """All linear biases, or none but those of query, key and value; returns whether all are on."""
    moe = model.moe
    wanted = {"query/key/value": model.qkv_bias, "attention output": model.attention_out_bias}
    if model.num_dense_layers:
        wanted["MLP"] = model.mlp_bias
    if moe:
        wanted |= {"expert": moe.expert_bias, "router": moe.router_bias}
    if all(wanted.values()) and not (moe and moe.shared_ffn_size):
        if moe:
            args.add("--no-bias-dropout-fusion")
        return True
    args.add("--disable-bias-linear")
    if wanted.pop("query/key/value"):
        if model.mla:
            wanted["latent projection"] = True
        else:
            args.add("--add-qkv-bias")
    missing = [name for name, there in wanted.items() if there]
    if missing:
        args.note(f"{' and '.join(missing)} biases are left out: Megatron-LM has all linear biases or none but qkv's")
    return False


def _add_activation(args: Arguments, model: Model, biases: bool) -> None:
    if model.gated_mlp and model.activation == "silu":
        args.add("--swiglu")
        return
    if model.gated_mlp:
        args.add("--quick-geglu", why="a gated GELU")
        args.note("GELU by its sigmoid approximation (--quick-geglu)")
    elif model.activation == "relu2":
        args.add("--squared-relu")
    elif model.activation != "gelu":
        args.note(f"GELU in place of {model.activation}: Megatron-LM's MLP without a gate has no {model.activation}")
    if model.gated_mlp or model.activation == "relu2" or not biases or model.moe:
        args.add("--no-bias-gelu-fusion")  # the fused kernel is the plain GELU with a bias


def _add_experts(args: Arguments, problem: Problem, moe: MoE) -> None:
    args.add("--num-experts", moe.num_experts)
    args.add("--moe-ffn-hidden-size", moe.ffn_size)
    if moe.dense_layers:
        args.add("--moe-layer-freq", pattern([int(is_moe) for is_moe in problem.model.layer_is_moe]))
    args.add("--moe-router-topk", moe.top_k)
    args.add("--moe-router-dtype", "fp32")
    if moe.router_score == "sigmoid":
        args.add("--moe-router-score-function", "sigmoid")
    elif moe.top_k == 1:
        args.add("--moe-router-pre-softmax")
    if moe.num_groups and moe.group_top_k:
        args.add("--moe-router-num-groups", moe.num_groups)
        args.add("--moe-router-group-topk", moe.group_top_k)
    if moe.score_correction_bias and moe.router_score == "sigmoid":
        args.add("--moe-router-enable-expert-bias")
        args.add("--moe-router-load-balancing-type", "seq_aux_loss")
        args.add("--moe-aux-loss-coeff", "1e-4")
    else:
        args.add("--moe-router-load-balancing-type", "aux_loss")
        args.add("--moe-aux-loss-coeff", "1e-2")
    if moe.score_correction_bias and moe.router_score != "sigmoid":
        args.note("the balancing bias is left out: Megatron-LM has it with sigmoid scores only")
    if moe.shared_ffn_size:
        args.add("--moe-shared-expert-intermediate-size", moe.shared_ffn_size)
        if moe.shared_gate:
            args.add("--moe-shared-expert-gate", why="a gate on the shared experts")
    args.add("--moe-token-dispatcher-type", "alltoall")
    if problem.cluster.gpu.compute_capability >= GROUPED_PRODUCTS_SINCE:
        args.add("--moe-grouped-gemm")
    else:
        args.note(f"experts run one after the other: grouped products need a newer GPU than {problem.cluster.gpu.name}")


def pattern(flags: Sequence[int]) -> str:
    """A per-layer list as the Python expression that Megatron-LM reads: ``([0]*3+[1]*58)``, ``([1]+[0])*18``."""
    count = len(flags)
    period = next(n for n in range(1, count + 1) if count % n == 0 and list(flags[:n]) * (count // n) == list(flags))
    runs: list[list[int]] = []
    for flag in flags[:period]:
        if runs and runs[-1][0] == flag:
            runs[-1][1] += 1
        else:
            runs.append([flag, 1])
    inner = "+".join(f"[{flag}]*{times}" if times > 1 else f"[{flag}]" for flag, times in runs)
    return f"({inner})*{count // period}" if period < count else f"({inner})"
