"""JSON Schema of cluster files, model files and results, and a validator for the part of JSON Schema used here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from parsolve.specs import Recompute

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
VERSION = 1
MAX_NUMBER = 2.0**63

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
SIZE: Schema = {"type": "integer", "minimum": 1}
TEXTS: Schema = {"type": "array", "items": TEXT}
RECOMPUTE = tuple(kind.text for kind in Recompute)


def schema(what: str) -> Schema:
    """The schema of ``cluster``, ``model`` or ``result``."""
    builders: dict[str, Callable[[], Schema]] = {"cluster": _cluster, "model": _model, "result": _result}
    return {"$schema": DRAFT, "$id": f"parsolve-{what}", **builders[what]()}


# ---- files that users write ----------------------------------------------------------------------------------------
def _cluster() -> Schema:
    """Only gpu, domains and gpus_per_domain are required beside the name of a GPU preset."""
    from parsolve.specs import Cluster

    made: Schema = _with_units(Cluster.model_json_schema())
    made["properties"]["gpu"] = {"anyOf": [{"type": "string", "description": "a GPU preset"}, {"$ref": "#/$defs/Gpu"}]}
    made["required"] = ["gpu", "domains", "gpus_per_domain"]
    made["$defs"]["Network"]["required"] = []
    made["properties"]["aliases"] = TEXTS
    return made


def _model() -> Schema:
    """A spec file; the name defaults to the file's."""
    from parsolve.specs import Model

    made: Schema = _with_units(Model.model_json_schema())
    made["required"] = [name for name in made["required"] if name != "name"]
    return made


def _with_units(node: Any) -> Any:
    """Quantities may be numbers or text with a unit."""
    if isinstance(node, list):
        return [_with_units(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _with_units(value) for key, value in node.items()}
    if "unit" in node and "type" in node:
        rest = {key: node.pop(key) for key in ("type", "minimum", "maximum", "exclusiveMinimum") if key in node}
        if "gt" in node:  # pydantic's own word, left over beside a custom reader
            rest["exclusiveMinimum"] = node.pop("gt")
        node["anyOf"] = [rest, {"type": "string", "description": f"with a unit, in {node['unit']}"}]
    return node


# ---- results -------------------------------------------------------------------------------------------------------
def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, about: str = "") -> Schema:
    """An object that may hold more keys than these."""
    made: Schema = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
    return {**made, "description": about} if about else made


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _or_null(*choices: Schema) -> Schema:
    return {"anyOf": [*choices, {"type": "null"}]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema, required: Mapping[str, Schema] | None = None) -> Schema:
    made: Schema = {"type": "object", "additionalProperties": values}
    return {**made, "properties": dict(required), "required": list(required)} if required else made


