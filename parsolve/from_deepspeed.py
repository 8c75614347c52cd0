"""What someone runs today, read from a DeepSpeed JSON file: batch, precision, ZeRO stage; the model is given beside it.

Source: deepspeed 0.19, runtime/config.py, runtime/zero/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
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
AUTO = "auto"
"""What transformers' Trainer fills in from its own arguments before DeepSpeed reads the file."""
REMOVED_ZERO = frozenset({"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"})
REMOVED = frozenset({"elasticity", "amp", "nebula", "compression_training", "curriculum_learning", "sparse_attention"})
OPTIMIZERS = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "deepspeedcpuadam": "adam", "sgd": "sgd"}
OFFLOADS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params")


def read_deepspeed(
    source: str, cluster: Cluster, axes: dict[str, int], given: Mapping[str, Any] | None = None
) -> Today:
    """Read a DeepSpeed JSON file.

    Parameters
    ----------
    axes: what ``--config`` says: tp, pp, cp, which are not in the file; mbs and grad_acc where the file has ``auto``.
    given: gbs, precision and optimizer of the command line, which fill in what is ``auto`` in the file.

    Raises
    ------
    SpecError: no such file, or a batch that cannot be worked out.
    """
    given = given or {}
    data = read_file(Path(source))
    zero = data.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise SpecError("must be an object", f"{source}: zero_optimization")
    _check_precision(data, source)
    config = _axes(data, axes, source)
    size = 1
    for axis in ("tp", "pp", "cp"):
        size *= config.get(axis, 1)
    dp = max(1, cluster.num_gpus // size)
    gbs, mbs, steps, faults = _batch(data, dp, source, {**given, **axes})
    stage = _whole(zero, "stage", f"{source}: zero_optimization", 0) or 0
    if stage > 3:
        raise SpecError(f"{stage} is not a ZeRO stage; 0, 1, 2 and 3 are", f"{source}: zero_optimization: stage")
    read = {"mbs": mbs, "grad_acc": steps, "zero": stage if dp * config.get("cp", 1) > 1 else 0}
    for axis, value in read.items():
        if config.setdefault(axis, value) != value:
            raise SpecError(f"--config says {axis}={config[axis]}, the file {value}", source)
    fields = {
        "gbs": gbs,
        "framework": "deepspeed",
        "precision": _precision(data, given),
        "optimizer": _optimizer(data, source),
        "shard_group": _second_copy(zero, config["zero"], dp, source),
        "zero_quantized": _quantized(zero, config["zero"], source),
    }
    notes = _notes(data, zero)
    if AUTO in (data.get(BATCH), data.get(MICRO), data.get(STEPS)):
        notes.append(f"auto is taken as transformers would fill it in: batch {gbs} = mbs {mbs} * {steps} * dp {dp}")
    return Today(None, fields, config, notes, _slow(zero, dp), [*faults, *_removed(data)])


def _whole(data: dict[str, Any], key: str, source: str, default: int | None = None, minimum: int = 0) -> int | None:
    value = data.get(key, default)
    if value == AUTO:
        raise SpecError("is 'auto', which only transformers fills in: write the number", f"{source}: {key}")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
        raise SpecError(f"{value!r} is not a whole number from {minimum} up", f"{source}: {key}")
    return value


def _axes(data: dict[str, Any], axes: dict[str, int], source: str) -> dict[str, Any]:
    config: dict[str, Any] = dict(axes)
    section = data.get("tensor_parallel", {})
    tp = _whole(section, "autotp_size", f"{source}: tensor_parallel") if isinstance(section, dict) else None
    cp = _whole(data, "sequence_parallel_size", source, minimum=1)
    for axis, value in (("tp", tp), ("cp", cp)):
        if value and config.setdefault(axis, value) != value:
            raise SpecError(f"--config says {axis}={config[axis]}, the file {value}", source)
    return config


def _batch(
    data: dict[str, Any], dp: int, source: str, given: Mapping[str, Any]
) -> tuple[int, int, int, list[Violation]]:
    """The batch triple, worked out as DeepSpeed does; a product that is not the batch is a violation.

    ``auto`` comes from the command line, as transformers takes it from its own.
    """
    names = {BATCH: "gbs", MICRO: "mbs", STEPS: "grad_acc"}
    gbs, mbs, steps = (
        given.get(name) if data.get(key) == AUTO else _whole(data, key, source, minimum=1)
        for key, name in names.items()
    )
    if gbs is None and mbs is None and AUTO in (data.get(BATCH), data.get(MICRO)):
        raise SpecError(
            "is 'auto', which transformers fills in from its arguments: give them here as --gbs 256, or "
            "--config mbs=1,grad_acc=8",
            f"{source}: {BATCH if data.get(BATCH) == AUTO else MICRO}",
        )
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


def _check_precision(data: dict[str, Any], source: str) -> None:
    for key in ("fp16", "bf16", "bfloat16"):
        section = data.get(key)
        if section is not None and not isinstance(section, dict):
            raise SpecError(f'must be an object such as {{"enabled": true}} (got {section!r})', f"{source}: {key}")
        enabled = (section or {}).get("enabled", False)
        if enabled != AUTO and not isinstance(enabled, bool):
            raise SpecError(f"{enabled!r} is neither true nor false", f"{source}: {key}: enabled")


def _on(data: dict[str, Any], *keys: str) -> bool:
    return any(isinstance(data.get(key), dict) and data[key].get("enabled") in (True, "auto") for key in keys)


def _is_auto(data: dict[str, Any], key: str) -> bool:
    return isinstance(data.get(key), dict) and data[key].get("enabled") == AUTO


def _precision(data: dict[str, Any], given: Mapping[str, Any]) -> str:
    """What is enabled; of two that are ``auto`` the one that the command line names."""
    both = _on(data, "fp16") and _on(data, "bf16", "bfloat16")
    if both and (_is_auto(data, "fp16") or _is_auto(data, "bf16") or _is_auto(data, "bfloat16")):
        certain = [key for key in ("fp16", "bf16") if not _is_auto(data, key)]
        wanted = given.get("precision")
        return certain[0] if len(certain) == 1 else "fp16" if wanted == "fp16" else "bf16"
    return "fp16" if _on(data, "fp16") and not _on(data, "bf16", "bfloat16") else "bf16"


def _second_copy(zero: dict[str, Any], stage: int | None, dp: int, source: str) -> int | None:
    """Ranks that share ZeRO++'s second copy of the weights."""
    size = _whole(zero, "zero_hpz_partition_size", f"{source}: zero_optimization", 1) or 1
    return size if stage == 3 and 1 < size < dp else None


def _quantized(zero: dict[str, Any], stage: int | None, source: str) -> str | None:
    """What ZeRO++ sends quantised; the other stages do not look at the keys."""
    found = []
    for what in ("weights", "gradients"):
        value = zero.get(f"zero_quantized_{what}", False)
        if not isinstance(value, bool):
            raise SpecError(
                f"{value!r} is neither true nor false", f"{source}: zero_optimization: zero_quantized_{what}"
            )
        found += [what] if value and stage == 3 else []
    return "both" if len(found) == 2 else found[0] if found else None


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
    zero = data.get("zero_optimization")
    faults += [
        Violation("removed_key", f"DeepSpeed 0.19 refuses the key zero_optimization.{key}", {})
        for key in sorted(REMOVED_ZERO & set(zero if isinstance(zero, dict) else ()))
    ]
    if isinstance(zero, dict) and zero.get("zero_quantized_gradients") is True and zero.get("stage") == 3:
        half = _on(data, "fp16") or data.get("communication_data_type") in ("fp16", "float16", "half")
        if not half:
            text = (
                "zero_quantized_gradients: DeepSpeed's kernel takes the bits of bf16 gradients for fp16; set "
                "communication_data_type to fp16"
            )
            faults.append(Violation("quantized_gradients", text, {}))
    certain = [any(_on(data, k) and not _is_auto(data, k) for k in keys) for keys in (("fp16",), ("bf16", "bfloat16"))]
    if all(certain):
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
