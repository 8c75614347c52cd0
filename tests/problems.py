"""Random small problems for comparing the solver with the oracle."""

from __future__ import annotations

import random
from typing import Any

from parsolve import Problem, rule
from parsolve.expressions import require_rule
from parsolve.functions import Rule
from parsolve.restrictions import restrict
from parsolve.specs import Cluster, Gpu, Model, MoE, Network, Recompute, Workload

SHAPES = [(1, 4), (1, 6), (1, 8), (2, 4), (3, 4), (1, 7), (5, 2), (1, 5), (2, 8), (3, 8), (4, 8), (1, 16)]


def random_problem(seed: int, large: bool = False) -> Problem:
    """A dense or MoE problem with odd sizes; some are infeasible. ``large`` draws bigger worlds and deeper models."""
    rng = random.Random(seed)
    domains, per_domain = rng.choice(SHAPES if large else SHAPES[:8])
    memory = rng.choice([6, 7, 8, 10, 16, 40])
    gpu = Gpu(
        name="test-gpu",
        compute_capability=rng.choice([7.0, 8.0, 9.0]),
        memory_bytes=memory * 2**30,
        memory_bandwidth=2e12,
        peak_flops={"bf16": 300e12, "fp16": 300e12},
    )
    cluster = Cluster(
        name="test",
        gpu=gpu,
        domains=domains,
        gpus_per_domain=per_domain,
        domain_size=max(8, per_domain),
        gpus_per_host=per_domain,
        fast_link=Network(kind=rng.choice(["nvlink", "pcie"]), bandwidth=rng.choice([50e9, 300e9])),
        nic=Network(kind="ib", bandwidth=rng.choice([12.5e9, 25e9])),
        nics_per_host=rng.choice([1, 4]),
    )
    heads = rng.choice([4, 6, 8, 12, 16, 25])
    kv = rng.choice([k for k in (1, 2, 4, 8, heads) if heads % k == 0])
    layers = rng.choice([3, 4, 6, 7, 8, 10, 12] if large else [2, 3, 4, 5, 6])
    head_dim = rng.choice([64, 128])
    moe = None
    if rng.random() < 0.5:
        experts = rng.choice([4, 6, 8, 16])
        dense = tuple(sorted(rng.sample(range(layers), rng.choice([0, 0, 1, layers // 2]))))
        moe = MoE(
            num_experts=experts,
            top_k=rng.choice([1, 2]),
            ffn_size=rng.choice([512, 768, 1536]),
            shared_ffn_size=rng.choice([0, 1024]),
            dense_layers=dense,
        )
    model = Model(
        name="test-model",
        num_layers=layers,
        hidden_size=heads * head_dim,
        ffn_size=4 * heads * head_dim,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        vocab_size=rng.choice([1000, 32000, 128256]),
        gated_mlp=rng.random() < 0.5,
        tied_embeddings=rng.random() < 0.3,
        moe=moe,
    )
    options: dict[str, Any] = {"gbs": rng.choice([8, 12, 24, 48, 60, 64, 96] if large else [6, 8, 12, 20, 24, 32])}
    mode = rng.random()
    if mode < 0.12:
        options = {"gbs": 12, "gbs_tolerance": 0.1}
    elif mode < 0.24:
        options = {"gbs_tokens": rng.choice([10_000, 50_000])}
    seq_len = rng.choice([512, 1000, 2048, 4096])
    framework = rng.choice(["megatron", "megatron", "deepspeed", "generic", "torchtitan", "accelerate", "nemo"])
    modules = random.Random(f"prediction {seed}").choice([None, None, 1, 2])
    workload = Workload(
        seq_len=seq_len,
        framework=framework,
        mtp_layers=modules if framework in ("megatron", "nemo", "generic") else None,
        recompute=rng.choice([tuple(Recompute), (Recompute.NONE,), (Recompute.NONE, Recompute.FULL)]),
        **options,
    )
    problem = Problem(cluster, model, workload, rules=_user_rules(rng))
    return restrict(problem, _pin(rng)) if rng.random() < 0.15 else problem


@rule("tp*cp is over 4")
def small_groups(p: Any, *, tp: Any, cp: Any) -> Any:
    """A user's rule over two axes."""
    return tp * cp <= 4


@rule("an odd number of microbatches in a pipeline")
def even_depth(p: Any, *, pp: Any, grad_acc: Any) -> Any:
    """A user's rule that ties pipeline and batch."""
    return (pp == 1) | (grad_acc % 2 == 0)


def _user_rules(rng: random.Random) -> tuple[Rule, ...]:
    """Sometimes a rule of the user's, or a pin."""
    draw = rng.random()
    if draw < 0.15:
        return (small_groups,)
    if draw < 0.3:
        return (even_depth,)
    if draw < 0.4:
        return (require_rule("tp >= 2 or mbs == 1"),)
    return ()


def _pin(rng: random.Random) -> dict[str, Any]:
    """A pin that may exclude every plan."""
    axis = rng.choice(["tp", "pp", "cp", "zero", "mbs", "ep", "recompute"])
    return {axis: rng.choice({"zero": [0, 1, 3], "recompute": ["none", "full"]}.get(axis, [1, 2, 4, "1,2"]))}
