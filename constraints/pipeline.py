"""Pipeline parallelism: how layers are cut into stages and virtual chunks, and what the interleaved schedule needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import rule
from parsolve.problem import Instance, Problem
from parsolve.specs import Recompute
from parsolve.specs.workload import FOLDED, MEGATRON_LIKE

LAYOUT_SINCE = (0, 13)
WITHOUT_BLOCK = ("deepspeed", "torchtitan", "accelerate")
"""Frameworks that recompute all layers of a stage or none."""


@rule("the layer cut is for another pp than {pp}", role="grid")
def split_ranks(p: Instance, *, split: Any, pp: Any) -> Any:
    """A cut belongs to one pipeline size."""
    return p.splits.pp[split] == pp


@rule("the layer cut is for another vpp than {vpp}", role="grid")
def split_chunks(p: Instance, *, split: Any, vpp: Any) -> Any:
    """A cut belongs to one number of virtual chunks."""
    return p.splits.vpp[split] == vpp


@rule(
    "recompute_layers={recompute_layers} with recompute={recompute}: give it with recompute=block, and only then",
    role="canonical",
)
def recomputed_layers(p: Instance, *, recompute: Any, recompute_layers: Any) -> Any:
    """recompute=block recomputes some layers of a chunk, the others a fixed share."""
    return (np.asarray(recompute) == Recompute.BLOCK) == (np.asarray(recompute_layers) > 0)


@rule(
    "all layers of every chunk ({p.splits.texts[0]}) are among the first that recompute=block recomputes: write"
    " recompute=full",
    role="canonical",
)
def not_all_recomputed(p: Instance, *, split: Any) -> Any:
    """recompute=block recomputes fewer layers than the fullest chunk holds."""
    return (p.splits.recomputed[split] == 0) | (p.splits.recomputed[split] < p.splits.fullest[split])


@rule(
    "recompute={recompute}: {p.framework} recomputes no part of a chunk's layers; use none, full or its selective",
    frameworks=WITHOUT_BLOCK,
    source="only Megatron-Core has --recompute-method block; DeepSpeed's pipeline checkpoints every layer",
)
def block_recomputation(p: Instance, *, recompute: Any) -> Any:
    """Recomputing the first layers of every chunk needs Megatron-Core (or a generic framework)."""
    return np.asarray(recompute) != Recompute.BLOCK


@rule(
    "recompute=block with --schedule {p.workload.schedule}: what recomputed layers keep until their weight gradients is"
    " not modelled layer by layer; use none, selective or full",
    frameworks=("generic",),
    source="no launcher has both",
)
def block_schedule(p: Instance, *, recompute: Any) -> Any:
    """Recomputing part of the layers goes with schedules that make all gradients at once."""
    return (np.asarray(recompute) != Recompute.BLOCK) | (not p.workload.splits_backward)


@rule("vpp={vpp} without a pipeline (pp={pp}): use vpp=1", role="canonical")
def chunks_need_pipeline(p: Instance, *, pp: Any, vpp: Any) -> Any:
    """Virtual chunks only mean something between several stages."""
    return (vpp == 1) | (pp > 1)


def stages_without_layers(problem: Problem) -> int:
    """How many stages of a pipeline may hold no layer."""
    return 2 if problem.megatron_core >= LAYOUT_SINCE else 0


@rule(
    "pp={pp}, vpp={vpp} makes more chunks than the {p.model.num_layers} layers can fill",
)
def enough_layers(p: Instance, *, pp: Any, vpp: Any) -> Any:
    """Every chunk holds a layer, but for two: a layout string may leave embedding and output layer alone."""
    return pp * vpp <= p.model.num_layers + np.where(pp > 1, stages_without_layers(p.problem), 0)


@rule(
    "the {p.model.num_layers} layers are cut into stages as {p.splits.texts[0]}, which {p.framework} "
    "{p.problem.framework_version} cannot spell; choose a pp*vpp that divides them",
)
def layers_divide(p: Instance, *, split: Any) -> Any:
    """A cut that the launcher can spell: even, or one of its uneven forms.

    Megatron-LM: first/last layer counts, embedding or loss counted as a layer, from 0.13 on any layout string.
    DeepSpeed: the one that its partition makes, stages that differ by a layer at most and the fuller ones first; only
    without its pipeline does Megatron-DeepSpeed ask for a divisor. Others: any. Source: transformer_config.py,
    pipeline_parallel_layer_layout.py; DeepSpeed runtime/utils.py, partition_balanced; Megatron-DeepSpeed
    megatron/model/gpt_model.py, partition_method, and transformer.py, _get_num_layers.
    """
    if p.framework in MEGATRON_LIKE:
        return (p.splits.kinds[split] != "layout") | (p.megatron_core >= LAYOUT_SINCE)
    if p.framework == "deepspeed":
        return p.splits.balanced[split]
    return p.splits.pp[split] > 0


@rule(
    "vpp={vpp} with pp={pp} needs grad_acc to be a multiple of pp (and so at least pp): it is {grad_acc}."
    " Raise the batch, lower dp, mbs or pp, or use vpp=1",
    name="microbatch_group",
    source="Megatron-Core schedules.py: pp <= group <= microbatches, microbatches % group == 0 or >= pp",
)
def microbatch_group(p: Instance, *, pp: Any, vpp: Any, grad_acc: Any) -> Any:
    """Interleaved 1F1B works on groups of pp microbatches."""
    return (vpp == 1) | (grad_acc % pp == 0) | p.workload.splits_backward


@rule(
    "vpp={vpp}: DeepSpeed's pipeline engine has no virtual stages; use vpp=1",
    frameworks=("deepspeed",),
    source="DeepSpeed runtime/pipe: one model chunk per stage",
)
def no_virtual_stages(p: Instance, *, vpp: Any) -> Any:
    """DeepSpeed has no interleaved schedule."""
    return np.asarray(vpp) == 1


@rule(
    "GPipe with vpp={vpp}: all forward passes come first, so virtual stages gain nothing; use vpp=1",
    name="gpipe_one_chunk",
    source="Huang et al. 2019",
)
def gpipe_one_chunk(p: Instance, *, vpp: Any) -> Any:
    """GPipe runs one chunk per rank."""
    return (np.asarray(vpp) == 1) | (p.workload.schedule != "gpipe")


TORCH_ONLY = ("megatron", "nemo", "deepspeed")
"""Launchers whose pipelines run 1F1B only."""
NO_OTHER_SCHEDULE = (
    "Megatron-Core schedules.py; DeepSpeed runtime/pipe/schedule.py; torchtitan: pipeline_parallel_schedule"
)


@rule(
    "pp={pp} by GPipe: {p.framework}'s pipeline runs 1F1B only; use --schedule 1f1b, or torchtitan",
    name="gpipe_launcher",
    frameworks=TORCH_ONLY,
    source=NO_OTHER_SCHEDULE,
)
def gpipe_launcher(p: Instance, *, pp: Any) -> Any:
    """GPipe needs a launcher that has it: torchtitan."""
    return (np.asarray(pp) == 1) | (p.workload.schedule != "gpipe")


@rule(
    "pp={pp} by {p.workload.schedule}: {p.framework}'s pipeline runs 1F1B only; use --schedule 1f1b, or torchtitan",
    frameworks=TORCH_ONLY,
    source=NO_OTHER_SCHEDULE,
)
def split_backward_launcher(p: Instance, *, pp: Any) -> Any:
    """A backward pass split into gradients of inputs and of weights needs a launcher that has it: torchtitan."""
    return (np.asarray(pp) == 1) | (not p.workload.splits_backward)


@rule(
    "pp={pp}, vpp={vpp} by {p.workload.schedule}: a rank holds two stages, placed in a V; use vpp=2",
    source="PyTorch pipelining/schedules.py, ScheduleZBVZeroBubble and ScheduleDualPipeV: exactly 2 stages per rank",
)
def two_stages_in_a_v(p: Instance, *, pp: Any, vpp: Any) -> Any:
    """ZBV and DualPipeV have two stages on every rank."""
    return (np.asarray(pp) == 1) | (np.asarray(vpp) == 2) | (p.workload.schedule not in FOLDED)


@rule(
    "pp={pp} by zero bubble: grad_acc={grad_acc} does not divide into grad_acc // pp groups of one size;"
    " a multiple of pp does",
    source="PyTorch pipelining/schedules.py, ScheduleInterleavedZeroBubble: microbatches % max(1, microbatches // pp)",
)
def zero_bubble_groups(p: Instance, *, pp: Any, grad_acc: Any) -> Any:
    """Zero bubble works on equal groups of at least pp microbatches."""
    groups = np.maximum(1, np.asarray(grad_acc) // pp)
    return (np.asarray(pp) == 1) | (np.asarray(grad_acc) % groups == 0) | (p.workload.schedule != "zero-bubble")


@rule(
    "pp={pp} by DualPipeV: grad_acc={grad_acc} is under the number of stages, 2*pp; raise the batch or lower dp or mbs",
    source="PyTorch pipelining/schedules.py, ScheduleDualPipeV: at least as many microbatches as stages",
)
def dualpipev_depth(p: Instance, *, pp: Any, grad_acc: Any) -> Any:
    """DualPipeV fills its 2*pp stages."""
    return (np.asarray(pp) == 1) | (np.asarray(grad_acc) >= 2 * pp) | (p.workload.schedule != "dualpipev")


@rule(
    "pp={pp}, vpp={vpp} by 1F1B: grad_acc={grad_acc} is under pp, which torchtitan's 1F1B refuses; use GPipe, or raise"
    " the batch",
    frameworks=("torchtitan",),
    source="PyTorch pipelining/schedules.py, Schedule1F1B: microbatches >= stages",
)
def torch_1f1b_depth(p: Instance, *, pp: Any, vpp: Any, grad_acc: Any) -> Any:
    """torch's plain 1F1B needs a microbatch for every stage."""
    enough = (np.asarray(grad_acc) >= pp) | (np.asarray(vpp) > 1)
    return (np.asarray(pp) == 1) | enough | (p.workload.schedule != "1f1b")


