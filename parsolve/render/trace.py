"""A pipeline schedule as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from parsolve.units import fold_layers

if TYPE_CHECKING:
    from parsolve.result import Plan


CATEGORIES = {"F": "forward", "B": "backward"}
SPLIT_CATEGORIES = {"F": "forward", "B": "backward for inputs", "W": "backward for weights"}


def chrome_trace(plan: Plan) -> str:
    """The JSON of one step: a process a pipeline rank, a complete event ("X") a pass; ts and dur in microseconds.

    ``F mb3 chunk1`` is the forward pass of microbatch 3 through the rank's chunk 1, ``B`` its backward pass; both count
    from 0. Where the schedule splits it, ``B`` is the pass for the gradients of inputs and ``W`` that for the weights'.
    What comes after the pipeline (gradient reduction, optimizer) is not in it.
    """
    passes, pp, cut = plan.timeline(), plan.config.pp, plan.config.layers_per_stage
    split = bool(passes.is_weight.any())
    events: list[dict[str, object]] = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": rank,
            "tid": 0,
            "args": {"name": f"pipeline rank {rank}, layers {fold_layers([chunks])}"},
        }
        for rank, chunks in enumerate(cut)
    ]
    if plan.problem.mtp_layers:
        rank = plan.config.mtp_rank
        name = f"pipeline rank {rank}, layers {fold_layers([cut[rank]])} + {plan.problem.mtp_layers} MTP"
        events[rank]["args"] = {"name": name}
    for rank, stage, microbatch, back, start, end, late in zip(*(column.tolist() for column in passes), strict=True):
        chunk, letter = stage // pp, "W" if late else "B" if back else "F"
        events.append(
            {
                "ph": "X",
                "name": f"{letter} mb{microbatch} chunk{chunk}",
                "cat": (SPLIT_CATEGORIES if split else CATEGORIES)[letter],
                "pid": rank,
                "tid": 0,
                "ts": 1e6 * start,
                "dur": 1e6 * (end - start),
                "args": {"microbatch": microbatch, "chunk": chunk, "stage": stage, "layers": cut[rank][chunk]},
            }
        )
    about = {"pipeline_s": float(passes.end.max()), "step_time_s": plan.estimate.step_time_s}
    trace = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"
