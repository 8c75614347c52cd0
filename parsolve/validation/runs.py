"""A table of measured runs, each row read into a problem and a configuration with what had to be assumed."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from parsolve.config import Config
from parsolve.errors import ParsolveError, SpecError
from parsolve.loading import load_cluster
from parsolve.presets import gpu_system, load_gpu
from parsolve.problem import Problem
from parsolve.profiles import choose_profile, generation, load_profile, profile_names
from parsolve.specs import MLA, Cluster, Model, MoE, Network, Profile, Recompute, Workload
from parsolve.splits import Layers, balanced
from parsolve.validation.cells import Row, Unreadable, moe_layers, nics, number, switch, text, whole

FRAMEWORKS = {"megatron": "megatron", "megatron-deepspeed": "deepspeed", "deepspeed": "deepspeed"}
"""software_family and the framework whose conventions it follows; the others are generic."""
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp8"}
KERNELS = {
    "flash": "flash2",
    "flash2": "flash2",
    "flash1": "flash1",
    "fused_softmax": "fused_softmax",
    "unfused": "unfused",
}
OMNI_PATH = "jean-zay-a100"
"""The shipped cluster whose NIC stands for this fabric: its adapters do not read GPU memory by themselves."""
GIB = 2**30


@dataclass(frozen=True)
class Run:
    """One row: what was run, what was measured, what had to be assumed.

    ``step_s`` and ``memory_bytes`` are None where nothing was measured. ``uses`` are the purposes the row may serve.
    ``key`` is equal for runs that differ in layout and batch only.
    """

    row_id: str
    source: str
    group: str
    uses: frozenset[str]
    problem: Problem
    config: Config
    stack: str
    step_s: float | None
    memory_bytes: float | None
    meter: str
    stage: str
    outcome: str
    assumptions: tuple[str, ...]
    row: Row
    key: Hashable


@dataclass
class Runs:
    """The rows that can be evaluated, and why the others cannot: ``skipped`` holds (uses, reason)."""

    runs: list[Run] = field(default_factory=list)
    skipped: list[tuple[frozenset[str], str]] = field(default_factory=list)

    def reasons(self) -> dict[str, int]:
        """Skipped rows by reason."""
        return dict(sorted(Counter(reason for _, reason in self.skipped).items()))

    def assumptions(self) -> dict[str, int]:
        """How many runs needed each assumption."""
        return dict(Counter(a for run in self.runs for a in run.assumptions).most_common())


def read_runs(
    source: str | Path | Iterable[Mapping[str, str]],
    *,
    where: Mapping[str, str] | None = None,
    profile: Profile | str | Path | None = None,
) -> Runs:
    """Read a table of runs.

    Parameters
    ----------
    source: a CSV file with the columns of the published measurements (fewer will do), or rows.
    where: keep the rows whose cells equal these values (numbers compared as numbers).
    profile: efficiency constants for every run; None: the shipped one for each run's software and hardware.

    Raises
    ------
    SpecError: the file cannot be read, or a column of ``where`` is not in it.
    """
    rows = _rows(source) if isinstance(source, (str, Path)) else list(source)
    for column in where or {}:
        if rows and column not in rows[0]:
            raise SpecError(f"there is no column {column!r}; columns: {', '.join(rows[0])}", "--where")
    given = load_profile(profile) if profile is not None else None
    result = Runs()
    problems: dict[Hashable, Problem] = {}
    for index, row in enumerate(rows):
        if not all(_same(text(row, column), value) for column, value in (where or {}).items()):
            continue
        uses = _uses(row)
        if not text(row, "mbs") or not text(row, "num_heads"):
            uses -= {"time", "rank"}  # no estimate is due for such a row
        try:
            result.runs.append(_read(row, index, uses, given, problems))
        except Unreadable as reason:
            result.skipped.append((uses, str(reason)))
        except ParsolveError as error:
            result.skipped.append((uses, str(error)))
    return result


def _rows(path: str | Path) -> list[dict[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"cannot be read: {error}", str(path)) from None


def _same(cell: str, value: str) -> bool:
    try:
        return float(cell) == float(value)
    except ValueError:
        return cell.lower() == value.strip().lower()


def _uses(row: Row) -> frozenset[str]:
    """What the row may serve: its use_for, or, in a table without that column, what its cells allow."""
    if "use_for" in row:
        return frozenset(part.strip() for part in text(row, "use_for").split(";") if part.strip())
    uses = set()
    if text(row, "step_time_s") or text(row, "tokens_per_s_per_gpu"):
        uses |= {"time", "rank"}
    if text(row, "peak_mem_gb"):
        uses.add("memory")
    if text(row, "outcome") in ("ok", "oom"):
        uses.add("oom")
    return frozenset(uses)


class _Assumed:
    """Collects what had to be assumed for a row."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)