CONFIG = _object(
    {
        **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "etp", "edp"), SIZE),
        "zero": {"type": "integer", "minimum": 0, "maximum": 3},
        **dict.fromkeys(("mbs", "grad_acc", "microbatches", "gbs", "vpp"), SIZE),
        "recompute": {"type": "string", "enum": list(RECOMPUTE)},
        "sequence_parallel": FLAG,
        "layers_per_stage": _list(_list({"type": "integer", "minimum": 0})),
    },
    {"recompute_layers": {"type": "integer", "minimum": 0}, "mtp_apart": FLAG},
    about="One configuration. layers_per_stage: per pipeline rank the layer counts of its vpp chunks. "
    "recompute_layers: under recompute block the first so many layers of every chunk are recomputed, else 0. "
    "mtp_apart: multi-token-prediction modules are on the stage before the output layer's.",
)
ESTIMATE = _object(
    {
        "step_time_s": NUMBER,
        "time_per_token_s": NUMBER,
        "tokens_per_s_per_gpu": NUMBER,
        "model_tflops_per_gpu": NUMBER,
        "mfu": NUMBER,
        "mfu_causal": NUMBER,
        "bubble_fraction": NUMBER,
        "terms_s": {**_map(NUMBER), "description": "exposed time by term, s; adds up to step_time_s"},
        "hidden_s": {**_map(NUMBER), "description": "time behind compute, s; not part of step_time_s"},
        "memory_bytes": {
            **_map(INTEGER, {"total": INTEGER, "limit": INTEGER}),
            "description": "the worst stage; the parts other than total and limit add up to total",
        },
        "worst_stage": {"type": "integer", "minimum": 0},
    },
    about="Times in s, memory in bytes.",
)
STAGE = _object(
    {
        "rank": {"type": "integer", "minimum": 0},
        "layers": _list({"type": "integer", "minimum": 0}),
        "memory_bytes": _map(INTEGER, {"total": INTEGER, "limit": INTEGER}),
    },
    {"mtp_layers": SIZE, "recomputed": _list({"type": "integer", "minimum": 0})},
    about="One pipeline rank: the layer counts of its vpp chunks, how many of them recompute block recomputes, the "
    "multi-token-prediction modules on it, and its "
    "memory by part; parts add up to total.",
)
LAUNCH: Schema = {**_object({"command": TEXT}), "properties": {"command": TEXT, "config": {"type": "object"}}}
LAUNCH["properties"]["files"] = {"type": "object", "additionalProperties": TEXT}
PLAN = _object(
    {
        "rank": SIZE,
        "config": _ref("config"),
        "estimate": _or_null(_ref("estimate")),
        "placement": _map(TEXT),
        "relative": NUMBER,
        "limited_by": _or_null(TEXT),
        "warnings": _list(_ref("note")),
        "args": _map(_or_null(TEXT, LAUNCH)),
        "not_expressible": _map(TEXT),
    },
    {"stages": _list(_ref("stage"))},
)
BESIDE = _object({"name": TEXT, "config": _ref("config"), "step_time_s": NUMBER, "relative": NUMBER})
PROBLEM = _object(
    {
        "cluster": _object(
            {"name": TEXT, "gpu": _object({"name": TEXT}), "domains": SIZE, "gpus_per_domain": SIZE},
            about="as `parsolve schema cluster`, everything filled in, SI units",
        ),
        "model": _object(
            {"name": TEXT, "num_params": INTEGER, "num_active_params": INTEGER},
            about="as `parsolve schema model`, everything filled in",
        ),
        "workload": _object(
            {"seq_len": SIZE, "precision": TEXT},
            {
                "gbs": _or_null(SIZE),
                "gbs_tokens": _or_null(SIZE),
                "gbs_tolerance": _or_null(NUMBER),
                "mtp_layers": _or_null({"type": "integer", "minimum": 0}),
            },
        ),
        "framework": TEXT,
        "framework_version": TEXT,
        "profile": TEXT,
        "domains": {
            **_map(_list(INTEGER)),
            "description": "values of each axis; recompute 0 to 4: none, selective, full, block, light",
        },
    },
    {"rules": TEXTS},
)
BETTER = _object(
    {"config": _ref("config"), "step_time_s": NUMBER, "speedup": NUMBER, "status": TEXT},
    about="`check --better`: the best plan of the same problem; speedup is today's time over its.",
)
INFEASIBLE = _object(
    {
        "conflict": _list(_ref("note")),
        "explanation": TEXT,
        "relaxations": _list(_object({"change": TEXT, "drops": TEXT, "step_time_s": _or_null(NUMBER)})),
    }
)
FORMULA = _object(
    {"line": TEXT, "unit": TEXT, "value": NUMBER, "hidden": NUMBER, "functions": _list({"type": "object"})},
    about="A line of the breakdown of time (s) or memory (B) and the functions that it is made of.",
)


