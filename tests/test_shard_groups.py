"""Hybrid sharding: what groups of ranks hold and send, what is legal, how the launchers say it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml
from launch_problems import config, experts, model, options, problem

import parsolve
from parsolve.constraints import memory
from parsolve.errors import NotExpressibleError
from parsolve.launchers import launch
from parsolve.objectives import data_comm, parameters
from parsolve.objectives.network import pass_time
from parsolve.objectives.shard_groups import expert_group_size
from parsolve.problem import Instance
from parsolve.reading import parse_config
from parsolve.shard_hint import better_group
from parsolve.splits import Split, Splits, balanced


def instance(
    framework: str = "torchtitan", cluster: str = "h100-sxm:4x8", moe: bool = False, **workload: Any
) -> Instance:
    shape = model(moe=experts()) if moe else model()
    p = problem(shape, cluster, framework=framework, **workload)
    return p.instance(64, Splits(p.model.layer_is_moe, [Split(balanced(16, 1, 1), "even")]))


POINT = {"tp": 1, "shards": 32, "zero": 3, "grad_acc": 2}


def test_states_are_divided_inside_a_group_only() -> None:
    grouped, whole = instance(shard_group=8), instance()
    for term, zero in zip(memory.DENSE_LAYER_STATES, (3, 2, 1), strict=True):
        for stage in range(4):
            ratio = term(grouped, {**POINT, "zero": stage}) / term(whole, {**POINT, "zero": stage})
            assert ratio == pytest.approx(4.0 if stage >= zero else 1.0)


def test_gathers_stay_inside_and_gradients_cross() -> None:
    """A ring in the group for weights and gradients, and an all-reduce of 1/8 of the gradients over four groups."""
    p = instance(shard_group=8)
    params, g = parameters.dense_layer_params(p, 1), p.reduction_bytes
    inside = pass_time(p, 8, 1, params * (g + 4.0))
    across = pass_time(p, 4, 8, params / 8 * 2 * g)
    assert data_comm.dense_layer_gather(p, POINT) == pytest.approx(2 * (inside + across))
    once = {**POINT, "zero": 1}
    expected = pass_time(p, 8, 1, params * (g + 2.0)) + across
    assert data_comm.dense_layer_reduction(p, once) == pytest.approx(expected)


def test_deepspeeds_second_copy() -> None:
    """hpZ: one of the two gathers stays inside; a second copy of the 16-bit weights, divided by 8, is held."""
    p, whole = instance("deepspeed", shard_group=8), instance("deepspeed")
    params, g = parameters.dense_layer_params(p, 1), p.reduction_bytes
    expected = pass_time(p, 32, 1, params * (g + 2.0)) + pass_time(p, 8, 1, params * 2.0)
    assert data_comm.dense_layer_gather(p, POINT) == pytest.approx(2 * expected)
    weights = memory.DENSE_LAYER_STATES[0]
    assert weights(p, POINT) - weights(whole, POINT) == pytest.approx(params * 2.0 / 8)
    assert memory.DENSE_LAYER_STATES[2](p, POINT) == memory.DENSE_LAYER_STATES[2](whole, POINT)


def test_one_group_of_all_is_plain_sharding() -> None:
    for framework in ("torchtitan", "deepspeed"):
        grouped, whole = instance(framework, shard_group=32), instance(framework)
        for term in (data_comm.dense_layer_gather, data_comm.dense_layer_reduction, *memory.DENSE_LAYER_STATES):
            assert term(grouped, POINT) == pytest.approx(term(whole, POINT))


def test_experts_have_as_many_copies() -> None:
    """64 ranks of dp=64 in groups of 8: ep=8 leaves one rank of each group an expert, edp=8 copies of it."""
    p = instance(cluster="h100-sxm:8x8", moe=True, shard_group=8)
    assert expert_group_size(p, 1, np.array([1, 2, 4, 8]), 1, np.array([64, 32, 16, 8]), 3).tolist() == [8, 4, 2, 1]
    whole = instance(cluster="h100-sxm:8x8", moe=True)
    point = {"tp": 1, "ep": 4, "etp": 1, "edp": 16, "zero": 3}
    for one, other in zip(memory.GROUPED_EXPERT_STATES, memory.EXPERT_STATES, strict=True):
        assert one(p, point) / other(whole, point) == pytest.approx(8.0)


def test_it_pays_where_the_network_is_slow() -> None:
    """A node with one 100 Gb/s port for eight GPUs: gathers inside it are worth the copies."""
    cluster = {"gpu": "h100-sxm", "domains": 4, "gpus_per_domain": 8, "nic": {"kind": "ib", "bandwidth": "100Gb/s"}}
    cluster |= {"nics_per_host": 1}
    times = {}
    for group in (None, 8):
        p = parsolve.Problem(cluster, "llama2-7b", seq_len=4096, gbs=256, framework="torchtitan", shard_group=group)
        times[group] = parsolve.evaluate(p, {"zero": 3}).step_time_s
    assert times[8] < 0.8 * times[None]


def test_fewer_ranks_than_a_group_are_one_group() -> None:
    p = problem(cluster="h100-sxm:4x8", framework="torchtitan", shard_group=64)
    assert not parsolve.check(p, "zero=3")
    q = problem(cluster="h100-sxm:4x8", framework="torchtitan", shard_group=3)
    assert not parsolve.check(q, "zero=0"), "replicas have no groups"


def test_a_better_group_is_pointed_out() -> None:
    slow = {"gpu": "h100-sxm", "domains": 4, "gpus_per_domain": 8, "nic": {"kind": "ib", "bandwidth": "100Gb/s"}}
    options = {"seq_len": 4096, "gbs": 256, "framework": "deepspeed"}
    p = parsolve.Problem({**slow, "nics_per_host": 1}, "llama2-7b", **options)
    found = better_group(p, parse_config("zero=3", p)[0])
    assert found is not None
    group, estimate = found
    grouped = parsolve.Problem({**slow, "nics_per_host": 1}, "llama2-7b", **options, shard_group=8)
    assert group == 8 and estimate == parsolve.evaluate(grouped, "zero=3")
    assert estimate.step_time_s < parsolve.evaluate(p, "zero=3").step_time_s
    assert better_group(grouped, parse_config("zero=3", p)[0]) is None, "it is in groups already"
    assert better_group(p, parse_config("zero=0", p)[0]) is None, "nothing is sharded"


def said(framework: str, group: int, **axes: Any) -> Any:
    p = problem(cluster="h100-sxm:4x8", framework=framework, shard_group=group)
    return launch(framework, p, config(p, **axes))


def test_how_it_is_said() -> None:
    seen = options(said("torchtitan", 8, zero=3))
    degrees = ("--parallelism.data-parallel-replicate-degree", "--parallelism.data-parallel-shard-degree")
    assert [seen[degree] for degree in degrees] == [["4"], ["8"]]
    mesh = yaml.safe_load(said("accelerate", 8, zero=2).files["accelerate.yaml"])["parallelism_config"]
    assert (mesh["parallelism_config_dp_replicate_size"], mesh["parallelism_config_dp_shard_size"]) == (4, 8)
    zero = json.loads(said("deepspeed", 8, zero=3).files["ds_config.json"])["zero_optimization"]
    assert zero["zero_hpz_partition_size"] == 8
    assert options(said("megatron", 8, zero=1, tp=2))["--num-distributed-optimizer-instances"] == ["2"]
    assert "ddp.num_distributed_optimizer_instances=4" in said("nemo", 8, zero=1).argv
    with pytest.raises(NotExpressibleError, match="zero=3"):
        said("megatron", 8, zero=3)


@pytest.mark.parametrize("framework", ["torchtitan", "accelerate", "deepspeed", "megatron", "nemo"])
def test_nothing_is_said_where_one_group_holds_all(framework: str) -> None:
    zero = 1 if framework in ("megatron", "nemo") else 3
    plain = problem(cluster="h100-sxm:4x8", framework=framework)
    grouped = problem(cluster="h100-sxm:4x8", framework=framework, shard_group=32)
    first, second = (launch(framework, p, config(p, zero=zero)) for p in (plain, grouped))
    assert (first.argv, first.files) == (second.argv, second.files)
