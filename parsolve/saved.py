"""A result that was saved with ``-f json``, read back: checked against its schema, its problem and plans rebuilt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parsolve.errors import SpecError
from parsolve.schema import VERSION, first_fault, schema

if TYPE_CHECKING:
    from parsolve.config import Config
    from parsolve.problem import Problem

MAX_BYTES = 2**28
MEND = "make one with `parsolve solve … -f json -o plan.json`"


def read_saved(name: str) -> dict[str, Any]:
    """The JSON of a saved result; ``-`` is stdin.

    Raises
    ------
    SpecError: not such a file, or a damaged one, with the place in it.
    """
    where = "stdin" if name == "-" else name
    try:
        data = json.loads(_text(name, where), parse_constant=_refuse_constant)
    except RecursionError:
        raise SpecError("nested too deeply to be a result", where) from None
    except json.JSONDecodeError as error:
        raise SpecError(f"not valid JSON: {error.msg}; {MEND}", f"{where}: line {error.lineno}") from None
    except ValueError as error:
        raise SpecError(f"not valid JSON: {error}; {MEND}", where) from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise SpecError(f"is not a saved result: it has no schema_version; {MEND}", where)
    version = data["schema_version"]
    if version != VERSION or isinstance(version, bool):
        raise SpecError(
            f"is {str(version)[:20]!r}, but this parsolve reads {VERSION}; solve again", f"{where}: schema_version"
        )
    fault = first_fault(schema("result"), data)
    if fault is not None:
        raise SpecError(f"{fault[1]}; the file is damaged, {MEND}", f"{where}: {fault[0]}" if fault[0] else where)
    return data


def _text(name: str, where: str) -> str:
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            path = Path(name)
            if not path.exists():
                raise SpecError("no such file", where)
            if not path.is_file():
                raise SpecError("is not a regular file", where)
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where) from None
    if len(raw) > MAX_BYTES:
        raise SpecError(f"is larger than {MAX_BYTES // 2**20} MiB", where)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError(f"is not UTF-8 text; {MEND}", where) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def saved_problem(data: dict[str, Any], where: str) -> Problem:
    """The problem of a saved result.

    The user's own rules are functions and cannot be saved; the profile does not matter for printing a launch.
    """
    from parsolve.problem import Problem
    from parsolve.specs import Cluster, Model, Workload

    saved = data["problem"]
    shape = {key: value for key, value in saved["model"].items() if key not in ("num_params", "num_active_params")}
    workload = {**saved["workload"], "framework_version": saved["framework_version"] or None}
    return Problem(
        Cluster.read(saved["cluster"], f"{where}: problem.cluster"),
        Model.read(shape, f"{where}: problem.model"),
        Workload.read(workload, f"{where}: problem.workload"),
    )


def saved_plan(data: dict[str, Any], index: int, where: str) -> tuple[Problem, Config]:
    """The problem and the configuration of one saved plan.

    Raises
    ------
    SpecError: the configuration does not belong to the problem.
    """
    from parsolve.config import Config

    problem = saved_problem(data, where)
    config = Config.from_json(data["plans"][index]["config"])
    place = f"{where}: plans[{index}].config"
    cut = config.layers_per_stage
    if len(cut) != config.pp or any(len(rank) != config.vpp for rank in cut):
        raise SpecError(f"layers_per_stage is not made of pp={config.pp} lists of vpp={config.vpp} counts", place)
    if sum(map(sum, cut)) != problem.model.num_layers:
        raise SpecError(f"layers_per_stage does not add up to the model's {problem.model.num_layers} layers", place)
    world = problem.cluster.num_gpus
    for names in (("tp", "cp", "pp", "dp"), ("etp", "ep", "pp", "edp")):
        product = 1
        for name in names:
            product *= getattr(config, name)
        if product != world:
            raise SpecError(f"{'*'.join(names)} = {product} is not the {world} GPUs of the cluster", place)
    return problem, config