def _result() -> Schema:
    made = _object(
        {
            "schema_version": {"type": "integer", "enum": [VERSION]},
            "parsolve_version": TEXT,
            "status": {
                "type": "string",
                "enum": ["optimal", "feasible", "infeasible", "unknown", "legal", "illegal"],
                "description": "legal and illegal come from `check`, the others from `solve`",
            },
            "problem": PROBLEM,
            "assumptions": TEXTS,
            "warnings": _list(_ref("note")),
            "objective": _object(
                {
                    "name": TEXT,
                    "unit": {"type": "string", "enum": ["s", "s/token", "tokens/s/GPU", "currency/token", "B", "1"]},
                    "best": _or_null(NUMBER),
                    "bound": _or_null(NUMBER),
                    "gap": _or_null(NUMBER),
                }
            ),
            "solver": _object(
                {},
                {
                    "wall_s": NUMBER,
                    "cpu_s": NUMBER,
                    "search_space": INTEGER,
                    "legal": _or_null(INTEGER),
                    "cuts": {"type": "string", "enum": ["any", "first any", "listed"]},
                    "all_cuts": FLAG,
                    "even_split_proven": FLAG,
                    "interrupted": FLAG,
                },
            ),
            "baseline": _or_null(_ref("beside")),
            "even_split": _or_null(_ref("beside")),
            "plans": _list(_ref("plan")),
            "infeasible": _or_null(_ref("infeasible")),
        },
        {
            "violations": _list(_object({"rule": TEXT, "message": TEXT, "values": {"type": "object"}})),
            "today": _object({"notes": TEXTS, "slow": TEXTS}, about="`check --from-…`: what the command of today says"),
            "better": _or_null(BETTER),
            "formulas": _list(FORMULA),
            "counterfactuals": _list(
                _object(
                    {
                        "change": TEXT,
                        "config": _or_null(_ref("config")),
                        "step_time_s": _or_null(NUMBER),
                        "relative": _or_null(NUMBER),
                        "cause": TEXT,
                        "proven": FLAG,
                    }
                )
            ),
            "pareto": TEXTS,
        },
        about="What `solve -f json` and `check -f json` print.",
    )
    note = _object({"rule": TEXT, "message": TEXT})
    defs = {
        "config": CONFIG,
        "estimate": ESTIMATE,
        "plan": PLAN,
        "stage": STAGE,
        "beside": BESIDE,
        "infeasible": INFEASIBLE,
        "note": note,
    }
    return {**made, "$defs": defs}


# ---- validation ----------------------------------------------------------------------------------------------------
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


def first_fault(root: Schema, data: Any) -> tuple[str, str] | None:
    """The path of the first value that does not fit the schema and what is wrong with it, or None."""
    return _fault(root, root, data, "")


def _fault(root: Schema, node: Schema, data: Any, path: str) -> tuple[str, str] | None:
    if "$ref" in node:
        return _fault(root, root["$defs"][node["$ref"].rpartition("/")[2]], data, path)
    if "anyOf" in node:
        faults = [_fault(root, choice, data, path) for choice in node["anyOf"]]
        # the deepest complaint is about the alternative that was meant
        return None if None in faults else max((f for f in faults if f), key=lambda fault: len(fault[0]))
    wrong = _wrong_value(node, data)
    if wrong:
        return path, wrong
    if isinstance(data, dict):
        return _fault_in_object(root, node, data, path)
    if isinstance(data, list) and "items" in node:
        for i, item in enumerate(data):
            fault = _fault(root, node["items"], item, f"{path}[{i}]")
            if fault:
                return fault
    return None


def _wrong_value(node: Schema, data: Any) -> str | None:
    shown = str(data)[:40] if not isinstance(data, (dict, list)) else type(data).__name__
    kind = node.get("type")
    if kind and (not isinstance(data, _TYPES[kind]) or (isinstance(data, bool) and kind != "boolean")):
        return f"expected {kind}, got {shown!r}"
    if isinstance(data, (int, float)) and not isinstance(data, bool) and not _bounded(data):
        return "the number is too large"
    if "enum" in node and data not in node["enum"]:
        return f"expected one of {', '.join(map(str, node['enum']))}, got {shown!r}"
    if "minimum" in node and data < node["minimum"]:
        return f"must be at least {node['minimum']}, got {shown}"
    if "maximum" in node and data > node["maximum"]:
        return f"must be at most {node['maximum']}, got {shown}"
    return None


def _bounded(number: int | float) -> bool:
    return abs(number) < MAX_NUMBER if isinstance(number, int) else math.isfinite(number)


def _fault_in_object(root: Schema, node: Schema, data: dict[str, Any], path: str) -> tuple[str, str] | None:
    prefix = f"{path}." if path else ""
    for key in node.get("required", ()):
        if key not in data:
            return path, f"the key {key!r} is missing"
    properties, others = node.get("properties", {}), node.get("additionalProperties")
    for key, value in data.items():
        inner = properties.get(key, others if isinstance(others, dict) else None)
        fault = _fault(root, inner, value, f"{prefix}{key}") if inner is not None else None
        if fault:
            return fault
    return None
