"""torchtitan's own configuration, mesh, model and pipeline cut over printed lines.

``TORCHTITAN=folder python check_torchtitan.py < plans``. Real: the parser, every configuration's checks, ParallelDims
and its mesh on torch's fake process group, the model's own checks and its parameters on the meta device, the cut, the
pipeline schedule that torchtitan builds of it and the passes of every rank in it.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import forks
import stubs

sys.path.insert(0, os.environ["TORCHTITAN"])
logging.disable(logging.CRITICAL)
import torch  # noqa: E402
from torch.distributed.pipelining.schedules import PipelineScheduleMulti  # noqa: E402
from torchtitan.components.quantization import float8  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims, pipeline_parallel  # noqa: E402

float8.has_cuda_capability = lambda *a, **k: True  # no GPU here


def check(plan: dict[str, Any]) -> None:
    """Parse with the model's file beside it; compare the mesh, the batch, the model and the cut."""
    config = plan["config"]
    os.environ |= plan["env"]
    script, words = forks.torchrun_part(plan["argv"], plan["world"])
    forks.expect("the module", script, "torchtitan.train")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in plan["files"].items():
            Path(folder, name).write_text(text)
        sys.path.insert(0, folder)
        job = ConfigManager().parse_args(words)
    stubs.pretend_rank(plan["world"])
    dims = ParallelDims.from_config(job.parallelism, plan["world"])
    dims.build_mesh()
    copies = plan["shard_copies"] if config["zero"] else config["dp"]
    seen = {axis: getattr(dims, axis) for axis in ("tp", "pp", "cp", "ep")}
    forks.expect("the grid", seen, {axis: config[axis] for axis in seen})
    forks.expect("dp", (dims.dp_replicate, dims.dp_shard), (copies, config["dp"] // copies))
    forks.expect("the rest of the expert grid", dims.dp_shard * dims.cp * dims.tp % dims.ep, 0)
    _batch(job, dims, config)
    model = job.model_spec.model
    model.update_from_config(config=job)
    with torch.device("meta"):
        built = model.build()
    forks.expect("parameters", sum(p.numel() for p in built.parameters()), plan["params"])
    _cut(job, config)
    if config["pp"] > 1:
        _schedule(job, dims, built, plan)
    kind = type(job.activation_checkpoint).__qualname__ if job.activation_checkpoint else "none"
    forks.expect("recomputation", kind, {"none": "none", "full": "FullAC.Config"}[config["recompute"]])


def _batch(job: Any, dims: Any, config: dict[str, Any]) -> None:
    training, parallel = job.training, job.parallelism
    ranks = dims.dp_replicate * dims.dp_shard
    divisor = (dims.tp if parallel.enable_sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
    forks.expect("what is left of the sequence", training.seq_len % divisor, 0)
    forks.expect("gbs", training.global_batch_size, config["gbs"])
    forks.expect("what is left of the batch", training.global_batch_size % (training.local_batch_size * ranks), 0)
    rounds = training.global_batch_size // (training.local_batch_size * ranks)
    size = parallel.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    forks.expect("microbatches", rounds * training.local_batch_size // size, config["grad_acc"])
    forks.expect("mbs", size, config["mbs"])


def _cut(job: Any, config: dict[str, Any]) -> None:
    stages = job.parallelism.module_fqns_per_model_part
    if config["pp"] == 1:
        forks.expect("the cut", stages, None)
        return
    counts = [sum(name.startswith("layers.") for name in stage) for stage in stages]
    name, pp = job.parallelism.pipeline_parallel_schedule, config["pp"]
    order = []
    for rank in range(pp):
        places = pipeline_parallel._get_pp_rank_to_stage_indices_mapping(rank, pp, name, len(stages))
        order.append([counts[stage] for stage in places])
    forks.expect("layers per stage", order, config["layers_per_stage"])


def _schedule(job: Any, dims: Any, built: torch.nn.Module, plan: dict[str, Any]) -> None:
    """Build the first rank's stages and the schedule as torchtitan does; compare the passes of all ranks."""
    parallel, count = job.parallelism, len(job.parallelism.module_fqns_per_model_part)
    pipeline_parallel._get_pipeline_metadata(dims, parallel, job.model_spec.model)
    mesh = dims.get_mesh("pp")
    stages, _ = pipeline_parallel._pipeline_module_split(
        built, mesh, parallel.pipeline_parallel_schedule, torch.device("meta"), parallel.module_fqns_per_model_part
    )
    schedule = pipeline_parallel._build_pipeline_schedule(
        parallelism=parallel, local_batch_size=job.training.local_batch_size, stages=stages, loss_fn=lambda *a: None
    )
    forks.expect("stages", schedule._num_stages, count)
    if isinstance(schedule, PipelineScheduleMulti):
        order = schedule.pipeline_order_with_comms
        seen = [" ".join(filter(None, map(_word, order[rank]))) for rank in range(dims.pp)]
    else:
        seen = [_run(schedule, rank) for rank in range(dims.pp)]
    for rank, (mine, theirs) in enumerate(zip(plan["passes"], seen, strict=True)):
        forks.expect(f"the order of rank {rank} in {parallel.pipeline_parallel_schedule}", theirs, mine)


class _Recorder:
    """A stage that writes down its passes; it neither sends nor receives."""

    def __init__(self, index: int) -> None:
        self.stage_index, self.passes = index, []  # type: ignore[var-annotated]

    def forward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.passes.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **kwargs: object) -> None:
        self.passes.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: []


def _run(schedule: Any, rank: int) -> str:
    """The passes of a schedule of single stages, by the code that runs it."""
    schedule._stage = stage = _Recorder(rank)
    nothing = [()] * schedule._n_microbatches
    schedule._check_inputs = lambda *args: (nothing, nothing)
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(schedule, name, lambda *args: None)
    schedule._step_microbatches()
    return " ".join(stage.passes)


def _word(action: Any) -> str:
    """A pass as the plan writes it, nothing for what is no pass."""
    if action.sub_actions:
        return "+".join(map(_word, action.sub_actions))
    kind = action.computation_type.value
    return f"{action.stage_index}{kind}{action.microbatch_index}" if kind in ("F", "B", "I", "W") else ""


if __name__ == "__main__":
    forks.run(check)
