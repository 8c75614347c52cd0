"""torchtitan's own configuration, mesh, model and pipeline cut over printed lines.

``TORCHTITAN=folder python check_torchtitan.py < plans``. Real: the parser, every configuration's checks, ParallelDims
and its mesh on torch's fake process group, the model's own checks and its parameters on the meta device.
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
from torchtitan.components.quantization import float8  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

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
    order = [rank[chunk] for chunk in range(config["vpp"]) for rank in config["layers_per_stage"]]
    forks.expect("layers per stage", counts, order)
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    many = issubclass(get_schedule_class(job.parallelism.pipeline_parallel_schedule), PipelineScheduleMulti)
    forks.expect("a schedule of several chunks", many, config["vpp"] > 1)


if __name__ == "__main__":
    forks.run(check)
