"""Cost terms at hand-computed points, at their limits, and on arrays as on numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parsolve import Problem
from parsolve.loading import load_cluster
from parsolve.objectives import (
    compute,
    gradient_accumulation,
    launch,
    optimizer_step,
    pipeline_comm,
    roofline,
    tensor_comm,
)
from parsolve.objectives.parameters import dense_layer_params
from parsolve.problem import Instance
from parsolve.specs import Recompute
from parsolve.splits import Split, Splits, balanced

NONE, FULL = int(Recompute.NONE), int(Recompute.FULL)


def instance(profile: dict[str, Any] | None = None, cluster: str = "a100-sxm-80gb:2x8", **workload: Any) -> Instance:
    from parsolve.profiles import load_profile

    constants = load_profile("default").model_copy(update=profile or {})
    options = {"seq_len": 2048, "gbs": 64, **workload}
    problem = Problem(cluster, "llama2-7b", profile=constants, **options)
    layers = balanced(32, 1, 1)
    return problem.instance(64, Splits(problem.model.layer_is_moe, [Split(layers, "even")]))


def test_alignment_of_matrix_sides() -> None:
    assert roofline.alignment(np.array([128, 112, 100, 222, 225])).tolist() == [1.0, 0.9, 0.75, 0.5, 0.15]


def test_attention_kernels_in_order_of_speed() -> None:
    point = {"tp": 1, "cp": 1, "mbs": 4, "recompute": NONE}
    times = [
        float(compute.attention_core(instance(attention_kernel=kernel), point))
        for kernel in ("flash2", "flash1", "fused_softmax", "unfused")
    ]
    assert times == sorted(times)
    assert times[0] < 0.6 * times[1]


def test_norms_that_are_not_one_kernel_cost_more() -> None:
    point = {"tp": 1, "cp": 1, "mbs": 4, "recompute": NONE}
    fused, apart = instance(fused_norm=True), instance(fused_norm=False)
    assert compute.attention_elementwise(apart, point) > 2 * compute.attention_elementwise(fused, point)


def test_launch_floor_holds_small_layers_up_and_vanishes_for_large_ones() -> None:
    p = instance({"launch_time": 1e-4})
    small = {"tp": 8, "cp": 16, "mbs": 1, "recompute": NONE}
    large = {"tp": 1, "cp": 1, "mbs": 16, "recompute": NONE}
    layer = sum(float(t(p, small)) for t in launch.DENSE) + float(launch.dense_launch(p, small))
    assert layer == pytest.approx(launch.BASE_KERNELS * 3 * 1e-4)
    assert launch.dense_launch(p, large) == 0
    blocking = instance({"launch_time": 1e-4}, blocking_launches=True)
    assert launch.dense_launch(blocking, large) == pytest.approx(launch.BASE_KERNELS * 3 * 1e-4)


def test_pipelined_launch_needs_tensor_parallelism() -> None:
    p = instance({"launch_time": 1e-4, "pipelined_member_time": 1e-3})
    point = {"cp": 16, "mbs": 1, "recompute": NONE}
    assert launch.dense_pipelined_launch(p, {"tp": 1, **point}) == 0
    assert launch.dense_pipelined_launch(p, {"tp": 8, **point}) == pytest.approx(8e-3)


def test_gathered_logits_cost_time_and_traffic() -> None:
    point = {"tp": 8, "cp": 1, "mbs": 1}
    split, whole = instance(), instance(parallel_loss=False)
    assert compute.output_layer(whole, point) > compute.output_layer(split, point)
    assert tensor_comm.head_tensor_comm(whole, point) > tensor_comm.head_tensor_comm(split, point)
    alone = {**point, "tp": 1}
    assert compute.output_layer(whole, alone) == compute.output_layer(split, alone)


def test_deepspeed_sends_a_slice_between_stages() -> None:
    slow = {"p2p_overhead": 0.0}
    sliced = instance(slow, framework="deepspeed", sequence_parallel=False)
    whole = instance(slow, framework="megatron", sequence_parallel=False)
    point = {"tp": 8, "cp": 1, "mbs": 1}
    assert pipeline_comm.stage_transfer(sliced, point) < 0.5 * pipeline_comm.stage_transfer(whole, point)
    told = instance(slow, framework="megatron", sequence_parallel=False, sliced_transfers=True)
    assert pipeline_comm.stage_transfer(told, point) == pipeline_comm.stage_transfer(sliced, point)
    shared = [instance(slow, sequence_parallel=True, sliced_transfers=told) for told in (False, True)]
    assert pipeline_comm.stage_transfer(shared[0], point) == pipeline_comm.stage_transfer(shared[1], point)


def test_states_shared_in_smaller_groups() -> None:
    small, every = instance(optimizer_shards=4), instance()
    point = {"tp": 1, "shards": 16, "zero": 1}
    ratio = optimizer_step.dense_layer_update(small, point) / optimizer_step.dense_layer_update(every, point)
    assert ratio == pytest.approx(4.0)
    timed = instance({"shard_member_time": 1e-3}, optimizer_shards=4)
    assert optimizer_step.shard_broadcast(timed, {"shards": 16, "zero": 1}) == pytest.approx(4e-3)
    assert optimizer_step.shard_broadcast(timed, {"shards": 16, "zero": 0}) == 0


def test_overlap_can_be_switched_off() -> None:
    tuned = {"tp_overlap": 0.5}
    point = {"tp": 8, "cp": 1, "mbs": 1, "recompute": NONE}
    hidden, shown = instance(tuned), instance(tuned, overlap=False)
    assert tensor_comm.mlp_tensor_comm(shown, point) == pytest.approx(2 * tensor_comm.mlp_tensor_comm(hidden, point))


@pytest.mark.parametrize("kernel", ["flash2", "flash1", "fused_softmax", "unfused"])
def test_arrays_agree_with_numbers(kernel: str) -> None:
    p = instance({"pipelined_member_time": 1e-3}, attention_kernel=kernel)
    axes = {"tp": np.array([1, 2, 8]), "cp": np.array([1, 2, 1]), "mbs": np.array([1, 4, 2])}
    axes["recompute"] = np.array([NONE, FULL, NONE])
    terms = (
        compute.attention_core,
        compute.dense_mlp,
        launch.dense_launch,
        launch.dense_pipelined_launch,
        tensor_comm.head_tensor_comm,
        pipeline_comm.stage_transfer,
    )
    for term in terms:
        whole = np.broadcast_to(term(p, axes), (3,))
        for i in range(3):
            assert whole[i] == pytest.approx(float(term(p, {name: values[i] for name, values in axes.items()})))
            assert whole[i] >= 0


def test_few_output_tiles_slow_a_product_down() -> None:
    p = instance({"gemm_half_tiles": 32.0, "gemm_half_depth": 0.0, "gemm_efficiency": 0.8, "kernel_overhead": 0.0})
    tiles, depth = 32, 4096
    flops = 2.0 * tiles * 128 * 128 * depth
    assert roofline.matmul_time(p, 128 * tiles, 128, depth) == pytest.approx(flops / (312e12 * 0.8 * 0.5))
    assert roofline.matmul_time(p, 128, 128 * tiles, depth) == pytest.approx(flops / (312e12 * 0.8 * 0.5))
    many = roofline.matmul_time(p, 128 * tiles, 1280, depth)
    assert many == pytest.approx(10 * flops / (312e12 * 0.8 * 10 / 11))


def test_gradients_are_handed_over_once_a_microbatch() -> None:
    p = instance({"accumulation_bytes": 8.0, "memory_efficiency": 0.8})
    held = float(dense_layer_params(p, 4))
    seconds = held * 8.0 / (2039e9 * 0.8)
    assert float(gradient_accumulation.dense_layer_accumulation(p, {"tp": 4})) == pytest.approx(seconds)
    assert gradient_accumulation.dense_layer_accumulation(instance({"accumulation_bytes": 0.0}), {"tp": 4}) == 0


def test_a_fabric_that_reaches_less_of_its_rate() -> None:
    whole, part = (load_cluster("jean-zay-a100"), load_cluster("jean-zay-a100"))
    part = part.model_copy(update={"nic": part.nic.model_copy(update={"efficiency": 0.5})})
    whole = whole.model_copy(update={"nic": whole.nic.model_copy(update={"efficiency": 1.0})})
    assert whole.nic_bandwidth_per_gpu == pytest.approx(4 * 12.5e9 / 8)
    assert part.nic_bandwidth_per_gpu == pytest.approx(0.5 * whole.nic_bandwidth_per_gpu)
