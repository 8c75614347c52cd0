"""ZeRO++'s quantised traffic: what is sent, what the kernels take, what is legal, what is written and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch_problems import config, model, problem

import parsolve
from parsolve.errors import SpecError
from parsolve.from_deepspeed import read_deepspeed
from parsolve.launchers import launch
from parsolve.objectives import data_comm, parameters
from parsolve.objectives.network import all_to_all_time, pass_time
from parsolve.problem import Instance, Problem
from parsolve.reading import parse_config
from parsolve.shard_hint import better_quantized
from parsolve.splits import Split, Splits, balanced

POINT = {"tp": 1, "shards": 32, "zero": 3, "grad_acc": 2}
SLOW = {"gpu": "h100-sxm", "domains": 4, "gpus_per_domain": 8, "nic": {"kind": "ib", "bandwidth": "100Gb/s"}}
SLOW |= {"nics_per_host": 1}


def instance(cluster: str = "h100-sxm:4x8", **workload: Any) -> Instance:
    p = problem(model(), cluster, framework="deepspeed", **workload)
    return p.instance(64, Splits(p.model.layer_is_moe, [Split(balanced(16, 1, 1), "even")]))


def kernels(p: Instance, traffic: float) -> float:
    return traffic / (p.cluster.gpu.memory_bandwidth * p.profile.memory_efficiency)


@pytest.mark.parametrize(("precision", "touched"), [("bf16", 7.0), ("fp16", 3.0)])
def test_weights_are_gathered_in_8_bits(precision: str, touched: float) -> None:
    """Two gathers of a byte a parameter; a rank quantises its share and dequantises everything, twice."""
    p = instance(zero_quantized="weights", precision=precision)
    params, g = parameters.dense_layer_params(p, 1), p.reduction_bytes
    once = pass_time(p, 32, 1, params * (g + 2.0)) + 2 * kernels(p, touched * params * (1 + 1 / 32))
    assert data_comm.dense_layer_gather(p, POINT) == pytest.approx(2 * once)


def test_gradients_are_exchanged_in_4_bits_in_the_host_and_then_across() -> None:
    p = instance(zero_quantized="gradients", precision="fp16")
    params = parameters.dense_layer_params(p, 1)
    exchange = all_to_all_time(p, 8, 1, params / 2) + all_to_all_time(p, 4, 8, params / 8 / 2)
    once = pass_time(p, 32, 1, params * 4.0) + exchange + kernels(p, params * 3.0 + params / 8 * 5.0)
    assert data_comm.dense_layer_gather(p, POINT) == pytest.approx(2 * once)


def test_the_copy_in_the_group_is_gathered_in_8_bits_too() -> None:
    p, whole = instance(zero_quantized="weights", shard_group=8), instance(zero_quantized="weights")
    params = parameters.dense_layer_params(p, 1)
    saved = pass_time(p, 32, 1, params * 2.0) - pass_time(p, 32, 1, params) - pass_time(p, 8, 1, params)
    seen = data_comm.dense_layer_gather(whole, POINT) - data_comm.dense_layer_gather(p, POINT)
    assert seen == pytest.approx(2 * saved)


def test_one_host_sends_gradients_in_16_bits() -> None:
    """DeepSpeed's exchange is for several hosts; in one it falls back to a reduce-scatter."""
    plain, quantized = instance("h100-sxm:1x8"), instance("h100-sxm:1x8", zero_quantized="gradients")
    point = {**POINT, "shards": 8}
    assert data_comm.dense_layer_gather(plain, point) == data_comm.dense_layer_gather(quantized, point)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_other_stages_are_untouched(zero: int) -> None:
    plain, quantized = instance(), instance(zero_quantized="both")
    for term in (data_comm.dense_layer_gather, data_comm.dense_layer_reduction):
        assert term(plain, {**POINT, "zero": zero}) == term(quantized, {**POINT, "zero": zero})


def test_only_deepspeed_has_it() -> None:
    with pytest.raises(SpecError, match="zero_quantized"):
        problem(framework="megatron", zero_quantized="both")


def test_it_is_never_taken_unasked_but_pointed_out_where_it_pays() -> None:
    p = Problem(SLOW, "llama2-7b", seq_len=4096, gbs=256, framework="deepspeed")
    best = parsolve.solve(p).plans[0]
    assert "zero_quantized" not in best.launch("deepspeed").files["ds_config.json"]
    zero_3 = parse_config("zero=3", p)[0]
    found = better_quantized(p, zero_3)
    assert found is not None
    what, estimate = found
    quantized = Problem(SLOW, "llama2-7b", seq_len=4096, gbs=256, framework="deepspeed", zero_quantized=what)
    assert what == "both" and estimate == parsolve.evaluate(quantized, "zero=3")
    assert estimate.step_time_s < 0.9 * parsolve.evaluate(p, "zero=3").step_time_s
    assert better_quantized(quantized, zero_3) is None
    assert better_quantized(p, parse_config("zero=2", p)[0]) is None
    fast = Problem("h100-sxm:1x8", "llama2-7b", seq_len=4096, gbs=256, framework="deepspeed")
    assert better_quantized(fast, parse_config("zero=3", fast)[0]) is None, "the fast link hides it all"


@pytest.mark.parametrize("what", ["weights", "gradients", "both"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_written_is_read_again(what: str, precision: str, tmp_path: Path) -> None:
    p = problem(cluster="h100-sxm:4x8", framework="deepspeed", zero_quantized=what, precision=precision)
    file = tmp_path / "ds.json"
    file.write_text(launch("deepspeed", p, config(p, zero=3)).files["ds_config.json"])
    zero = json.loads(file.read_text())["zero_optimization"]
    assert zero.get("zero_quantized_weights", False) is (what != "gradients")
    assert zero.get("zero_quantized_gradients", False) is (what != "weights")
    today = read_deepspeed(str(file), p.cluster, {})
    assert today.fields["zero_quantized"] == what
    assert not today.violations


def test_bf16_gradients_are_not_handed_to_a_kernel_that_takes_them_for_fp16(tmp_path: Path) -> None:
    content: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    content["zero_optimization"] = {"stage": 3, "zero_quantized_gradients": True}
    file = tmp_path / "ds.json"
    cluster = problem(cluster="h100-sxm:4x8").cluster

    def faults(**changes: Any) -> list[str]:
        file.write_text(json.dumps({**content, **changes}))
        return [v.rule for v in read_deepspeed(str(file), cluster, {}).violations]

    assert faults() == ["quantized_gradients"]
    assert not faults(communication_data_type="fp16")
    assert not faults(bf16={"enabled": False}, fp16={"enabled": True})
    assert not faults(zero_optimization={"stage": 2, "zero_quantized_gradients": True}), "stage 2 does not look at it"
    with pytest.raises(SpecError, match="zero_quantized_weights"):
        faults(zero_optimization={"stage": 3, "zero_quantized_weights": "yes"})
