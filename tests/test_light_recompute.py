"""Light recomputation: what it gives back and costs by hand, where there is any, and its words."""

from __future__ import annotations

from typing import Any

import pytest
from launch_problems import LATENT, config, experts, model, options, problem

import parsolve
from parsolve import NotExpressibleError, Problem
from parsolve.constraints import memory
from parsolve.from_megatron import read_megatron
from parsolve.launchers import launch
from parsolve.objectives import compute, context_comm, tensor_comm
from parsolve.objectives.roofline import matmul_time, streaming_time
from parsolve.optimizer.domains import build
from parsolve.problem import Instance
from parsolve.specs import Recompute
from parsolve.splits import Splits

HIDDEN, TOKENS, HEADS = 1024, 4096, 16
POINT = {"tp": 1, "cp": 1, "ep": 1, "etp": 1, "mbs": 1}
LATENT_EXPERTS = {"mla": LATENT, "moe": experts(dense_layers=(0,))}


def instance(**shape: Any) -> Instance:
    return problem(model(**shape)).instance(64, Splits((), ()))


def gap(term: Any, p: Instance, **axes: Any) -> float:
    """What light recomputation adds to a term."""
    at = {**POINT, **axes}
    return float(term(p, {**at, "recompute": Recompute.LIGHT}) - term(p, {**at, "recompute": Recompute.NONE}))


def test_what_latent_attention_gives_back() -> None:
    """Its norm's output and queries, keys and values of all heads, 2 bytes each; rebuilt one layer at a time."""
    p = instance(mla=LATENT)
    held = TOKENS * (2 * HIDDEN + 2 * HEADS * (2 * (64 + 32) + 64)) * p.profile.activation_memory
    assert gap(memory.dense_layer_activations, p) == pytest.approx(-held)
    assert gap(memory.dense_working_set, p) == pytest.approx(held)


def test_what_experts_give_back() -> None:
    """Their norm's output, and of every copy of a token the activation; a dense layer nothing."""
    p = instance(moe=experts(dense_layers=(0,)))
    copies = TOKENS * 2 * p.profile.expert_imbalance
    held = (TOKENS * 2 * HIDDEN + copies * 2 * 2048) * p.profile.activation_memory
    assert gap(memory.moe_layer_activations, p) == pytest.approx(-held)
    assert gap(memory.moe_working_set, p) == pytest.approx(held)
    assert gap(memory.dense_layer_activations, p) == 0


def test_both_add_up_and_are_divided() -> None:
    p = instance(**LATENT_EXPERTS)
    copies = TOKENS / 2 * 2 * p.profile.expert_imbalance
    heads = 2 * HEADS / 2 * (2 * (64 + 32) + 64)
    held = TOKENS * (2 * 2 * HIDDEN / 2 + heads) + copies * 2 * 2048
    assert gap(memory.moe_layer_activations, p, tp=2) == pytest.approx(-held * p.profile.activation_memory)


def test_what_it_costs() -> None:
    """Products up to the heads, two norms, the rotary embedding, the activation; no attention and no traffic."""
    p = instance(**LATENT_EXPERTS)
    up = matmul_time(p, TOKENS, HEADS * 96, 512) + matmul_time(p, TOKENS, HEADS * 128, 256)
    assert gap(compute.attention_projections, p) == pytest.approx(float(up))
    rotary = 4 * (HEADS + 4) * 96 * p.profile.elementwise_traffic
    assert gap(compute.attention_elementwise, p) == pytest.approx(
        float(streaming_time(p, TOKENS * (4 * HIDDEN + rotary), 2))
    )
    assert gap(compute.shared_experts, p) == pytest.approx(float(streaming_time(p, TOKENS * 4 * HIDDEN)))
    rows = TOKENS * 2 * p.profile.expert_imbalance
    activation = streaming_time(p, 2 * rows * 2048 * 3 * p.profile.elementwise_traffic)
    assert gap(compute.routed_experts, p) == pytest.approx(float(activation))
    for term in (compute.attention_core, compute.dense_mlp, tensor_comm.attention_tensor_comm):
        assert gap(term, p) == 0
    assert gap(context_comm.context_comm, p, cp=2) == 0


