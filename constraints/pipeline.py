"""Pipeline parallelism: how layers are cut into stages and virtual chunks, and what the interleaved schedule needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import rule
from parsolve.problem import Instance
from parsolve.specs import Recompute
from parsolve.specs.workload import MEGATRON_LIKE

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
    "recompute_layers={recompute_layers} with recompute={recompute}: give it with recompute=block (3), and only then",
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
    "recompute=block (3): {p.framework} recomputes no part of a chunk's layers; use none, full or its selective",
    frameworks=WITHOUT_BLOCK,
    source="only Megatron-Core has --recompute-method block; DeepSpeed's pipeline checkpoints every layer",
)
def block_recomputation(p: Instance, *, recompute: Any) -> Any:
    """Recomputing the first layers of every chunk needs Megatron-Core (or a generic framework)."""
    return np.asarray(recompute) != Recompute.BLOCK


@rule("vpp={vpp} without a pipeline (pp={pp}): use vpp=1", role="canonical")
def chunks_need_pipeline(p: Instance, *, pp: Any, vpp: Any) -> Any:
    """Virtual chunks only mean something between several stages."""
    return (vpp == 1) | (pp > 1)


@rule(
    "pp={pp}, vpp={vpp} makes more chunks than the {p.model.num_layers} layers can fill",
)
def enough_layers(p: Instance, *, pp: Any, vpp: Any) -> Any:
    """Every chunk holds a layer, but for two: a layout string may leave embedding and output layer alone."""
    alone = 2 if p.megatron_core >= LAYOUT_SINCE else 0
    return pp * vpp <= p.model.num_layers + np.where(pp > 1, alone, 0)


@rule(
    "the {p.model.num_layers} layers are cut into stages as {p.splits.texts[0]}, which {p.framework} "
    "{p.problem.framework_version} cannot spell; choose a pp*vpp that divides them",
)
def layers_divide(p: Instance, *, split: Any) -> Any:
    """A cut that the launcher can spell: even, or one of its uneven forms.

    Megatron-LM: first/last layer counts, embedding or loss counted as a layer, from 0.13 on any layout string.
    DeepSpeed: even. Others: any. Source: transformer_config.py, pipeline_parallel_layer_layout.py.
    """
    if p.framework in MEGATRON_LIKE:
        return (p.splits.kinds[split] != "layout") | (p.megatron_core >= LAYOUT_SINCE)
    if p.framework == "deepspeed":
        return p.splits.kinds[split] == "even"
    return p.splits.pp[split] > 0


@rule(
    "vpp={vpp} with pp={pp} needs grad_acc to be a multiple of pp (and so at least pp): it is {grad_acc}."
    " Raise the batch, lower dp, mbs or pp, or use vpp=1",
    name="microbatch_group",
    source="Megatron-Core schedules.py: pp <= group <= microbatches, microbatches % group == 0 or >= pp",
)
def microbatch_group(p: Instance, *, pp: Any, vpp: Any, grad_acc: Any) -> Any:
    """Interleaved 1F1B works on groups of pp microbatches."""
    return (vpp == 1) | (grad_acc % pp == 0)


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


@rule(
    "pp={pp} by GPipe: {p.framework}'s pipeline runs 1F1B only; use --schedule 1f1b, or torchtitan",
    name="gpipe_launcher",
    frameworks=("megatron", "nemo", "deepspeed"),
    source="Megatron-Core schedules.py; DeepSpeed runtime/pipe/schedule.py; torchtitan: pipeline_parallel_schedule",
)
def gpipe_launcher(p: Instance, *, pp: Any) -> Any:
    """GPipe needs a launcher that has it: torchtitan."""
    return (np.asarray(pp) == 1) | (p.workload.schedule != "gpipe")


RULES = (
    split_ranks,
    split_chunks,
    recomputed_layers,
    not_all_recomputed,
    block_recomputation,
    chunks_need_pipeline,
    enough_layers,
    layers_divide,
    microbatch_group,
    no_virtual_stages,
    gpipe_one_chunk,
    gpipe_launcher,
)