def _read(
    row: Row, index: int, uses: frozenset[str], profile: Profile | None, problems: dict[Hashable, Problem]
) -> Run:
    assumed = _Assumed()
    cluster = _cluster(row, assumed)
    model = _model(row)
    if not text(row, "vocab"):
        assumed("vocab 51200")
    stack = text(row, "software_family") or "other"
    framework = text(row, "framework").lower()
    if stack == "other":  # no family: a profile of the framework itself, where one is shipped
        stack = framework or stack
    seq_len = whole(row, "seq_len")
    config = _config(row, cluster, model, assumed)
    options = _options(row, stack, cluster, assumed)
    if f"{framework}-{generation(cluster.gpu)}" in profile_names():  # goes before that of its family
        stack = framework
    if options.get("blocking_launches"):
        stack += "-blocking"
    chosen = profile or load_profile(choose_profile(stack, cluster.gpu))
    key = (_model_cells(row), cluster.name, seq_len, tuple(sorted(options.items())), chosen.name)
    if key not in problems:
        workload = Workload(seq_len=seq_len, gbs=config.gbs, **options)
        problems[key] = Problem(cluster, model, workload, profile=chosen)
    step = _step_time(row, config, cluster, seq_len)
    peak = number(row, "peak_mem_gb")
    return Run(
        row_id=text(row, "row_id") or f"row {index + 1}",
        source=text(row, "source_id") or "own",
        group=text(row, "group_id") or _group(row),
        uses=uses,
        problem=problems[key],
        config=config,
        stack=stack,
        step_s=step,
        memory_bytes=peak * GIB if peak else None,
        meter=text(row, "memory_meter") or "unknown",
        stage=text(row, "memory_stage") or "unknown",
        outcome=text(row, "outcome"),
        assumptions=tuple(assumed.lines),
        row=row,
        key=key,
    )


def _group(row: Row) -> str:
    names = ("model_name", "num_layers", "hidden", "gpu", "num_gpus", "seq_len", "gbs_sequences", "precision")
    return "/".join(text(row, name) for name in names)


def _step_time(row: Row, config: Config, cluster: Cluster, seq_len: int) -> float | None:
    step = number(row, "step_time_s")
    rate = number(row, "tokens_per_s_per_gpu")
    if step is None and rate:
        return config.gbs * seq_len / (cluster.num_gpus * rate)
    return step


# ---- cluster -------------------------------------------------------------------------------------------------
def _cluster(row: Row, assumed: Callable[[str], None]) -> Cluster:
    world = whole(row, "num_gpus", _smallest_world(row, assumed))
    name = text(row, "gpu")
    if not name:
        raise Unreadable("gpu is not stated")
    per_host = whole(row, "gpus_per_node", 8 if world >= 8 else world)
    fabric = text(row, "interconnect")
    if not fabric and world > per_host:
        assumed("interconnect: the GPU preset's usual machine")
    return _build_cluster(name, world, per_host, fabric)


def _smallest_world(row: Row, assumed: Callable[[str], None]) -> int | None:
    """GPUs of a row that states none: the stated dp, else one, times tp*pp*cp, wide enough for the experts."""
    if text(row, "num_gpus"):
        return None
    ranks = whole(row, "tp", 1) * whole(row, "pp", 1) * whole(row, "cp", 1) * whole(row, "dp", 1)
    assumed("num_gpus: the smallest world that holds the layout")
    return math.lcm(ranks, whole(row, "ep", 1) * whole(row, "pp", 1))


