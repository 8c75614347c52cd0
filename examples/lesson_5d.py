"""The textbook's 5D-parallelism exercise, rebuilt with the public API: 60 legal configurations.

70e9 parameters, 80 layers, hidden 8192, 64 heads on 16 nodes x 8 GPUs x 80 GiB; 4,000,000 tokens a step at sequence
length 4096. The lesson replaces the memory model by its own limit and uses arithmetic rules only:

    states: 2 + 2 + 12 bytes per parameter, all divided by tp, the part that ZeRO shards divided by dp as well
    activations: 2 * 80 * 4096/cp * mbs * 8192 * 2 bytes, plus 2 GiB; together at most 80 GiB

Run: python examples/lesson_5d.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import parsolve

PARAMETERS, LAYERS, HIDDEN, SEQUENCE = 70e9, 80, 8192, 4096
GIB = 2.0**30


@parsolve.term(unit="B", source="the lesson: 2 + 2 + 12 bytes per parameter, no division by pp")
def lesson_states(p: Any, *, tp: Any, dp: Any, zero: Any) -> Any:
    """Weights, gradients and optimizer states of one GPU, bytes."""
    weights = 2 / np.where(zero >= 3, dp, 1)
    gradients = 2 / np.where(zero >= 2, dp, 1)
    optimizer = 12 / np.where(zero >= 1, dp, 1)
    return PARAMETERS / tp * (weights + gradients + optimizer)


@parsolve.term(unit="B", source="the lesson: two hidden vectors per layer and token, 2 bytes, plus 2 GiB")
def lesson_activations(p: Any, *, cp: Any, mbs: Any) -> Any:
    """Activations of one GPU, bytes."""
    return 2 * LAYERS * (SEQUENCE / cp) * mbs * HIDDEN * 2 + 2 * GIB


lesson_memory = parsolve.limit("lesson memory", [lesson_states, lesson_activations], 80 * GIB)


def solve() -> parsolve.Result:
    """All legal configurations of the exercise, fastest first."""
    model = parsolve.Model(
        name="lesson-70b",
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_size=28672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32000,
    )
    problem = parsolve.Problem("h100-sxm:16x8", model, seq_len=SEQUENCE, gbs_tokens=4_000_000, framework="generic")
    axes = {1, 2, 4, 8}
    return parsolve.solve(
        problem,
        top=None,
        pin={"tp": axes, "pp": axes, "cp": axes, "mbs": 1, "ep": 1, "vpp": 1, "recompute": "none"},
        limits=[lesson_memory],
        without={"memory"},
    )


def main() -> None:
    """Print the legal configurations."""
    result = solve()
    print(f"{len(result.plans)} legal configurations ({result.status})")
    for plan in result.plans:
        c = plan.config
        print(
            f"dp{c.dp} tp{c.tp} pp{c.pp} cp{c.cp} zero{c.zero} grad_acc{c.grad_acc}: {plan.estimate.step_time_s:.2f} s"
        )


if __name__ == "__main__":
    main()
