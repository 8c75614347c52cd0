"""Memory constants of the shipped profiles: priors from what the stacks keep, fitted on published peaks and OOMs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from parsolve.calibration import Constant, equal_weights
from parsolve.functions import Array
from parsolve.specs import Profile
from parsolve.validation.prediction import Batch, batches
from parsolve.validation.runs import Run

GIB = 2**30
CORE_LOGITS = (8.0, "16-bit logits, a 32-bit copy that the loss overwrites and its gradient")
TORCH_LOGITS = (12.0, "16-bit logits, a 32-bit copy, its log-softmax and both gradients in part")
MEMORY: dict[str, dict[str, tuple[float, str]]] = {
    "megatron-ampere": {"logits_memory": CORE_LOGITS},
    "aa-scaling-ampere": {"logits_memory": CORE_LOGITS},
    "megatron-hopper": {"logits_memory": CORE_LOGITS},
    "megatron-blackwell": {"logits_memory": CORE_LOGITS},
    "megatron-deepspeed-ampere": {"gradient_bytes": (4.0, "16-bit gradients and a flat copy for the reduction")},
    "fsdp-ampere": {"logits_memory": TORCH_LOGITS},
    "fsdp-hopper": {"logits_memory": TORCH_LOGITS},
    "oneflow-volta": {
        "gradient_bytes": (2.0, "16-bit gradients (OneFlow)"),
        "reduction_bytes": (2.0, "16-bit gradients (OneFlow)"),
        "logits_memory": (5.0, "fused loss"),
        "outside_bytes": (1.0 * GIB, "context and NCCL of one process on a 16 GB card"),
    },
}
"""What is known of a stack; the fit starts from it."""
FITTED_MEMORY = (
    Constant("activation_memory", 0.5, 2.0, 0.1),
    Constant("fragmentation", 0.0, 0.4, 0.1, log=False),
    Constant("outside_bytes", 0.5 * GIB, 7.0 * GIB, 0.4),
    Constant("logits_memory", 2.0, 24.0, 0.3),
)
"""Constants that peaks and out-of-memory runs can determine."""
PEAK_NOISE = 0.05
"""What two readings of the same peak differ by (log): errors above it count linearly."""
EDGE = 0.003
"""How sharply a run on the edge of the card is judged (log of its memory over the usable)."""


def weighed(runs: Sequence[Run], name: str) -> list[Run]:
    """The runs of a profile that carry a peak by a known meter, or ran, or ran out of memory."""
    return [
        r
        for r in runs
        if r.problem.profile.name == name
        and ((r.memory_bytes and "memory" in r.uses and r.meter != "unknown") or "oom" in r.uses)
    ]


class MemoryFit:
    """Runs of one profile, their peaks and outcomes, ready to be evaluated with other memory constants."""

    def __init__(self, runs: Sequence[Run], profile: Profile) -> None:
        self.runs, self.profile = list(runs), profile
        self.prepared: list[Batch] = batches(self.runs)
        self.weights = equal_weights(self.runs)
        self.peak = np.array(
            [r.memory_bytes if "memory" in r.uses and r.meter != "unknown" and r.memory_bytes else np.nan for r in runs]
        )
        judged = {"ok": 1.0, "oom": -1.0}
        self.side = np.array([judged.get(r.outcome, 0.0) if "oom" in r.uses else 0.0 for r in runs])
        self.prior = np.array([c.inner(float(getattr(profile, c.name))) for c in FITTED_MEMORY])
        self.widths = np.array([c.width for c in FITTED_MEMORY])

    def with_values(self, variables: Array) -> Profile:
        """The profile with fitted variables put in."""
        values = {c.name: min(max(c.outer(v), c.low), c.high) for c, v in zip(FITTED_MEMORY, variables, strict=True)}
        return self.profile.model_copy(update=values)

    def predicted(self, variables: Array) -> tuple[Array, Array, Array]:
        """Memory of the worst stage, as the run's meter reads it, and usable, bytes."""
        profile = self.with_values(variables)
        total, metered, usable = (np.zeros(len(self.runs)) for _ in range(3))
        for batch in self.prepared:
            p = batch.instance(batch.problem)
            p.profile = profile
            total[batch.at], metered[batch.at] = batch.memory(p)
            usable[batch.at] = p.usable_bytes
        return total, metered, usable

    def cost(self, variables: Array, keep: Array) -> float:
        """Huber loss of the peaks, logistic loss of the outcomes, pull of the prior."""
        total, metered, usable = self.predicted(variables)
        z = np.abs(np.nan_to_num(np.log(metered / self.peak))) / PEAK_NOISE
        loss = np.where(z <= 1, z**2, 2 * z - 1) + 2.0 * np.logaddexp(0.0, self.side * np.log(total / usable) / EDGE)
        pull = float((((variables - self.prior) / self.widths) ** 2).sum())
        return float((self.weights * keep * loss).sum()) + pull

    def solve(self) -> Array:
        """The constants with the least cost."""
        return self._search(self.prior, np.ones(len(self.runs)), 0.5, 120)

    def refit(self, start: Array, keep: Array) -> Array:
        """As ``solve`` near a known solution, over the runs of the mask ``keep``: what leaving runs out changes."""
        return self._search(start, keep, 0.2, 35)

    def _search(self, first: Array, mask: Array, step: float, tries: int) -> Array:
        simplex = np.vstack((first, first + np.diag(step * self.widths)))
        options = {"initial_simplex": simplex, "maxfev": tries, "xatol": 1e-3, "fatol": 1e-2}
        return np.asarray(minimize(self.cost, first, (mask,), method="Nelder-Mead", options=options).x)