@cache
def _build_cluster(name: str, world: int, per_host: int, fabric: str) -> Cluster:
    gpu, system = load_gpu(name), gpu_system(name)
    domain = system.domain_size if system.domain_size > system.gpus_per_host else per_host
    used = max(d for d in range(1, min(world, domain) + 1) if world % d == 0)
    nic, count = system.nic, system.nics_per_host
    stated = nics(fabric, per_host)
    if stated:
        count = stated[0]
        nic = Network(
            kind=system.nic.kind,
            bandwidth=stated[1] * 1e9 / 8,
            latency=system.nic.latency,
            efficiency=load_cluster(OMNI_PATH).nic.efficiency if "omni-path" in fabric.lower() else 1.0,
        )
    elif per_host != system.gpus_per_host:
        count = max(1, count * per_host // system.gpus_per_host)
    return Cluster(
        name=f"{gpu.name}:{world // used}x{used}|{count}x{nic.bandwidth * nic.efficiency:g}",
        gpu=gpu,
        domains=world // used,
        gpus_per_domain=used,
        domain_size=domain,
        gpus_per_host=used if used % min(per_host, used) else min(per_host, used),
        fast_link=system.fast_link,
        nic=nic,
        nics_per_host=count,
    )


# ---- model ---------------------------------------------------------------------------------------------------
MODEL_COLUMNS = (
    *("model_name", "num_layers", "hidden", "ffn_hidden", "num_heads", "num_kv_heads", "head_dim", "vocab"),
    *("gated_mlp", "num_experts", "moe_top_k", "moe_ffn_hidden", "shared_expert_ffn", "moe_layer_freq", "mla"),
    *("tied_embeddings", "seq_len"),
)


def _model_cells(row: Row) -> tuple[str, ...]:
    return tuple(text(row, name) for name in MODEL_COLUMNS)


def _model(row: Row) -> Model:
    return _build_model(_model_cells(row))


@cache
def _build_model(cells: tuple[str, ...]) -> Model:
    row = dict(zip(MODEL_COLUMNS, cells, strict=True))
    layers, hidden, heads = whole(row, "num_layers"), whole(row, "hidden"), whole(row, "num_heads")
    gated = switch(row, "gated_mlp", True)
    moe = None
    if number(row, "num_experts"):
        shared = number(row, "shared_expert_ffn") or 0
        moe = MoE(
            num_experts=whole(row, "num_experts"),
            top_k=whole(row, "moe_top_k"),
            ffn_size=whole(row, "moe_ffn_hidden", whole(row, "ffn_hidden", 4 * hidden)),
            shared_ffn_size=int(shared),
            dense_layers=moe_layers(row["moe_layer_freq"], layers),
        )
    mla = None
    if switch(row, "mla"):
        query = 1536 if hidden >= 4096 else None
        mla = MLA(q_lora_rank=query, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    if hidden % heads and not number(row, "head_dim"):
        raise Unreadable("head_dim is not stated and heads do not divide hidden")
    return Model(
        name=row["model_name"] or "model",
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=whole(row, "ffn_hidden", 4 * hidden),
        num_heads=heads,
        num_kv_heads=whole(row, "num_kv_heads", heads),
        head_dim=whole(row, "head_dim", max(1, hidden // heads)),
        vocab_size=whole(row, "vocab", 51200),
        gated_mlp=gated,
        activation="silu" if gated else "gelu",
        norm="rms" if gated else "layer",
        norm_bias=not gated,
        tied_embeddings=switch(row, "tied_embeddings"),
        position="rope" if gated else "learned",
        max_positions=None if gated else whole(row, "seq_len"),
        moe=moe,
        mla=mla,
    )


# ---- workload and layout -------------------------------------------------------------------------------------
def _options(row: Row, stack: str, cluster: Cluster, assumed: Callable[[str], None]) -> dict[str, Any]:
    modern = cluster.gpu.compute_capability >= 8.0
    precision = text(row, "precision")
    if not precision:
        precision = "bf16" if modern else "fp16"
        assumed(f"precision {precision}")
    if precision not in PRECISIONS:
        raise Unreadable(f"precision {precision} is not modelled")
    if precision == "nvfp4":
        assumed("nvfp4 is costed as fp8")
    kernel = text(row, "attention_kernel")
    if not kernel:
        kernel = "flash" if modern else "fused_softmax"
        assumed(f"attention_kernel {kernel}")
    notes = text(row, "notes")
    options: dict[str, Any] = {
        "precision": PRECISIONS[precision],
        "framework": FRAMEWORKS.get(stack, "generic"),
        "sequence_parallel": switch(row, "sequence_parallel"),
        "attention_kernel": KERNELS.get(kernel, "flash2"),
    }
    if stack == "megatron" and text(row, "framework") == "AA-Scaling":
        options["gradient_bytes"] = 2
        options["parallel_loss"] = False
        assumed("16-bit gradients, and logits gathered for the loss: else other layouts would have fitted than did")
    if text(row, "framework") == "Megatron-LM" and text(row, "framework_version")[:4] in ("2021", "2022"):
        options["sliced_transfers"] = True
        assumed("stages pass slices over tensor-parallel ranks: the default of Megatron-LM in 2021 and 2022")
    if text(row, "fused_norm"):
        options["fused_norm"] = switch(row, "fused_norm")
    if "CUDA_LAUNCH_BLOCKING=1" in notes:
        options["blocking_launches"] = True
    group = re.search(r"\bzero1=(\d+)", notes)
    if group:
        options["optimizer_shards"] = int(group[1])
    if "no comm overlap" in notes:
        options["overlap"] = False
    return options


def _config(row: Row, cluster: Cluster, model: Model, assumed: Callable[[str], None]) -> Config:
    tp, pp, cp = whole(row, "tp", 1), whole(row, "pp", 1), whole(row, "cp", 1)
    vpp, ep = whole(row, "vpp", 1), whole(row, "ep", 1)
    if not text(row, "mbs"):
        raise Unreadable("mbs is not stated")
    mbs = whole(row, "mbs")
    world = cluster.num_gpus
    if world % (tp * pp * cp):
        raise Unreadable("tp*pp*cp does not divide the number of GPUs")
    dp = world // (tp * pp * cp)
    etp = whole(row, "etp", 1 if ep > 1 else tp)
    if world % (etp * ep * pp):
        etp = 1
    if world % (ep * pp * etp):
        raise Unreadable("ep*pp does not divide the number of GPUs")
    if pp * vpp > model.num_layers + 2:
        raise Unreadable("more pipeline chunks than layers")
    batch = number(row, "gbs_sequences")
    if text(row, "grad_acc"):
        grad_acc = whole(row, "grad_acc")
    elif batch and batch % (mbs * dp) == 0:
        grad_acc = int(batch) // (mbs * dp)
    else:
        raise Unreadable("neither grad_acc nor a batch that mbs*dp divides is stated")
    return Config(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        zero=_zero(row, assumed),
        recompute=_recompute(row, assumed),
        recompute_layers=_recompute_layers(row),
        mbs=mbs,
        grad_acc=grad_acc,
        dp=dp,
        edp=world // (ep * etp * pp),
        layers_per_stage=_cut(row, model, pp, vpp, assumed),
        sequence_parallel=switch(row, "sequence_parallel"),
    )


def _cut(row: Row, model: Model, pp: int, vpp: int, assumed: Callable[[str], None]) -> Layers:
    """Layers per stage: chunks of equal size, the fuller ones first; AA-Scaling cuts by parameters."""
    if text(row, "framework") != "AA-Scaling" or vpp > 1 or pp == 1:
        return balanced(model.num_layers, pp, vpp)
    assumed("stages of equal parameters, embedding and output layer included: pp that does not divide the layers ran")
    matrix = model.vocab_size * model.hidden_size
    return tuple((n,) for n in balanced_by_parameters(model.num_layers, model.dense_layer_params, matrix, matrix, pp))


def balanced_by_parameters(layers: int, layer: int, first: int, last: int, pp: int) -> list[int]:
    """Layer counts of ``pp`` stages with the least largest number of parameters, the fuller stages first.

    ``first`` and ``last`` are parameters that the end stages hold beside their layers of ``layer`` parameters each.
    """
    spare = [first / layer, *[0.0] * (pp - 2), last / layer]
    for most in range(1, layers + 1):
        for tenth in range(10):
            room = [max(0, int(most + tenth / 10 - extra)) for extra in spare]
            if sum(room) >= layers:
                over = sum(room) - layers
                for stage in range(pp - 1, -1, -1):  # the last stages give way
                    take = min(over, max(0, room[stage] - 1))
                    room[stage], over = room[stage] - take, over - take
                return room
    return [layers, *[0] * (pp - 1)]


def _zero(row: Row, assumed: Callable[[str], None]) -> int:
    cell = text(row, "zero").lower()
    if cell == "fsdp":
        return 3
    if cell in ("0", "1", "2", "3", "0.0", "1.0", "2.0", "3.0"):
        return int(float(cell))
    stage = int(switch(row, "distributed_optimizer"))
    assumed(f"zero {stage}")
    return stage


def _recompute(row: Row, assumed: Callable[[str], None]) -> Recompute:
    cell = text(row, "recompute").lower()
    known = {kind.text: kind for kind in Recompute}
    if cell not in known:
        assumed("recompute none")
    return known.get(cell, Recompute.NONE)


def _recompute_layers(row: Row) -> int:
    """Recomputed layers of every chunk, which recompute block needs."""
    if text(row, "recompute").lower() != "block":
        return 0
    layers = whole(row, "recompute_layers")
    if not layers:
        raise Unreadable("recompute block without a number of recompute_layers")
    return layers
