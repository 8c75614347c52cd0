"""A problem: cluster + model + workload + profile; and an instance of it, the ``p`` that every function sees."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from parsolve.errors import SpecError, UnknownNameError
from parsolve.functions import Limit, Rule, Term
from parsolve.specs import Cluster, Model, Profile, Workload
from parsolve.specs.workload import MEGATRON_LIKE
from parsolve.splits import Splits

DEFAULT_VERSIONS = {
    "megatron": "0.19",
    "deepspeed": "0.19",
    "torchtitan": "0.3",
    "accelerate": "1.15",
    "nemo": "0.6",
    "generic": "",
}
TARGET_OVERSHOOT = 0.25
"""A token target may be exceeded by at most this share (grids rarely meet it exactly)."""
Goal = tuple[tuple[float, str], ...]
STEP_TIME: Goal = ((1.0, "step_time"),)
NEMO_MEGATRON_CORE = (0, 19)
"""The Megatron-Core whose rules Megatron-Bridge follows."""
OLDEST_MEGATRON, NEWEST_MEGATRON = (0, 12), (0, 20)


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Parameters
    ----------
    cluster, model: a spec object, a preset name, ``GPU:NxG``, or a file (see cli reference).
    workload: a Workload, or leave it out and give its fields as keywords (``seq_len=4096, gbs=1024``).
    profile: efficiency constants; a Profile, a preset name or a file. None: the shipped one for framework and GPU.
    rules, terms, limits: the user's own; ``without`` leaves built-in rules and limits out by name.
    goal: what is minimised, pairs of (weight, ``step_time`` or ``memory``); step time unless given.

    Raises
    ------
    SpecError: anything that cannot be read for certain.
    """

    cluster: Cluster
    model: Model
    workload: Workload
    profile: Profile
    rules: tuple[Rule, ...] = ()
    terms: tuple[Term, ...] = ()
    limits: tuple[Limit, ...] = ()
    without: frozenset[str] = field(default_factory=frozenset)
    goal: Goal = STEP_TIME

    def __init__(
        self,
        cluster: Cluster | str | Path | dict[str, Any],
        model: Model | str | Path | dict[str, Any],
        workload: Workload | None = None,
        *,
        profile: Profile | str | Path | None = None,
        rules: Iterable[Rule] = (),
        terms: Iterable[Term] = (),
        limits: Iterable[Limit] = (),
        without: Iterable[str] = (),
        goal: Goal = STEP_TIME,
        **options: Any,
    ) -> None:
        from parsolve.loading import load_cluster, load_model
        from parsolve.profiles import STACKS, choose_profile, load_profile

        if workload is None:
            workload = Workload.read(options, "workload")
        elif options:
            raise SpecError(f"give either a workload or its fields, not both ({', '.join(options)})", "workload")
        cluster = load_cluster(cluster)
        if profile is None:
            profile = choose_profile(STACKS[workload.framework], cluster.gpu)
        for name, value in (
            ("cluster", cluster),
            ("model", load_model(model)),
            ("workload", workload),
            ("profile", load_profile(profile)),
            ("rules", tuple(rules)),
            ("terms", tuple(terms)),
            ("limits", tuple(limits)),
            ("without", frozenset(without)),
            ("goal", goal),
        ):
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if self.workload.memory_reserve >= self.cluster.gpu.memory_bytes:
            raise SpecError(
                f"the reserve is as large as the {self.cluster.gpu.memory_bytes / 2**30:.1f} GiB of a "
                f"{self.cluster.gpu.name}: lower --memory-reserve",
                "memory_reserve",
            )
        precision = self.workload.precision
        peaks = self.cluster.gpu.peak_flops
        if precision not in peaks:
            raise SpecError(
                f"{self.cluster.gpu.name} has no {precision}; it supports {', '.join(sorted(peaks))}: "
                "choose one with --precision",
                "precision",
            )
        if self.model.position == "learned" and (self.model.max_positions or 0) < self.workload.seq_len:
            raise SpecError(
                f"{self.model.name} has {self.model.max_positions} learned positions, fewer than the sequence length "
                f"{self.workload.seq_len}: shorten the sequence or raise max_positions",
                "seq_len",
            )
        if self.workload.framework == "megatron" and not OLDEST_MEGATRON <= self.version <= NEWEST_MEGATRON:
            raise SpecError(f"Megatron-LM {self.framework_version} is not known; 0.12 to 0.20 are", "framework_version")
        from parsolve.constraints import LIMITS, RULES

        known = {rule.name for rule in RULES} | {limit.name for limit in LIMITS}
        for name in sorted(self.without - known):
            raise UnknownNameError("rule or limit", name, known, "without")
        seen = set(known)
        for name in [*(rule.name for rule in self.rules), *(limit.name for limit in self.limits)]:
            if name in seen:
                raise SpecError(f"the name {name!r} is taken; give the rule or limit another", "rules")
            seen.add(name)

    @cached_property
    def framework_version(self) -> str:
        """The version in force, the framework's default when none was given."""
        return self.workload.framework_version or DEFAULT_VERSIONS[self.workload.framework]

    @cached_property
    def version(self) -> tuple[int, ...]:
        """``0.19`` as (0, 19)."""
        text = self.framework_version
        if not text:
            return ()
        if not re.fullmatch(r"\d+(\.\d+){0,3}", text):
            raise SpecError(f"cannot read the version {text!r}; write it like 0.19", "framework_version")
        return tuple(int(part) for part in text.split("."))[:2]

    @cached_property
    def mtp_layers(self) -> int:
        """Multi-token-prediction modules that are trained: as asked, else the model's if Megatron-Core takes them."""
        from parsolve.constraints.multi_token import takes_modules

        given = self.workload.mtp_layers
        return given if given is not None else self.model.mtp_layers * takes_modules(self)

    @property
    def megatron_core(self) -> tuple[int, ...]:
        """Version of Megatron-Core in force, (0, 0) where none is."""
        if self.workload.framework == "nemo":
            return NEMO_MEGATRON_CORE
        return self.version if self.workload.framework == "megatron" else (0, 0)

    @property
    def gbs_target(self) -> tuple[int, int]:
        """Lowest and highest global batch size allowed, sequences (equal when exact).

        A token target without tolerance allows batches from it to a quarter above it, each (mbs, dp) its smallest.
        """
        w = self.workload
        target = w.gbs if w.gbs is not None else math.ceil((w.gbs_tokens or 0) / w.seq_len)
        if w.gbs_tolerance is not None:
            exact = w.gbs if w.gbs is not None else (w.gbs_tokens or 0) / w.seq_len
            low = max(1, math.ceil(exact * (1 - w.gbs_tolerance) - 1e-9))
            return low, max(low, math.floor(exact * (1 + w.gbs_tolerance) + 1e-9))
        if w.gbs is not None:
            return target, target
        return target, math.ceil(target * (1 + TARGET_OVERSHOOT))

    @property
    def per_token(self) -> bool:
        """True when rows may differ in batch size and are therefore ranked per token."""
        return self.workload.gbs is None or self.workload.gbs_tolerance is not None

    def instance(self, gbs: int, splits: Splits) -> Instance:
        """The problem at one global batch size with a list of layer cuts."""
        return Instance(self, gbs, splits)

    def with_(self, **changes: Any) -> Problem:
        """A copy with some of cluster, model, workload, profile, rules, terms, limits, without, goal replaced."""
        fields = ("cluster", "model", "workload", "profile", "rules", "terms", "limits", "without", "goal")
        return Problem(**{name: changes.get(name, getattr(self, name)) for name in fields})