@rule(
    "recompute={recompute} with pp={pp} by {p.workload.schedule}: PyTorch rebuilds a layer anew for each of its"
    " weights when it makes their gradients, so recomputation is not offered; use recompute=none",
    frameworks=("torchtitan",),
    source="PyTorch pipelining/_backward.py: a torch.autograd.grad per weight; utils/checkpoint.py: rebuilt in each",
)
def split_backward_recompute(p: Instance, *, pp: Any, recompute: Any) -> Any:
    """Measured on PyTorch 2.13: a layer of nine weights runs forward ten times more, once in B and nine times in W."""
    return (np.asarray(pp) == 1) | (np.asarray(recompute) == Recompute.NONE) | (not p.workload.splits_backward)


@rule(
    "pp={pp} by {p.workload.schedule} in fp8: torchtitan compiles the model for fp8, which PyTorch's split backward"
    " pass refuses; use bf16",
    frameworks=("torchtitan",),
    source="PyTorch pipelining/schedules.py: _check_torch_compile_compatibility",
)
def split_backward_compiled(p: Instance, *, pp: Any) -> Any:
    """A compiled stage has no pass for the gradients of its inputs alone."""
    return (np.asarray(pp) == 1) | (p.workload.precision != "fp8") | (not p.workload.splits_backward)


RULES = (
    split_ranks,
    split_chunks,
    recomputed_layers,
    not_all_recomputed,
    block_recomputation,
    block_schedule,
    chunks_need_pipeline,
    enough_layers,
    layers_divide,
    microbatch_group,
    no_virtual_stages,
    gpipe_one_chunk,
    gpipe_launcher,
    split_backward_launcher,
    two_stages_in_a_v,
    zero_bubble_groups,
    dualpipev_depth,
    torch_1f1b_depth,
    split_backward_recompute,
    split_backward_compiled,
)
