"""Random small problems for comparing the solver with the oracle."""

from __future__ import annotations

import random
from typing import Any

from parsolve import Problem
from parsolve.specs import Cluster, Gpu, Model, MoE, Network, Recompute, Workload


def random_problem(seed: int) -> Problem:
    """A dense or MoE problem with odd sizes; about one in four is infeasible."""
    rng = random.Random(seed)
    domains, per_domain = rng.choice([(1, 4), (1, 6), (1, 8), (2, 4), (3, 4), (2, 8), (3, 8), (1, 7), (5, 2), (4, 8), (1, 16)])
    memory = rng.choice([6, 10, 16, 24, 40, 80])
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
    layers = rng.choice([3, 4, 6, 7, 8, 10, 12])
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
    options: dict[str, Any] = {"gbs": rng.choice([8, 12, 24, 48, 60, 64, 96])}
    mode = rng.random()
    if mode < 0.12:
        options = {"gbs": 24, "gbs_tolerance": 0.2}
    elif mode < 0.24:
        options = {"gbs_tokens": rng.choice([50_000, 100_000])}
    workload = Workload(
        seq_len=rng.choice([512, 1000, 2048, 4096]),
        framework=rng.choice(["megatron", "megatron", "deepspeed", "generic"]),
        recompute=rng.choice([tuple(Recompute), (Recompute.NONE,), (Recompute.NONE, Recompute.FULL)]),
        **options,
    )
    return Problem(cluster, model, workload)
