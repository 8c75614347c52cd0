"""A result's JSON as text, and its plans as CSV with units in the column names."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

from parsolve.render.words import schedule_of
from parsolve.units import fold_layers

CONFIG_COLUMNS = ("tp", "pp", "cp", "ep", "etp", "dp", "edp", "zero", "mbs", "grad_acc", "gbs", "vpp", "recompute")
FIGURES = {
    "step_time_s": "step_time_s",
    "time_per_token_s": "time_per_token_s",
    "tokens_per_s_per_gpu": "tokens_per_s_per_gpu",
    "model_tflops_per_gpu": "model_tflops_per_gpu",
    "mfu": "mfu_fraction",
    "mfu_causal": "mfu_causal_fraction",
    "bubble_fraction": "bubble_fraction",
}


def to_json(data: object) -> str:
    """Indented JSON in the order of the contract; NaN and infinity would be a bug and raise."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(data: Mapping[str, Any]) -> str:
    """A header, then one row a plan. Terms and memory parts that a plan does not have are empty."""
    plans = data["plans"]
    terms, hidden = _union(plans, "terms_s"), _union(plans, "hidden_s")
    memory = ["total", "limit", *(name for name in _union(plans, "memory_bytes") if name not in ("total", "limit"))]
    header = ["rank", *CONFIG_COLUMNS, "recompute_layers", "sequence_parallel", "layers_per_stage"]
    header += ["mtp_apart", *FIGURES.values()]
    header += ["relative", "limited_by", "worst_stage"]
    header += [f"term_{name}_s" for name in terms] + [f"hidden_{name}_s" for name in hidden]
    header += [f"memory_{name}_bytes" for name in memory]
    if "violations" in data:
        header.append("violations")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for plan in plans:
        config, estimate = plan["config"], plan["estimate"] or {}
        row: list[Any] = [plan["rank"], *(config[name] for name in CONFIG_COLUMNS), config.get("recompute_layers", 0)]
        row += [str(config["sequence_parallel"]).lower(), fold_layers(config["layers_per_stage"], schedule_of(data))]
        row.append(str(config.get("mtp_apart", False)).lower())
        row += [estimate.get(name, "") for name in FIGURES]
        row += [plan["relative"], plan["limited_by"], estimate.get("worst_stage", "")]
        row += [estimate.get("terms_s", {}).get(name, "") for name in terms]
        row += [estimate.get("hidden_s", {}).get(name, "") for name in hidden]
        row += [estimate.get("memory_bytes", {}).get(name, "") for name in memory]
        if "violations" in data:
            row.append(" ".join(v["rule"] for v in data["violations"]))
        writer.writerow(row)
    return out.getvalue()


def _union(plans: Iterable[Mapping[str, Any]], key: str) -> list[str]:
    names: dict[str, None] = {}
    for plan in plans:
        names.update(dict.fromkeys((plan["estimate"] or {}).get(key, {})))
    return list(names)
