"""The practitioners' rule of thumb, built step by step from the same rules and memory model; no search.

(1) Fit: one GPU holds it: data parallel with ZeRO-1; one fast domain holds it: tp up to 8, else tp = 8 (or the domain)
and pp growing until it fits, recomputation when still too big; cp when the sequence is over 32k; ep for experts.
(2) grad_acc from the batch. (3) Interleave until the bubble (pp-1)/(vpp*m) is at most 10 %.
Source: Narayanan et al. 2021, section 5 takeaways; the Ultra-Scale Playbook (Hugging Face 2025).
"""

from __future__ import annotations

from collections.abc import Iterator

from parsolve.config import Config
from parsolve.evaluation import instance_of, violations
from parsolve.optimizer.domains import divisors, reachable_batches, split_list
from parsolve.problem import Problem
from parsolve.specs import Recompute
from parsolve.splits import Splits

LONG_SEQUENCE = 32768
TOKENS_PER_CONTEXT_RANK = 16384


def rule_of_thumb(problem: Problem) -> Config | None:
    """The first configuration along the steps that is legal, None when none is."""
    gbs = reachable_batches(problem)[0] if problem.per_token else problem.gbs_target[0]
    for recompute in (Recompute.NONE, Recompute.FULL):
        if recompute not in problem.workload.recompute:
            continue
        for tp, cp, pp, ep in _shapes(problem):
            config = _complete(problem, tp, cp, pp, ep, recompute, gbs)
            if config is not None:
                return config
    return None


def _shapes(problem: Problem) -> Iterator[tuple[int, int, int, int]]:
    """(tp, cp, pp, ep) in the order in which a practitioner tries them."""
    cluster, model = problem.cluster, problem.model
    world, domain = cluster.num_gpus, min(8, cluster.gpus_per_domain)
    wanted = -(-problem.workload.seq_len // TOKENS_PER_CONTEXT_RANK) if problem.workload.seq_len > LONG_SEQUENCE else 1
    cp = next((d for d in divisors(world) if d >= wanted), 1)
    tensor = [t for t in divisors(domain) if model.num_heads % t == 0 and world % t == 0]
    pipeline = [p for p in divisors(world) if p <= model.num_layers]
    experts = [e for e in divisors(world) if model.moe and model.moe.num_experts % e == 0] or [1]
    near = [e for e in experts if e <= domain]
    for tp in tensor:
        yield tp, cp, 1, near[-1] if model.moe else 1
    for pp in pipeline[1:]:
        for ep in [near[-1], *[e for e in experts if e > domain]] if model.moe else [1]:
            yield tensor[-1], cp, pp, ep


def _complete(problem: Problem, tp: int, cp: int, pp: int, ep: int, recompute: Recompute, gbs: int) -> Config | None:
    world = problem.cluster.num_gpus
    framework = problem.workload.framework
    divided = framework == "deepspeed" or (framework == "torchtitan" and ep == 1)
    etp = 1 if problem.model.moe and not divided else tp
    stage = 3 if framework in ("torchtitan", "accelerate") and pp == 1 else 1
    if world % (tp * cp * pp) or world % (ep * etp * pp):
        return None
    dp, edp = world // (tp * cp * pp), world // (ep * etp * pp)
    if gbs % dp:
        return None
    microbatches = gbs // dp
    depths = range(1, problem.model.num_layers // pp + 1) if pp > 1 else (1,)
    sequence_parallel = problem.instance(gbs, Splits((), ())).sequence_parallel and tp > 1
    best: Config | None = None
    for vpp in depths:
        for cut in split_list(problem, (pp,), (vpp,)).cuts[:6]:
            config = Config(
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                etp=etp,
                vpp=vpp,
                zero=stage if dp * cp > 1 or edp > 1 else 0,
                recompute=recompute,
                mbs=1,
                grad_acc=microbatches,
                dp=dp,
                edp=edp,
                layers_per_stage=cut.layers,
                sequence_parallel=sequence_parallel,
            )
            broken = [violation.rule for violation in violations(instance_of(problem, config, gbs=gbs), config)]
            if not broken:
                best = best or config
                if (pp - 1) / (vpp * microbatches) <= 0.10:
                    return config
                break
            if vpp == 1 and broken == ["memory"]:  # interleaved chunks hold more at once
                return None
    return best
