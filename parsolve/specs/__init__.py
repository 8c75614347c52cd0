"""What a user describes: cluster, model, workload. Frozen, in SI base units; unknown keys are refused."""

from parsolve.specs.cluster import Cluster, Gpu, Network
from parsolve.specs.model import MLA, Model, MoE
from parsolve.specs.profile import Profile
from parsolve.specs.workload import Framework, Precision, Recompute, Workload

__all__ = [
    "MLA",
    "Cluster",
    "Framework",
    "Gpu",
    "MoE",
    "Model",
    "Network",
    "Precision",
    "Profile",
    "Recompute",
    "Workload",
]
