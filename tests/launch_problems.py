"""Small problems, configurations and plans of all kinds for the launchers' tests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from parsolve import Problem
from parsolve.config import Config
from parsolve.launchers.base import Launch
from parsolve.specs import MLA, Model, MoE, Recompute
from parsolve.splits import balanced, enumerate_splits

BUT_LIGHT = [kind for kind in Recompute if kind != Recompute.LIGHT]


def model(**changes: Any) -> Model:
    shape = {
        "name": "small",
        "num_layers": 16,
        "hidden_size": 1024,
        "ffn_size": 4096,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
    }
    return Model(**{**shape, **changes})


def experts(**changes: Any) -> MoE:
    return MoE(**{"num_experts": 8, "top_k": 2, "ffn_size": 2048, **changes})


LATENT = MLA(q_lora_rank=512, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
GPT = {"gated_mlp": False, "activation": "gelu", "norm": "layer", "norm_bias": True, "position": "learned"}
GPT |= {"max_positions": 8192, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "tied_embeddings": True}


def problem(shape: Model | None = None, cluster: str = "h100-sxm:2x8", **options: Any) -> Problem:
    return Problem(cluster, shape or model(), **{"seq_len": 4096, "gbs": 64, **options})


def config(p: Problem, **changes: Any) -> Config:
    """A configuration that fills the world and the batch."""
    tp, pp, cp = (changes.get(axis, 1) for axis in ("tp", "pp", "cp"))
    vpp, mbs = changes.get("vpp", 1), changes.get("mbs", 1)
    dp = p.cluster.num_gpus // (tp * pp * cp)
    ep, etp = changes.get("ep", 1), changes.get("etp", tp)
    values = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "vpp": vpp,
        "zero": 1,
        "recompute": Recompute.NONE,
        "mbs": mbs,
        "grad_acc": (p.workload.gbs or 0) // (dp * mbs),
        "dp": dp,
        "edp": p.cluster.num_gpus // (ep * etp * pp),
        "layers_per_stage": balanced(p.model.num_layers, pp, vpp),
        "sequence_parallel": tp > 1,
    }
    return Config(**{**values, **changes})


def options(result: Launch) -> dict[str, list[str]]:
    """Each option with its values."""
    found: dict[str, list[str]] = {}
    for word in result.argv:
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            found[word] = []
        elif found:
            found[next(reversed(found))].append(word)
    return found


SHAPES: tuple[dict[str, Any], ...] = (
    {},
    GPT,
    {"qk_norm": "head", "qkv_bias": True, "num_kv_heads": 16},
    {"gated_mlp": False, "activation": "relu2", "position": "none"},
    {"window": 128, "window_layers": (0, 2, 5), "attention_sinks": True},
    {"moe": experts()},
    {"moe": experts(top_k=1, shared_ffn_size=512, shared_gate=True, dense_layers=(0, 3))},
    {
        "mla": LATENT,
        "moe": experts(
            router_score="sigmoid", score_correction_bias=True, num_groups=4, group_top_k=2, dense_layers=(0,)
        ),
    },
    {"qkv_bias": True, "attention_out_bias": True, "moe": experts(expert_bias=True, router_bias=True)},
)


def random_plans(version: str, count: int) -> list[tuple[Problem, Config]]:
    """Plans that fill the grids; not all are legal."""
    rng = random.Random(version)
    plans = []
    for i in range(count):
        shape = model(**SHAPES[i % len(SHAPES)], mtp_layers=int(i % 4 == 3))
        cluster = rng.choice(["h100-sxm:2x8", "h100-sxm:1x8", "b200:2x8", "a100-sxm-80gb:4x8"])
        precision = rng.choice(["bf16", "fp8"]) if cluster[0] in "hb" else "bf16"
        p = problem(shape, cluster, framework_version=version, precision=precision)
        tp, cp, pp, vpp = (rng.choice(sizes) for sizes in ((1, 2, 4), (1, 1, 2), (1, 2), (1, 2)))
        vpp = vpp if pp > 1 else 1
        if tp * cp * pp > p.cluster.num_gpus:
            continue
        ep, etp = (rng.choice([(1, tp), (2, 1)])) if shape.moe else (1, tp)
        light = i % 5 == 0 and (shape.moe is not None or shape.mla is not None)
        plan = config(
            p,
            tp=tp,
            cp=cp,
            pp=pp,
            vpp=vpp,
            ep=ep,
            etp=etp,
            zero=rng.choice([0, 1, 1, 2, 3]) if pp == 1 else rng.choice([0, 1]),
            recompute=(recompute := Recompute.LIGHT if light else rng.choice(BUT_LIGHT)),
            recompute_layers=int(recompute == Recompute.BLOCK),
            layers_per_stage=rng.choice(enumerate_splits(shape.num_layers, [(pp, vpp)], True)).layers,
        )
        if plan.dp * plan.cp == plan.edp == 1:
            plan = replace(plan, zero=0)  # nothing to shard over
        plans.append((p, plan))
    return plans
