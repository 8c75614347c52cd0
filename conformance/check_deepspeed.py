"""DeepSpeed's own launcher parser and DeepSpeedConfig over printed commands and JSON files; keys never read are faults.

Real: the launcher's parser, DeepSpeedConfig with all its sections. The data-parallel size is handed in as by an engine.
"""

from __future__ import annotations

import json
import os
import types
from typing import Any

import forks

os.environ.setdefault("DS_ACCELERATOR", "cpu")
from deepspeed.launcher import runner
from deepspeed.runtime import config as ds

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


if __name__ == "__main__":
    forks.run(check)
