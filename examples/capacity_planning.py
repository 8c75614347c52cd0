"""How long does a training run take on different numbers of GPUs? A capacity planner's script over the public API.

Run: python examples/capacity_planning.py
"""

from __future__ import annotations

import parsolve

MODEL, TOKENS = "llama2-70b", 2e12
NODES = (8, 16, 32, 64)
GOODPUT = 0.90
"""Share of wall-clock time that ends up in training steps (restarts, checkpoints, evaluation): an assumption."""


def plan(nodes: int) -> parsolve.Plan:
    """The fastest legal plan on this many 8-GPU H100 nodes."""
    problem = parsolve.Problem(f"h100-sxm:{nodes}x8", MODEL, seq_len=4096, gbs=1024)
    return parsolve.solve(problem, top=1).best


def main() -> None:
    """Print one row a cluster size."""
    print(f"{MODEL}, {TOKENS:.3g} tokens, goodput {GOODPUT:.0%}")
    print("GPUs   step time   tokens/s/GPU    MFU    days   GPU-hours   plan")
    for nodes in NODES:
        best = plan(nodes)
        figures, config = best.estimate, best.config
        gpus = nodes * 8
        seconds = TOKENS * figures.time_per_token_s / GOODPUT
        print(
            f"{gpus:4d}   {figures.step_time_s:7.2f} s   {figures.tokens_per_s_per_gpu:12.0f}   {figures.mfu:4.0%}   "
            f"{seconds / 86400:5.1f}   {seconds / 3600 * gpus:9.0f}   "
            f"tp{config.tp} pp{config.pp} cp{config.cp} dp{config.dp} zero{config.zero}"
        )


if __name__ == "__main__":
    main()