class Instance:
    """What the functions of axes see as ``p``: every quantity that does not depend on a decision.

    Seconds, bytes, FLOP/s and bytes/s throughout. ``memo`` holds the trees built for it.
    """

    def __init__(self, problem: Problem, gbs: int, splits: Splits) -> None:
        self.problem, self.gbs, self.splits = problem, gbs, splits
        self.memo: dict[str, Any] = {}
        self.cluster, self.model, self.workload = problem.cluster, problem.model, problem.workload
        self.profile = problem.profile
        self.framework, self.version = self.workload.framework, problem.version
        self.seq_len = self.workload.seq_len
        self.world = self.cluster.num_gpus
        self.domain = self.cluster.gpus_per_domain

    @property
    def megatron_core(self) -> tuple[int, ...]:
        """Version of Megatron-Core in force, (0, 0) where none is."""
        return self.problem.megatron_core

    @property
    def mtp_layers(self) -> int:
        """Multi-token-prediction modules that are trained."""
        return self.problem.mtp_layers

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether tp > 1 comes with sequence parallelism."""
        if self.workload.sequence_parallel is not None:
            return self.workload.sequence_parallel
        return self.framework not in ("deepspeed", "accelerate")

    @cached_property
    def auto_tp(self) -> bool:
        """Tensor parallelism is DeepSpeed's AutoTP of a Hugging Face model."""
        from parsolve.constraints.framework import auto_tp

        return auto_tp(self.problem)

    @cached_property
    def parallel_loss(self) -> bool:
        """Logits stay divided in the loss; AutoTP gathers them unless head and embedding are tied."""
        return self.workload.parallel_loss and (not self.auto_tp or self.model.tied_embeddings)

    @cached_property
    def matmul_peak(self) -> float:
        """Dense peak of matrix products in the training precision, FLOP/s."""
        return self.cluster.gpu.peak_flops[self.workload.precision]

    @cached_property
    def half_peak(self) -> float:
        """Dense 16-bit peak, used by attention and where fp8 is not applied, FLOP/s."""
        peaks = self.cluster.gpu.peak_flops
        return peaks["fp16"] if self.workload.precision == "fp16" or "bf16" not in peaks else peaks["bf16"]

    @cached_property
    def attention_kernel(self) -> str:
        """The kernel in force: fused attention from compute capability 8.0 on and on AMD, else a fused softmax."""
        modern = self.cluster.gpu.vendor == "amd" or self.cluster.gpu.compute_capability >= 8.0
        return self.workload.attention_kernel or ("flash2" if modern else "fused_softmax")

    @cached_property
    def flash_attention(self) -> bool:
        """Attention never writes its scores to memory."""
        return self.attention_kernel in ("flash1", "flash2")

    @cached_property
    def overlap(self) -> float:
        """1 where communication may run beside compute, else 0."""
        return float(self.workload.overlap and not self.workload.blocking_launches)

    @cached_property
    def usable_bytes(self) -> float:
        """Memory of one GPU less the reserve."""
        return float(self.cluster.gpu.memory_bytes - self.workload.memory_reserve)

    @cached_property
    def gradient_bytes(self) -> float:
        """Bytes per gradient element held: as given, the stack's, else fp32 for FSDP and Megatron's bf16, else 2."""
        if self.workload.gradient_bytes is not None:
            return float(self.workload.gradient_bytes)
        if self.profile.gradient_bytes is not None:
            return self.profile.gradient_bytes
        if self.framework in ("torchtitan", "accelerate"):
            return 4.0
        return 4.0 if self.framework in MEGATRON_LIKE and self.workload.precision != "fp16" else 2.0

    @cached_property
    def reduction_bytes(self) -> float:
        """Bytes per gradient element sent in a reduction: never more than is held."""
        return min(self.profile.reduction_bytes or self.gradient_bytes, self.gradient_bytes)

    @cached_property
    def optimizer_bytes(self) -> int:
        """fp32 master copy plus the optimizer's states: Adam 4+4+4, SGD with momentum 4+4."""
        return 12 if self.workload.optimizer == "adam" else 8

    @cached_property
    def mean_attended(self) -> float:
        """Keys that a query sees, averaged over positions and layers (causal, sliding windows)."""
        s, m = float(self.seq_len), self.model
        full = s / 2
        if m.window is None or m.window >= s:
            return full
        windowed = m.window * (1 - m.window / (2 * s))
        share = len(m.window_layers) / m.num_layers
        return share * windowed + (1 - share) * full


def replace_workload(problem: Problem, **changes: Any) -> Problem:
    """The problem with some workload fields changed."""
    data = {name: getattr(problem.workload, name) for name in Workload.model_fields}
    return problem.with_(workload=Workload.read({**data, **changes}, "workload"))


__all__ = ["Instance", "Problem", "replace_workload"]
