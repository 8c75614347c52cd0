"""The shape of a model from Megatron-LM's options, with Megatron-LM's defaults.

Source: megatron/training/arguments.py; megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

import re
from typing import Any

from parsolve.errors import SpecError
from parsolve.megatron_words import Command
from parsolve.specs import MLA, Model, MoE

MODEL_OPTIONS = frozenset(
    {
        *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--group-query-attention"),
        *("--num-query-groups", "--kv-channels", "--max-position-embeddings", "--position-embedding-type"),
        *("--use-rotary-position-embeddings", "--rotary-base", "--rotary-percent", "--normalization", "--swiglu"),
        *("--squared-relu", "--quick-geglu", "--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm"),
        *("--untie-embeddings-and-output-weights", "--vocab-size", "--padded-vocab-size", "--softmax-type"),
        *("--window-size", "--window-attn-skip-freq", "--multi-latent-attention", "--q-lora-rank", "--kv-lora-rank"),
        *("--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--rope-type", "--num-experts"),
        *("--moe-ffn-hidden-size", "--moe-layer-freq", "--moe-router-topk", "--moe-router-dtype"),
        *("--moe-shared-expert-intermediate-size", "--moe-shared-expert-gate", "--moe-router-score-function"),
        *("--moe-router-enable-expert-bias", "--moe-router-num-groups", "--moe-router-group-topk"),
        *("--moe-router-load-balancing-type", "--moe-router-pre-softmax", "--make-vocab-size-divisible-by"),
        *("--mtp-num-layers", "--mtp-loss-scaling-factor", "--norm-epsilon"),
    }
)
GPT2_VOCABULARY = 50257
POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}


def read_model(command: Command, version: tuple[int, ...], notes: list[str]) -> Model:
    """The model on the line.

    Raises
    ------
    SpecError: a needed option is missing, or a value is not understood.
    """
    layers, hidden, heads = (
        command.number(option, 0) for option in ("--num-layers", "--hidden-size", "--num-attention-heads")
    )
    for option, value in (("--num-layers", layers), ("--hidden-size", hidden), ("--num-attention-heads", heads)):
        if value < 1:
            raise SpecError("is needed (or name the MODEL on the command line)", option)
    swiglu, geglu = command.has("--swiglu"), command.has("--quick-geglu")
    bias = not command.has("--disable-bias-linear")
    groups = command.number("--num-query-groups", 1) if command.has("--group-query-attention") else heads
    ffn = command.number("--ffn-hidden-size", int(hidden * 8 / 3 / 64) * 64 if swiglu else 4 * hidden)
    data: dict[str, Any] = {
        "name": "megatron-line",
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_size": ffn,
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": command.number("--kv-channels", hidden // heads),
        "vocab_size": _vocabulary(command, version, notes),
        "gated_mlp": swiglu or geglu,
        "activation": "silu" if swiglu else "relu2" if command.has("--squared-relu") else "gelu",
        "norm": "rms" if command.text("--normalization", "LayerNorm") == "RMSNorm" else "layer",
        "norm_bias": command.text("--normalization", "LayerNorm") == "LayerNorm",
        "qk_norm": "head" if command.has("--qk-layernorm") and not command.has("--multi-latent-attention") else "none",
        "qkv_bias": bias or command.has("--add-qkv-bias"),
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": not command.has("--untie-embeddings-and-output-weights"),
        "mtp_layers": command.number("--mtp-num-layers", 0),
        "attention_sinks": command.text("--softmax-type", "vanilla") == "learnable",
        **_positions(command),
        **_window(command, layers),
    }
    if command.number("--num-experts", 0):
        data["moe"] = _experts(command, layers, ffn, bias)
    if command.has("--multi-latent-attention"):
        data["mla"] = MLA(
            q_lora_rank=command.number("--q-lora-rank", 0) or None,
            kv_lora_rank=command.number("--kv-lora-rank", 32),
            qk_nope_head_dim=command.number("--qk-head-dim", 128),
            qk_rope_head_dim=command.number("--qk-pos-emb-head-dim", 64),
            v_head_dim=command.number("--v-head-dim", 128),
        )
        data |= {"qkv_bias": bias, "num_kv_heads": heads}
    return Model.read(data, "--from-megatron")


def _vocabulary(command: Command, version: tuple[int, ...], notes: list[str]) -> int:
    if command.has("--padded-vocab-size"):
        return command.number("--padded-vocab-size", 0)
    tokenizer = command.text("--tokenizer-type", "GPT2BPETokenizer")
    if command.has("--vocab-size"):
        extra = tokenizer == "NullTokenizer" and version < (0, 18)
        return command.number("--vocab-size", 0) + int(extra)
    if tokenizer == "GPT2BPETokenizer":
        notes.append(f"the vocabulary is taken to be GPT-2's {GPT2_VOCABULARY}")
        return GPT2_VOCABULARY
    raise SpecError(
        f"the vocabulary comes from the tokenizer files ({tokenizer}): add --vocab-size to the line, or name the MODEL",
        "--vocab-size",
    )


def _positions(command: Command) -> dict[str, Any]:
    kind = command.text("--position-embedding-type", "learned_absolute")
    if command.has("--use-rotary-position-embeddings"):
        kind = "rope"
    if kind == "yarn":
        kind = "rope"
    if kind not in POSITIONS:
        raise SpecError(f"{kind!r} positions are not known to parsolve", "--position-embedding-type")
    data: dict[str, Any] = {"position": POSITIONS[kind]}
    if kind == "learned_absolute":
        table = command.number("--max-position-embeddings", 0)
        if not table:
            raise SpecError("is needed", "--max-position-embeddings")
        return {**data, "max_positions": table}
    data["rope_base"] = float(command.text("--rotary-base", "10000") or 10000)
    data["rope_fraction"] = float(command.text("--rotary-percent", "1.0") or 1.0)
    return data


def _window(command: Command, layers: int) -> dict[str, Any]:
    text = command.text("--window-size")
    if text is None:
        return {}
    found = re.fullmatch(r"\(?(\d{1,9}),\s*0\)?", text)
    if not found:
        raise SpecError(f"{text!r} is not a window to the left, such as 127,0", "--window-size")
    flags = layer_flags(command.text("--window-attn-skip-freq", "") or "", layers, "--window-attn-skip-freq")
    chosen = tuple(i for i in range(layers) if flags is None or flags[i])
    return {"window": int(found[1]) + 1, "window_layers": chosen} if chosen else {}


def _experts(command: Command, layers: int, ffn: int, bias: bool) -> MoE:
    flags = layer_flags(command.text("--moe-layer-freq", "") or "", layers, "--moe-layer-freq", every=True)
    dense = () if flags is None else tuple(i for i in range(layers) if not flags[i])
    groups = command.number("--moe-router-num-groups", 0) or None
    return MoE(
        num_experts=command.number("--num-experts", 0),
        top_k=command.number("--moe-router-topk", 2),
        ffn_size=command.number("--moe-ffn-hidden-size", ffn),
        shared_ffn_size=command.number("--moe-shared-expert-intermediate-size", 0),
        shared_gate=command.has("--moe-shared-expert-gate"),
        dense_layers=dense,
        expert_bias=bias,
        router_bias=bias,
        router_score="sigmoid" if command.text("--moe-router-score-function") == "sigmoid" else "softmax",
        score_correction_bias=command.has("--moe-router-enable-expert-bias"),
        num_groups=groups,
        group_top_k=command.number("--moe-router-group-topk", 1) if groups else None,
    )


def layer_flags(text: str, layers: int, where: str, every: bool = False) -> list[bool] | None:
    """A per-layer pattern: ``N`` or a list expression of ones and zeros, ``([0]*3+[1]*58)``; None: all layers.

    ``N`` means each N-th layer from the first (``every``), or all but each N-th.
    """
    if not text:
        return None
    if text.isdecimal() and int(text):
        return [(i % int(text) == 0) if every else ((i + 1) % int(text) != 0) for i in range(layers)]
    flags = _expression(text.replace(" ", ""), where)
    if len(flags) != layers:
        raise SpecError(f"{text!r} lists {len(flags)} layers, the model has {layers}", where)
    return flags


def _expression(text: str, where: str) -> list[bool]:
    """Lists, sums, products with a number, parentheses; nothing is evaluated as Python."""
    flags: list[bool] = []
    while text:
        found = re.match(r"\[([01](?:,[01])*)?\]", text)
        if found:
            part = [c == "1" for c in (found[1] or "").split(",") if c]
            text = text[found.end() :]
        elif text[0] == "(":
            end = _closing(text, where)
            part, text = _expression(text[1:end], where), text[end + 1 :]
        else:
            raise SpecError(f"cannot read the pattern at {text[:20]!r}", where)
        times = re.match(r"\*(\d{1,5})", text)
        if times:
            part, text = part * int(times[1]), text[times.end() :]
        flags += part
        if len(flags) > 10**5:
            raise SpecError("lists too many layers", where)
        if text and text[0] != "+":
            raise SpecError(f"cannot read the pattern at {text[:20]!r}", where)
        text = text[1:]
    return flags


def _closing(text: str, where: str) -> int:
    depth = 0
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return i
    raise SpecError("a parenthesis does not close", where)