V100 = {"cluster": "v100-sxm-32gb:2x8", "precision": "fp16"}


@pytest.mark.parametrize(
    ("shape", "options", "offered"),
    [
        ({}, {}, False),
        ({"mla": LATENT}, {}, True),
        ({"mla": LATENT}, V100, True),
        ({"moe": experts()}, V100, False),
        ({"moe": experts()}, {"framework": "nemo"}, True),
        ({"moe": experts()}, {"framework": "generic"}, False),
        ({"moe": experts()}, {"framework": "torchtitan"}, False),
    ],
)
def test_where_there_is_any(shape: dict[str, Any], options: dict[str, Any], offered: bool) -> None:
    p = problem(model(**shape), **options)
    assert (int(Recompute.LIGHT) in build(p, 64)[1]["recompute"]) is offered
    broken = {v.rule for v in parsolve.check(p, "recompute=light,etp=1")}
    assert ("light_modules" not in broken) is offered


MODULES = [
    ({"mla": LATENT}, ["layernorm", "mla_up_proj"]),
    ({"moe": experts()}, ["layernorm", "moe_act"]),
    (LATENT_EXPERTS, ["layernorm", "moe_act", "mla_up_proj"]),
]


@pytest.mark.parametrize(("shape", "modules"), MODULES, ids=["latent", "experts", "both"])
def test_words(shape: dict[str, Any], modules: list[str]) -> None:
    p = problem(model(**shape))
    made = launch("megatron", p, config(p, recompute=Recompute.LIGHT))
    line = options(made)
    assert line["--recompute-granularity"] == ["selective"] and line["--recompute-modules"] == modules
    today = read_megatron(made.line(), p.cluster, None, p.version)
    assert today.config["recompute"] == "light" and not today.notes
    bridge = problem(model(**shape), framework="nemo")
    words = launch("nemo", bridge, config(bridge, recompute=Recompute.LIGHT)).argv
    assert f"model.recompute_modules=[{','.join(modules)}]" in words


@pytest.mark.parametrize(
    ("modules", "shape", "read", "noted"),
    [
        ("core_attn", {}, "selective", False),
        ("layernorm", {}, "none", True),
        ("core_attn mlp", {}, "selective", True),
        ("moe_act", {"moe": experts()}, "light", True),
        ("layernorm moe_act core_attn", {"moe": experts()}, "light", True),
        ("shared_experts", {"moe": experts(shared_ffn_size=512)}, "none", True),
    ],
)
def test_other_modules_of_today(modules: str, shape: dict[str, Any], read: str, noted: bool) -> None:
    p = problem(model(**shape))
    line = launch("megatron", p, config(p, recompute=Recompute.SELECTIVE)).line()
    today = read_megatron(line.replace("core_attn", modules), p.cluster, None, p.version)
    assert today.config["recompute"] == read and bool(today.notes) is noted


@pytest.mark.parametrize("launcher", ["deepspeed", "torchtitan", "accelerate", "megatron"])
def test_who_has_no_words_for_it(launcher: str) -> None:
    p = problem(framework=launcher)
    with pytest.raises(NotExpressibleError, match="recompute=light"):
        launch(launcher, p, config(p, zero=0, recompute=Recompute.LIGHT))


def test_it_is_found() -> None:
    """Latent attention's heads are most of what a layer keeps: rebuilding them is the cheapest memory there is."""
    p = Problem("h800-sxm:32x8", "deepseek-v3", seq_len=4096, gbs=15360)
    best, other = (parsolve.solve(p, top=1, forbid=given) for given in ({}, {"recompute": "light"}))
    assert best.best.config.recompute is Recompute.LIGHT and best.status == other.status == "optimal"
    assert best.best.estimate.step_time_s < 0.99 * other.best.estimate.step_time_s
