"""A configuration as a user gives it (``--config tp=8,pp=4``, a JSON file, a dict), completed with defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parsolve.config import Config
from parsolve.errors import SpecError
from parsolve.problem import Problem
from parsolve.restrictions import axis_name, axis_value, truth
from parsolve.specs import Recompute
from parsolve.splits import Layers, balanced, from_model_order, model_order

MAX_CHUNKS = 4096


def parse_config(source: str | Path | Mapping[str, Any] | Config, problem: Problem) -> tuple[Config, bool]:
    """A full configuration, and whether its layer cut is one that was given or that the framework makes by itself.

    What is left out gets the framework's default: dp follows from the world, grad_acc from the batch (rounded up),
    etp = tp, the rest 1 or none; layers are cut evenly, or balanced (and False) where they do not divide.

    Raises
    ------
    SpecError: unknown keys, values out of range, or layer counts that do not add up.
    """
    if isinstance(source, Config):
        return source, True
    data = {str(key).strip().lower().replace("-", "_"): value for key, value in _as_mapping(source).items()}
    where = "--config"
    layers_given = data.pop("layers_per_stage", None)
    mtp_apart = truth("mtp_apart", data.pop("mtp_apart", False), where)
    values: dict[str, int] = {}
    for raw, value in data.items():
        axis = axis_name(str(raw), where, ("layers_per_stage", "mtp_apart"))
        number = axis_value(axis, value, where)
        if values.setdefault(axis, number) != number:
            raise SpecError(f"{axis} is given twice with different values", where)
    world = problem.cluster.num_gpus
    sequence_parallel = bool(values.pop("sequence_parallel", _default_sequence_parallel(problem)))
    gbs = values.pop("gbs", problem.gbs_target[0])
    tp, cp, pp = (values.get(axis, 1) for axis in ("tp", "cp", "pp"))
    dp = values.get("dp", max(1, world // (tp * cp * pp)))
    ep, etp = values.get("ep", 1), values.get("etp", tp)
    edp = values.get("edp", max(1, world // (etp * ep * pp)))
    mbs = values.get("mbs", 1)
    vpp = values.get("vpp", 1)
    if pp * vpp > MAX_CHUNKS:
        raise SpecError(f"pp*vpp = {pp * vpp} chunks are more than the {MAX_CHUNKS} that can be checked", where)
    recompute, again = Recompute(values.get("recompute", 0)), values.get("recompute_layers", 0)
    if (recompute == Recompute.BLOCK) != (again > 0):
        raise SpecError(
            f"recompute={recompute.text} with recompute_layers={again}: recompute=block needs recompute_layers of 1 or "
            "more, and only block takes it",
            f"{where}: recompute_layers",
        )
    if mtp_apart and pp < 3:
        raise SpecError(f"needs pp of 3 or more, not {pp}: on the first rank it cannot be", f"{where}: mtp_apart")
    layers, vpp, cut_known = _layers(layers_given, problem, pp, vpp, "vpp" in values, where)
    config = Config(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        zero=values.get("zero", 0),
        recompute=recompute,
        mbs=mbs,
        grad_acc=values.get("grad_acc", max(1, math.ceil(gbs / (mbs * dp)))),
        dp=dp,
        edp=edp,
        layers_per_stage=layers,
        sequence_parallel=sequence_parallel and tp > 1,
        recompute_layers=again,
        mtp_apart=mtp_apart,
    )
    return config, cut_known


def _default_sequence_parallel(problem: Problem) -> bool:
    given = problem.workload.sequence_parallel
    return problem.workload.framework not in ("deepspeed", "accelerate") if given is None else given


def _as_mapping(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    text = str(source)
    if isinstance(source, Path) or (text.endswith(".json") and "=" not in text):
        from parsolve.loading import read_file

        data = read_file(Path(source))
        inner = data.get("config", data)
        if not isinstance(inner, dict):
            raise SpecError("config must be a table of axes", f"{source}: config")
        return {key: value for key, value in inner.items() if key != "microbatches" or "grad_acc" not in inner}
    result: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        if not equals or not value.strip():
            raise SpecError(f"cannot read {item!r}; write axis=value, for example tp=8,pp=4,mbs=1", "--config")
        if name.strip() in result:
            raise SpecError(f"{name.strip()} is given twice", "--config")
        result[name.strip()] = value.strip()
    return result


def _layers(given: Any, problem: Problem, pp: int, vpp: int, vpp_given: bool, where: str) -> tuple[Layers, int, bool]:
    num_layers, schedule = problem.model.num_layers, problem.workload.schedule
    if given is None:
        divides = num_layers % (pp * vpp) == 0 or problem.workload.framework in ("generic", "torchtitan", "deepspeed")
        return balanced(num_layers, pp, vpp, schedule), vpp, divides
    key = f"{where}: layers_per_stage"
    if isinstance(given, str):
        counts = _parse_layers(given, key)
    elif isinstance(given, (list, tuple)) and all(isinstance(rank, (list, tuple)) for rank in given):
        if len({len(rank) for rank in given}) != 1 or len(given) != pp:
            raise SpecError(f"give one list of chunk sizes for each of the pp={pp} ranks, all of one length", key)
        counts = model_order(tuple(map(tuple, given)), schedule)
    else:
        counts = list(given) if isinstance(given, (list, tuple)) else [given]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in counts):
        raise SpecError("layer counts are whole numbers from 0 up, for example 15|16*6|15", key)
    if len(counts) % pp or not counts:
        raise SpecError(f"{len(counts)} chunks are not a multiple of pp={pp}", key)
    chunks = len(counts) // pp
    if vpp_given and chunks != vpp:
        raise SpecError(f"{len(counts)} chunks over pp={pp} make vpp={chunks}, not vpp={vpp}", key)
    if sum(counts) != num_layers:
        raise SpecError(f"the counts add up to {sum(counts)}, but the model has {num_layers} layers", key)
    return from_model_order(counts, pp, schedule), chunks, True


def _parse_layers(text: str, where: str) -> list[int]:
    counts: list[int] = []
    for part in text.split("|"):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:\*\s*(\d{1,6}))?\s*", part)
        if not match:
            raise SpecError(f"cannot read {part!r}; write counts like 15|16*6|15", where)
        counts += [int(match[1])] * min(int(match[2] or 1), MAX_CHUNKS + 1)
        if len(counts) > MAX_CHUNKS:
            raise SpecError(f"more than {MAX_CHUNKS} chunks", where)
    return counts
