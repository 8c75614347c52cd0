"""What someone runs today, read from a Megatron-LM command: the model, the workload, the configuration, and remarks.

Megatron-LM's own defaults fill what the command leaves out. Nothing is lost silently: an option that parsolve neither
understands nor knows to be without effect on the plan is reported.
Source: megatron/training/arguments.py of 0.12 to 0.20.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from parsolve.constraints.multi_token import APART_SINCE
from parsolve.errors import SpecError
from parsolve.evaluation import Violation
from parsolve.from_megatron_model import MODEL_OPTIONS, read_model
from parsolve.launchers.megatron import light_modules
from parsolve.megatron_words import Command, parse_command
from parsolve.specs import Cluster, Model
from parsolve.splits import from_model_order

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
PLAN_OPTIONS = frozenset(
    {
        *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
        *("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel"),
        *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
        *("--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers"),
        *("--decoder-last-pipeline-num-layers", "--account-for-embedding-in-pipeline-split"),
        *("--account-for-loss-in-pipeline-split", "--micro-batch-size", "--global-batch-size", "--seq-length"),
        *("--bf16", "--fp16", "--fp8-format", "--optimizer", "--use-distributed-optimizer", "--use-megatron-fsdp"),
        *("--use-custom-fsdp", "--data-parallel-sharding-strategy", "--recompute-granularity"),
        *("--recompute-activations", "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--moe-grouped-gemm", "--moe-token-dispatcher-type"),
        *("--num-distributed-optimizer-instances", "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
        "--rampup-batch-size",
        *("--train-iters", "--cp-comm-type", "--use-flash-attn", "--fp8-recipe", "--init-model-with-meta-device"),
    }
)
WITHOUT_EFFECT = re.compile(
    r"--(lr|min-lr|adam|weight-decay|clip-grad|init-method|seed|log|tensorboard|wandb|save|load|eval|exit|data|mock|split"
    r"|tokenizer|vocab-file|merge-file|train-samples|num-workers|dist|distributed-timeout|timing|no-load|no-save|ckpt"
    r"|attention-dropout|hidden-dropout|no-masked|no-bias|bias-|no-rope-fusion|use-mcore|transformer-impl|async|finetune"
    r"|override|use-checkpoint|manual-gc|no-create|attention-softmax|attention-backend|moe-aux|moe-z-loss|start-weight"
    r"|end-weight|no-gradient-accumulation|no-(check|ckpt)|profile|legacy|cross-entropy|no-persist|rerun|calculate|empty"
    r"|apply-layernorm-1p|decoupled-|tiktoken-|no-mmap|fp8-(amax|margin|interval)|eod-mask|reset-|loss-scale|hysteresis"
    r"|(initial|min)-loss-scale|rotary-interleaved|(use-rope|rope|rotary)-scaling|yarn-|mscale|no-position-embedding"
    r"|moe-router-(bias-update|topk-scaling|force)|moe-per-layer|nccl-communicator|non-persistent|object-storage"
    r"|enable-experimental|(no-)?one-logger|trust-remote|(valid|train|test)-data|per-split|use-dist-ckpt|auto-detect"
    r"|use-cpu-initialization|check-for-|use-persistent|null-tokenizer|skip-train|renormalize|num-dataset|te-rng"
    r"|use-pytorch-profiler|record-|straggler|vocab-extra|full-validation|multiple-validation|pretrained-checkpoint)"
)
"""Options about data, learning rate, logging, checkpoints and numerics: they do not change the plan."""


OTHER_PROGRAMS = re.compile(r"(pre)?train_(bert|t5|ict|retro|vision|vlm|mamba|hybrid|mimo|biencoder)\w*\.py")
OTHER_LAYERS = re.compile(
    r"--(hybrid-(override|layer)-pattern|is-hybrid-model|mamba-|heterogeneous-layers-config|encoder-num-layers"
    r"|decoder-num-layers|experimental-attention-variant|linear-attention-freq|vision-pretraining)"
)
"""State-space, per-layer, encoder and linear-attention models: a count by their --num-layers would be wrong."""
OPTIMIZERS = ("adam", "sgd")
LAYOUT = "--pipeline-model-parallel-layout"
CLOSE = 0.9
"""Likeness (difflib's ratio) from which an unknown option is taken for a slip of a known one."""


@dataclass(frozen=True)
class Today:
    """A command as read: workload fields that have an option, those of the ``stack`` that have none, ``--config``."""

    model: Model | None
    fields: dict[str, Any]
    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    stack: dict[str, Any] = field(default_factory=dict)


def read_megatron(source: str, cluster: Cluster, model: Model | None, version: tuple[int, ...]) -> Today:
    """Read a Megatron-LM line or script file that runs on the cluster.

    Parameters
    ----------
    model: when given, the shape on the line is left unread.

    Raises
    ------
    SpecError: an option that is needed is missing, or cannot be read.
    """
    command = parse_command(source)
    _check_program(command)
    slips = _slips(command)
    notes = [*command.loose, *_unknown(command, slips)]
    _check_world(command, cluster)
    shape = model or read_model(command, version, notes)
    tp, pp = command.number("--tensor-model-parallel-size", 1), command.number("--pipeline-model-parallel-size", 1)
    cp = command.number("--context-parallel-size", 1)
    for name, size in (("tensor", tp), ("pipeline", pp), ("context", cp)):
        if size < 1:
            raise SpecError("must be at least 1", f"--{name}-parallel-size")
    dp = max(1, cluster.num_gpus // (tp * pp * cp))
    mbs = command.number("--micro-batch-size", 0)
    seq_len = command.number("--seq-length", 0)
    for option, value in (("--micro-batch-size", mbs), ("--seq-length", seq_len)):
        if value < 1:
            raise SpecError("is needed", option)
    gbs = command.number("--global-batch-size", mbs * dp)
    config: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "mbs": mbs, "zero": _zero(command, version)}
    if shape.moe:
        config["ep"] = command.number("--expert-model-parallel-size", 1)
        config["etp"] = command.number("--expert-tensor-parallel-size", tp)
    elif command.number("--expert-model-parallel-size", 1) > 1:
        config["ep"] = command.number("--expert-model-parallel-size", 1)
    edp = cluster.num_gpus // max(1, config.get("etp", tp) * config.get("ep", 1) * pp)
    if dp * cp <= 1 and edp <= 1:
        config["zero"] = 0  # nothing to shard over: the flag has no effect
    modules = command.number("--mtp-num-layers", 0)
    config |= _cut(command, shape.num_layers, pp)
    config |= _recompute(command, shape, _fullest(config, shape.num_layers), notes)
    layout = command.text(LAYOUT)
    if layout is not None:
        config["mtp_apart"] = _modules_apart(layout, modules, pp, version, notes)
    precision = _precision(command, notes)
    fields = {
        "seq_len": seq_len,
        "gbs": gbs,
        "framework": "megatron",
        "precision": precision,
        "optimizer": _optimizer(command),
        "shard_group": _shard_group(command, dp * cp),
        "mtp_layers": modules,
        "sequence_parallel": None if tp == 1 else command.has("--sequence-parallel"),
    }
    faults = [*_slip_faults(slips), *_environment_faults(command, cluster, config)]
    if command.has("--rampup-batch-size"):
        notes.append(f"--rampup-batch-size: the estimate is for the batch of {gbs} that it ends with")
    slow = _slow(command, config, dp, shape)
    return Today(None if model else shape, fields, config, notes, slow, faults, _stack(command, precision))


def _check_program(command: Command) -> None:
    """Refuse what trains another kind of model."""
    if OTHER_PROGRAMS.fullmatch(command.script):
        raise SpecError(
            f"{command.script} trains no decoder of plain layers; pretrain_gpt.py's lines are read", "--from-megatron"
        )
    for name in command.options:
        if OTHER_LAYERS.match(name):
            raise SpecError("makes layers that are not modelled: only plain transformer decoders are read", name)
    if command.has("--yaml-cfg"):
        raise SpecError("the arguments are in that file: give it to --from-megatron itself", "--yaml-cfg")


def slip_of(name: str) -> str | None:
    """The option of Megatron-LM that was meant by one that it does not have: underscores, abbreviations, typing errors.

    Megatron-LM allows no abbreviations (allow_abbrev is off).
    """
    known = PLAN_OPTIONS | MODEL_OPTIONS
    if name in known:
        return None
    dashed = name.replace("_", "-")
    if dashed in known:
        return dashed
    longer = [option for option in sorted(known) if option.startswith(dashed)]
    if len(longer) == 1 and len(dashed) >= 8:
        return longer[0]
    near = [option for option in sorted(known) if re.sub(r"\d", "", option) != re.sub(r"\d", "", dashed)]
    return next(iter(difflib.get_close_matches(dashed, near, 1, CLOSE)), None)


def _slips(command: Command) -> dict[str, str]:
    found = {name: slip_of(name) for name in command.options if not WITHOUT_EFFECT.match(name)}
    return {name: option for name, option in found.items() if option is not None}


def _slip_faults(slips: dict[str, str]) -> list[Violation]:
    return [
        Violation("unknown_option", f"{name} is no option of Megatron-LM, which would not start: is it {option}?", {})
        for name, option in slips.items()
    ]


def _optimizer(command: Command) -> str:
    name = command.text("--optimizer", "adam") or ""
    if name not in OPTIMIZERS:
        raise SpecError(f"{name!r} is not known to parsolve ({', '.join(OPTIMIZERS)})", "--optimizer")
    return name


def _unknown(command: Command, slips: Collection[str]) -> list[str]:
    known = (*PLAN_OPTIONS, *MODEL_OPTIONS, *slips)
    odd = [
        " ".join([name, *values])
        for name, values in command.options.items()
        if name not in known and not WITHOUT_EFFECT.match(name)
    ]
    return [f"not understood, so not part of the estimate: {', '.join(odd)}"] if odd else []


def _check_world(command: Command, cluster: Cluster) -> None:
    texts = ["", ""]
    for names in (("--nnodes", "--nproc-per-node"), ("--num-nodes", "--num-gpus")):
        counts = [command.launcher.get(name, [""])[:1] for name in names]
        texts = [before or (values[0] if values else "") for before, values in zip(texts, counts, strict=True)]
    if all(text.isdecimal() for text in texts):
        processes = int(texts[0]) * int(texts[1])
        if processes != cluster.num_gpus:
            raise SpecError(
                f"the line starts {texts[0]}*{texts[1]} = {processes} processes, but {cluster.name} has "
                f"{cluster.num_gpus} GPUs: name the cluster that it runs on",
                "--from-megatron",
            )


def _precision(command: Command, notes: list[str]) -> str:
    if command.has("--fp8-format"):
        return "fp8"
    if command.has("--fp16"):
        return "fp16"
    if not command.has("--bf16"):
        notes.append("neither --bf16 nor --fp16: the line trains in fp32, the estimate is for bf16")
    return "bf16"


def _stack(command: Command, precision: str) -> dict[str, Any]:
    """Bytes of a gradient: 4 with bf16 weights, unless told to reduce in bf16; 2 with fp16, unless told to add in fp32.

    Source: megatron/training/arguments.py, accumulate_allreduce_grads_in_fp32.
    """
    if precision == "fp16":
        return {"gradient_bytes": 4} if command.has("--accumulate-allreduce-grads-in-fp32") else {}
    return {"gradient_bytes": 2} if command.has("--grad-reduce-in-bf16") else {}


def _zero(command: Command, version: tuple[int, ...]) -> int:
    if command.has("--use-megatron-fsdp") or command.has("--use-custom-fsdp"):
        default = "optim_grads_params" if version >= (0, 18) else "no_shard"
        strategy = command.text("--data-parallel-sharding-strategy", default)
        if strategy not in STRATEGIES:
            raise SpecError(f"{strategy!r} is none of {', '.join(STRATEGIES)}", "--data-parallel-sharding-strategy")
        return STRATEGIES[strategy]
    return int(command.has("--use-distributed-optimizer"))


def _shard_group(command: Command, ranks: int) -> int | None:
    """Ranks of one instance of the distributed optimizer; None where there is one."""
    option = "--num-distributed-optimizer-instances"
    copies = command.number(option, 1)
    if copies <= 1 or not command.has("--use-distributed-optimizer"):
        return None
    if ranks % copies or ranks == copies:
        raise SpecError(f"{copies} instances do not divide the dp*cp = {ranks} ranks into groups", option)
    return ranks // copies


def _recompute(command: Command, model: Model, fullest: int, notes: list[str]) -> dict[str, Any]:
    """What is recomputed; a note where the modules are others than those of selective or light.

    The block method counts layers of every (virtual) chunk, of which the fullest has so many.
    """
    if command.has("--recompute-activations"):
        return {"recompute": "selective"}
    kind = command.text("--recompute-granularity", "none")
    if kind not in ("none", "selective", "full"):
        raise SpecError(f"{kind!r} is neither selective nor full", "--recompute-granularity")
    if kind == "selective":
        return {"recompute": _modules(command, model, notes)}
    if kind != "full":
        return {"recompute": kind}
    method, layers = command.text("--recompute-method"), command.number("--recompute-num-layers", 0)
    if method not in ("uniform", "block"):
        raise SpecError("full recomputation needs uniform or block", "--recompute-method")
    if layers < 1:
        raise SpecError("full recomputation needs a number of layers from 1 up", "--recompute-num-layers")
    if method == "block" and layers < fullest:
        return {"recompute": "block", "recompute_layers": layers}
    if method == "uniform" and layers > 1:
        notes.append(
            f"--recompute-num-layers {layers}: Megatron keeps the input of every {layers}th layer and rebuilds "
            f"{layers} at a time; the estimate of memory is for one at a time"
        )
    return {"recompute": kind}


def _modules(command: Command, model: Model, notes: list[str]) -> str:
    """selective (core attention), light, or none of the modules that the estimate knows."""
    modules = set(command.options.get("--recompute-modules", []))
    if not modules - {"core_attn"}:
        return "selective"
    here = set(light_modules(model))
    counted = here if modules & here else modules & {"core_attn"}
    if modules != counted:
        notes.append(
            f"--recompute-modules {' '.join(sorted(modules))}: the estimate has "
            f"{' '.join(sorted(counted)) or 'no'} recomputation"
        )
    return "light" if modules & here else "selective" if counted else "none"


def _fullest(config: dict[str, Any], num_layers: int) -> int:
    """Layers of the fullest chunk."""
    given = config.get("layers_per_stage")
    if given:
        return max(int(layers) for rank in given for layers in rank)
    return -(-num_layers // (int(config["pp"]) * int(config.get("vpp", 1))))


def _cut(command: Command, num_layers: int, pp: int) -> dict[str, Any]:
    """The layer cut as the options say it; nothing where it is even."""
    layout = command.text(LAYOUT)
    if layout is not None:
        counts = layout_counts(layout)
        if len(counts) % pp:
            raise SpecError(f"{len(counts)} stages are not a multiple of pp={pp}", LAYOUT)
        if sum(counts) != num_layers:
            raise SpecError(f"has {sum(counts)} layers, the model {num_layers}", LAYOUT)
        return {"vpp": len(counts) // pp, "layers_per_stage": [list(rank) for rank in from_model_order(counts, pp)]}
    vpp = command.number("--num-virtual-stages-per-pipeline-rank", 1)
    size = command.number("--num-layers-per-virtual-pipeline-stage", 0)
    if size:
        if num_layers % (pp * size):
            raise SpecError(
                f"{num_layers} layers over pp={pp} do not divide into chunks of {size}",
                "--num-layers-per-virtual-pipeline-stage",
            )
        return {"vpp": num_layers // (pp * size)}
    first, last = (command.number(f"--decoder-{end}-pipeline-num-layers", 0) for end in ("first", "last"))
    extra = [command.has(f"--account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
    if not (first or last or any(extra)):
        return {"vpp": vpp}
    stages, rest = pp - (first > 0) - (last > 0), num_layers - first - last
    if first or last:
        if stages < 0 or (stages == 0) != (rest == 0) or (stages and rest % stages):
            raise SpecError(
                f"{rest} layers are left for {stages} middle stages, which must divide them: of {num_layers} layers "
                f"{first} are first and {last} last",
                "--decoder-last-pipeline-num-layers",
            )
        ranks = [*([first] if first else []), *[rest // max(stages, 1)] * stages, *([last] if last else [])]
        if any(n % vpp for n in ranks):
            raise SpecError(
                f"the stages of {ranks} layers do not divide into {vpp} chunks", "--decoder-first-pipeline…"
            )
        return {"vpp": vpp, "layers_per_stage": [[n // vpp] * vpp for n in ranks]}
    slots, odd = divmod(num_layers + sum(extra), pp * vpp)
    if odd:
        raise SpecError(f"{num_layers} + {sum(extra)} do not divide over pp*vpp = {pp * vpp}", "--account-for-…")
    counts = [slots] * (pp * vpp)
    counts[0] -= extra[0]
    counts[-1] -= extra[1]
    return {"vpp": vpp, "layers_per_stage": [list(rank) for rank in from_model_order(counts, pp)]}


def layout_counts(text: str) -> list[int]:
    """Decoder layers per stage of a layout string such as ``Et*3|(t*4|)*14t*2L``."""
    return [stage.count("t") for stage in _layout_stages(text)]


def _layout_stages(text: str) -> list[str]:
    """The letters of every stage."""

    def times(found: re.Match[str]) -> str:
        count = int(found[2])
        if count > 4096:
            raise SpecError("repeats too often", LAYOUT)
        return found[1].strip("()") * count

    flat = text.replace(",", "").replace(" ", "")
    for pattern in (r"(\([^()]*\))\*(\d{1,6})", r"([A-Za-z|])\*(\d{1,6})"):
        inner = pattern if pattern.startswith("([") else r"([A-Za-z])\*(\d{1,6})"
        flat = re.sub(inner, times, flat)
        flat = re.sub(pattern, times, flat)
    if re.search(r"[^EtmL|]", flat):
        raise SpecError(f"cannot read {text!r}: E, t, m, L, |, (…)*n are known", LAYOUT)
    return flat.split("|")


def _modules_apart(text: str, modules: int, pp: int, version: tuple[int, ...], notes: list[str]) -> bool:
    """Whether the prediction modules of a layout are on the stage before the output layer's, not beside it.

    They must be as many as are trained, on one stage, behind all layers; E starts the first stage and L ends the last.
    Source: pipeline_parallel_layer_layout.py, validate_layer_layout.
    """
    stages = _layout_stages(text)
    letters = "".join(stages)
    if letters.count("E") != 1 or not stages[0].startswith("E"):
        raise SpecError("must have one E, at the start: the embedding", LAYOUT)
    if letters.count("L") != 1 or not stages[-1].endswith("L"):
        raise SpecError("must have one L, at the end: the output layer and the loss", LAYOUT)
    found = [number for number, stage in enumerate(stages) if "m" in stage]
    count = letters.count("m")
    if count != modules:
        raise SpecError(f"has {count} m, but --mtp-num-layers is {modules}: they must agree", LAYOUT)
    if len(found) > 1:
        raise SpecError("has m on several stages: all must be on one", LAYOUT)
    if modules and "t" in letters.partition("m")[2]:
        raise SpecError("has layers (t) behind multi-token prediction (m)", LAYOUT)
    if not modules or found[0] == len(stages) - 1:
        return False
    if version < APART_SINCE:
        raise SpecError("has m apart from L, which Megatron-LM takes from 0.16 on", LAYOUT)
    if found[0] == len(stages) - 2 and pp > 2:
        return True
    notes.append(
        f"the layout has multi-token prediction on stage {found[0] + 1} of {len(stages)}; the estimate has it on the "
        "last, beside the output layer"
    )
    return False


def _environment_faults(command: Command, cluster: Cluster, config: dict[str, Any]) -> list[Violation]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = command.env.get(name)
    if config["zero"] >= 2 and value == "1":
        return [Violation("launch_environment", f"Megatron-FSDP needs {name} other than 1", {})]
    old = cluster.gpu.compute_capability < 10 and cluster.gpu.vendor != "amd"
    if config["zero"] < 2 and old and config["tp"] * config["cp"] > 1 and value != "1":
        found = "is not on the line" if value is None else f"is {value}"
        text = f"{name} {found}: tp or cp before Blackwell needs it to be 1 (or exported beforehand)"
        return [Violation("launch_environment", text, {})]
    return []


def _slow(command: Command, config: dict[str, Any], dp: int, model: Model) -> list[str]:
    """What costs time or memory for nothing."""
    advice = []
    if dp * config["cp"] > 1 and not command.has("--overlap-grad-reduce"):
        advice.append("gradients are reduced after the last backward pass: --overlap-grad-reduce hides most of it")
    if dp * config["cp"] > 1 and config["zero"] == 0 and command.text("--optimizer", "adam") == "adam":
        advice.append("every rank holds the whole optimizer: --use-distributed-optimizer shards it at no cost in time")
    if config["zero"] == 1 and not command.has("--overlap-param-gather"):
        advice.append("weights are gathered after the step: --overlap-param-gather hides it in the forward pass")
    if config["tp"] > 1 and not command.has("--sequence-parallel"):
        advice.append("tp without --sequence-parallel keeps norms and their activations whole on every rank")
    if model.moe and not command.has("--moe-grouped-gemm"):
        advice.append("experts run one after the other: --moe-grouped-gemm")
    if (
        model.moe
        and command.text("--moe-token-dispatcher-type", "allgather") == "allgather"
        and config.get("ep", 1) > 1
    ):
        advice.append("the all-gather dispatcher moves every token to every expert rank: use alltoall")
    if config["recompute"] == "full":
        advice.append(
            "full recomputation costs about a third more compute: see whether the plan fits without, or with "
            "--recompute-method block and fewer layers"
        )
    return advice
