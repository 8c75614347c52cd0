"""What someone runs today, read from a DeepSpeed JSON file: batch, precision, ZeRO stage; the model is given beside it.

Source: deepspeed 0.19, runtime/config.py, runtime/zero/config.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parsolve.errors import SpecError
from parsolve.evaluation import Violation
from parsolve.from_megatron import Today
from parsolve.loading import read_file
from parsolve.specs import Cluster

BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
UNDERSTOOD = frozenset({BATCH, MICRO, STEPS, "bf16", "bfloat16", "fp16", "zero_optimization", "optimizer"})
PARALLEL = frozenset({"tensor_parallel", "sequence_parallel_size", "data_parallel_size"})
WITHOUT_EFFECT = frozenset(
    {
        *("gradient_clipping", "scheduler", "steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard"),
        *(
            "wandb",
            "csv_monitor",
            "comet",
            "flops_profiler",
            "comms_logger",
            "prescale_gradients",
            "checkpoint",
            "dataloader",
        ),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "memory_breakdown", "disable_allgather"),
        *(
            "communication_data_type",
            "data_types",
            "seq_parallel_communication_data_type",
            "pipeline",
            "activation_checkpointing",
        ),
        *("gradient_predivide_factor", "dataloader_drop_last", "load_universal_checkpoint", "compile"),
    }
)
REMOVED = frozenset({"elasticity", "amp", "nebula", "compression_training", "curriculum_learning", "sparse_attention"})
OPTIMIZERS = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "deepspeedcpuadam": "adam", "sgd": "sgd"}
OFFLOADS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params")


def read_deepspeed(source: str, cluster: Cluster, axes: dict[str, int]) -> Today:
    """Read a DeepSpeed JSON file.

    Parameters
    ----------
    axes: what ``--config`` says of tp, pp, cp, which are not in the file.

    Raises
    ------
    SpecError: no such file, or a batch that cannot be worked out.
    """
    data = read_file(Path(source))
    zero = data.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise SpecError("must be an object", f"{source}: zero_optimization")
    config = _axes(data, axes, source)
    size = 1
    for axis in ("tp", "pp", "cp"):
        size *= config.get(axis, 1)
    dp = max(1, cluster.num_gpus // size)
    gbs, mbs, steps, faults = _batch(data, dp, source)
    config |= {
        "mbs": mbs,
        "grad_acc": steps,
        "zero": _whole(zero, "stage", source, 0) if dp * config.get("cp", 1) > 1 else 0,
    }
    fields = {
        "gbs": gbs,
        "framework": "deepspeed",
        "precision": _precision(data),
        "optimizer": _optimizer(data, source),
    }
    return Today(None, fields, config, _notes(data, zero), _slow(zero, dp), [*faults, *_removed(data)])


def _whole(data: dict[str, Any], key: str, source: str, default: int | None = None) -> int | None:
    value = data.get(key, default)
    if value == "auto":
        raise SpecError(
            "is 'auto', which only the Hugging Face integration fills in: write the number", f"{source}: {key}"
        )
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise SpecError(f"{value!r} is not a whole number", f"{source}: {key}")
    return value


def _axes(data: dict[str, Any], axes: dict[str, int], source: str) -> dict[str, Any]:
    config: dict[str, Any] = dict(axes)
    section = data.get("tensor_parallel", {})
    tp = _whole(section, "autotp_size", source) if isinstance(section, dict) else None
    cp = _whole(data, "sequence_parallel_size", source)
    for axis, value in (("tp", tp), ("cp", cp)):
        if value and config.setdefault(axis, value) != value:
            raise SpecError(f"--config says {axis}={config[axis]}, the file {value}", source)
    return config


def _batch(data: dict[str, Any], dp: int, source: str) -> tuple[int, int, int, list[Violation]]:
    """The batch triple, worked out as DeepSpeed does; a product that is not the batch is a violation."""
    gbs, mbs, steps = (_whole(data, key, source) for key in (BATCH, MICRO, STEPS))
    if gbs is None and mbs is None:
        raise SpecError(f"needs {BATCH} or {MICRO}", source)
    if mbs is None:
        steps = steps or 1
        mbs = max(1, (gbs or 1) // (steps * dp))
    elif steps is None:
        steps = max(1, (gbs or mbs * dp) // (mbs * dp))
    gbs = mbs * steps * dp if gbs is None else gbs
    if gbs == mbs * steps * dp:
        return gbs, mbs, steps, []
    text = (
        f"{BATCH} {gbs} is not {MICRO} * {STEPS} * dp = {mbs}*{steps}*{dp} = {mbs * steps * dp}; drop one of the three"
    )
    return gbs, mbs, steps, [Violation("batch_triple", text, {"gbs": gbs, "mbs": mbs, "grad_acc": steps, "dp": dp})]


def _on(data: dict[str, Any], *keys: str) -> bool:
    return any(isinstance(data.get(key), dict) and data[key].get("enabled") in (True, "auto") for key in keys)


def _precision(data: dict[str, Any]) -> str:
    return "fp16" if _on(data, "fp16") and not _on(data, "bf16", "bfloat16") else "bf16"


def _optimizer(data: dict[str, Any], source: str) -> str:
    section = data.get("optimizer", {})
    name = str(section.get("type", "adam")) if isinstance(section, dict) else "adam"
    if name.lower() not in OPTIMIZERS:
        raise SpecError(
            f"the optimizer {name!r} is not known to parsolve (Adam, AdamW, SGD)", f"{source}: optimizer.type"
        )
    return OPTIMIZERS[name.lower()]


def _notes(data: dict[str, Any], zero: dict[str, Any]) -> list[str]:
    known = UNDERSTOOD | PARALLEL | WITHOUT_EFFECT | REMOVED
    notes = []
    odd = sorted(key for key in data if key not in known and not key.startswith("_"))
    if odd:
        notes.append(f"not understood, so not part of the estimate (DeepSpeed ignores keys it lacks): {', '.join(odd)}")
    if not _on(data, "bf16", "bfloat16", "fp16"):
        notes.append("neither bf16 nor fp16 is enabled: the file trains in fp32, the estimate is for bf16")
    offloads = [name for name in OFFLOADS if zero.get(name) and zero[name] != {"device": "none"}]
    if offloads:
        notes.append(f"{' and '.join(offloads)}: the estimate keeps everything on the GPU")
    return notes


def _removed(data: dict[str, Any]) -> list[Violation]:
    faults = [
        Violation("removed_key", f"DeepSpeed 0.19 refuses the key {key}", {}) for key in sorted(REMOVED & set(data))
    ]
    if _on(data, "fp16") and _on(data, "bf16", "bfloat16"):
        faults.append(Violation("one_precision", "fp16 and bf16 exclude each other", {}))
    return faults


def _slow(zero: dict[str, Any], dp: int) -> list[str]:
    advice = []
    stage = zero.get("stage", 0)
    if stage == 0 and dp > 1:
        advice.append("every rank holds the whole optimizer: stage 1 shards it at no cost in time")
    if stage in (1, 2) and not zero.get("overlap_comm"):
        advice.append("gradients are reduced after the backward pass: overlap_comm hides most of it")
    return advice
