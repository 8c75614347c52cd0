"""DeepSpeed's own launcher parser and DeepSpeedConfig over printed commands and JSON files; keys never read are faults.

Real: the launcher's parser, DeepSpeedConfig with all its sections, PipelineModule's partition. The data-parallel size
is handed in as by an engine.
"""

from __future__ import annotations

import itertools
import json
import os
import types
from typing import Any

import forks

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.launcher import runner
from deepspeed.runtime import config as ds
from deepspeed.runtime.pipe import module

READ: set[str] = set()


class Watched(dict[str, Any]):
    """A dict that remembers the keys that were asked for."""

    def __getitem__(self, key: str) -> Any:
        READ.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        READ.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        READ.add(str(key))
        return super().__contains__(key)


def check(plan: dict[str, Any]) -> None:
    """The command parses, the JSON means what the plan says, and nothing in it is ignored."""
    config, argv = plan["config"], plan["argv"]
    args = runner.parse_args(argv[1:])
    nodes = max(1, args.num_nodes)
    forks.expect("the number of processes", nodes * args.num_gpus, plan["world"])
    if nodes > 1:
        lines = plan["files"]["hostfile"].split("\n")[:-1]
        parsed = runner._parse_hostfile(lines)
        forks.expect("the slots of the host file", sum(parsed.values()), plan["world"])
    content = json.loads(plan["files"]["ds_config.json"])
    ds.dist = types.SimpleNamespace(get_rank=lambda *a, **k: 0, get_world_size=lambda *a, **k: plan["world"])
    mpu = types.SimpleNamespace(get_data_parallel_world_size=lambda: config["dp"])
    read = ds.DeepSpeedConfig(Watched(content), mpu=mpu)
    unread = sorted(set(content) - READ)
    if unread:
        raise forks.Refused(f"keys that DeepSpeed never reads: {unread}")
    forks.expect("gbs", read.train_batch_size, config["gbs"])
    forks.expect("mbs", read.train_micro_batch_size_per_gpu, config["mbs"])
    forks.expect("grad_acc", read.gradient_accumulation_steps, config["grad_acc"])
    hpz = plan["shard_group"] if plan["shard_copies"] > 1 else 1
    forks.expect("ranks of the second copy", read.zero_config.zero_hpz_partition_size, hpz)
    quantized = plan["zero_quantized"]
    for what in ("weights", "gradients"):
        seen = getattr(read.zero_config, f"zero_quantized_{what}")
        forks.expect(f"quantised {what}", seen, quantized in (what, "both"))
    forks.expect("zero", int(read.zero_optimization_stage), config["zero"])
    if config["pp"] > 1:
        cut = [sum(rank) for rank in config["layers_per_stage"]]
        forks.expect("layers per stage", _partition(sum(cut), config["pp"]), cut)


def _partition(layers: int, stages: int) -> list[int]:
    """Layers of each stage by DeepSpeed's own partition of the layers that Megatron-DeepSpeed's GPTModelPipe lists."""
    names = ["EmbeddingPipe", *["ParallelTransformerLayerPipe"] * layers, "RMSNorm", "LMHeadPipe"]
    specs = [_to_float16, *(module.LayerSpec(type(name, (torch.nn.Module,), {})) for name in names), _to_float16]
    pipe = types.SimpleNamespace(
        num_stages=stages,
        global_rank=1,
        _topo=types.SimpleNamespace(get_coord=lambda rank: types.SimpleNamespace(pipe=0)),
        _layer_specs=specs,
        _set_bounds=lambda **bounds: None,
    )
    pipe._find_layer_type = lambda kind: module.PipelineModule._find_layer_type(pipe, kind)
    module.PipelineModule._partition_layers(pipe, "type:transformer")
    first = 2  # the cast and the embedding come before the layers
    ends = [min(max(int(part) - first, 0), layers) for part in pipe.parts]
    return [end - start for start, end in itertools.pairwise(ends)]


def _to_float16(inputs: Any) -> Any:
    return inputs


if __name__ == "__main__":
    forks.run(check)
