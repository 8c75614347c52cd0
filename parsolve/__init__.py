"""parsolve: proven-optimal parallel training configurations for a cluster and a model.

    problem = parsolve.Problem(cluster="h100-sxm:16x8", model="llama2-70b", seq_len=4096, gbs=1024)
    result = parsolve.solve(problem, top=5)

Names load on first use; OR-Tools only when ``solve`` runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Problem": "parsolve.problem",
    "solve": "parsolve.api",
    "check": "parsolve.api",
    "evaluate": "parsolve.api",
    "Config": "parsolve.config",
    "Result": "parsolve.result",
    "Plan": "parsolve.result",
    "Estimate": "parsolve.evaluation",
    "Violation": "parsolve.evaluation",
    "rule": "parsolve.functions",
    "term": "parsolve.functions",
    "limit": "parsolve.functions",
    "warning": "parsolve.functions",
    "Cluster": "parsolve.specs",
    "Gpu": "parsolve.specs",
    "Model": "parsolve.specs",
    "MoE": "parsolve.specs",
    "MLA": "parsolve.specs",
    "Workload": "parsolve.specs",
    "Profile": "parsolve.specs",
    "Recompute": "parsolve.specs",
    "load_cluster": "parsolve.loading",
    "load_model": "parsolve.loading",
    "ParsolveError": "parsolve.errors",
    "SpecError": "parsolve.errors",
    "NotExpressibleError": "parsolve.errors",
}

if TYPE_CHECKING:
    from parsolve.api import check, evaluate, solve
    from parsolve.config import Config
    from parsolve.errors import NotExpressibleError, ParsolveError, SpecError
    from parsolve.evaluation import Estimate, Violation
    from parsolve.functions import limit, rule, term, warning
    from parsolve.loading import load_cluster, load_model
    from parsolve.problem import Problem
    from parsolve.result import Plan, Result
    from parsolve.specs import MLA, Cluster, Gpu, Model, MoE, Profile, Recompute, Workload


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'parsolve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


__all__ = [
    "MLA",
    "Cluster",
    "Config",
    "Estimate",
    "Gpu",
    "MoE",
    "Model",
    "NotExpressibleError",
    "ParsolveError",
    "Plan",
    "Problem",
    "Profile",
    "Recompute",
    "Result",
    "SpecError",
    "Violation",
    "Workload",
    "check",
    "evaluate",
    "limit",
    "load_cluster",
    "load_model",
    "rule",
    "solve",
    "term",
    "warning",
]
