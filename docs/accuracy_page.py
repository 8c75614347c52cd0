"""The text of docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parsolve.validation import Runs
from parsolve.validation.report import percent

INTRO = """# Accuracy: predicted against measured

Written by `python docs/generate_accuracy.py RUNS.csv`; do not edit by hand. The runs are published measurements
(none was taken by this project), each evaluated with the functions that the solver uses. `parsolve validate RUNS.csv`
prints the same figures for any table of runs.

**Step times in the first table are out of fold**: the constants of each profile were fitted again without a fifth of
the groups (a group is one model, cluster, sequence length and batch in different layouts), and every run is predicted
by the constants that have not seen its group. The shipped constants, fitted on all runs, stand in the second table.
The few memory constants are set per stack and checked against all peaks; those tables have no folds.
"""
MEANING = """
MAPE and median are of |predicted/measured - 1|. Kendall's tau ranks the layouts of a group (groups whose slowest and
fastest differ by at least 1.1). Regret is what following the prediction costs: measured time of the layout predicted
fastest over the measured best, less 1. *OOM called legal* is the costly error: a layout that ran out of memory and is
predicted to fit; *ok refused* the opposite. Memory compares what the published meter sees (allocated, reserved, whole
device) on the stage that was read. The last line is the plain mean over sources with at least ten rows of the kind.
"""
LIMITS = """## What is modelled

Matrix products by a roofline with an efficiency that falls with each small dimension; fused (FlashAttention 1 and 2),
fused-softmax and unfused attention; memory-bound norms, residuals, activations, loss; host launch time as a floor under
small layers; tensor-, context-, expert-, pipeline- and data-parallel communication on two network levels with the
overlap that a stack reaches; 1F1B and interleaved pipelines with unequal stages; ZeRO 0 to 3; recomputation; fp8 with
its casts; the optimizer step; memory per stage with logits, activations in flight, gathered layers, allocator loss and
what lies outside the tensors.

## What is not, and where it shows

* **Runs close to the memory limit** slow down when the allocator frees and allocates again in every step. Layouts that
  the memory model puts at 97 % or more of the card were measured up to 40 % slower than their twins (aleph_alpha_2023,
  13B at 8k tokens on tp=1 pp=1; vtrain_multi, tp=8 with 64 sequences a microbatch). The time model does not know.
* **Groups with unexplained slow runs.** aleph_alpha_2023, 13B at 2k tokens with FlashAttention 2 and pp=2: 72.8 s where
  the same layout with the slower FlashAttention 1 took 44.7 s. Its 65B layouts with tp=8, four sequences and sequence
  parallelism stated off ran 25 % faster, and in less memory, than such layouts can: they look as if it was on.
* **nanotron (ultrascale_playbook_2025)** was measured over one iteration. Rows differ by 10 % in the median on repeats
  and some by 10 to 40 times (135 s against 4.8 s); pipelines with tensor parallelism pay host time per member, which
  is modelled; all runs on 512 GPUs are about three times slower than the trend of the smaller ones, which is not.
* **cuBLAS heuristics.** Single shapes are 20 to 35 % off the smooth efficiency in small models (vtrain_single, tp=8
  with one sequence; bigscience_bloom with a head size of 128 against 112 or 144).
* **fp8 recipes** (tensor-wise, row-wise, block, mx) share one constant; nvfp4 is costed as fp8. Recomputation is often
  not stated for tuned recipes and then assumed off.
* **Selective recomputation outside Megatron** is taken as half of a layer.
* Stragglers, clock throttling and shared fabrics are not modelled.

## Profiles

One file per software stack and hardware family in `parsolve/data/profiles`, each constant with its origin;
`parsolve explain profile --profile NAME` prints them with meaning and unit. A constant at the end of its range (an
overlap of 1, an optimizer traffic of 1) means that the runs of that stack cannot tell it from its neighbours, not that
it is known. A stack of a kind that is not listed gets the conservative default;
`parsolve calibrate` fits a few own runs.
"""
HEADER = (
    "| source | runs | MAPE % | median % | tau | regret mean / max % "
    "| OOM called legal % | ok refused % | memory MAPE % |"
)


def page(held_out: Mapping[str, Any], fitted: Mapping[str, Any], one_stage: Mapping[str, Any], runs: Runs) -> str:
    """The whole page from the summaries out of fold, in sample and for pp = 1."""
    blocks = [INTRO, "## Out of fold\n", _table(held_out), MEANING, _coverage(held_out)]
    ultrascale = one_stage["sources"].get("ultrascale_playbook_2025")
    if ultrascale:
        blocks.append(
            f"ultrascale_playbook_2025 on its pp=1 rows alone: median error {percent(ultrascale['median_ape'])} %, "
            f"median regret {percent(ultrascale['regret_median'])} %, tau {ultrascale['tau']:.2f}.\n"
        )
    blocks += ["## The shipped constants, in sample\n", _table(fitted), "", LIMITS, _assumptions(runs)]
    return "\n".join(blocks)


def _table(summary: Mapping[str, Any]) -> str:
    lines = [HEADER, "|" + "---|" * 9]
    for source, figures in [*summary["sources"].items(), ("**mean over sources**", summary["macro"])]:
        tau = "-" if figures["tau"] is None else f"{figures['tau']:.2f}"
        cells = (
            *(source, str(figures["n_time"]), percent(figures["mape"]), percent(figures["median_ape"]), tau),
            f"{percent(figures['regret_mean'])} / {percent(figures['regret_max'])}",
            *(percent(figures["oom_missed"]), percent(figures["fit_refused"]), percent(figures["memory_mape"])),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _coverage(summary: Mapping[str, Any]) -> str:
    covered = ", ".join(f"{use} {done} of {due}" for use, (done, due) in summary["coverage"].items())
    skipped = "; ".join(f"{number} x {reason}" for reason, number in summary["skipped"].items())
    return f"Covered rows: {covered}. Skipped: {skipped or 'none'}.\n"


def _assumptions(runs: Runs) -> str:
    lines = [f"* {line}: {number} runs" for line, number in runs.assumptions().items()]
    return "\n".join(["## Assumptions for what the runs do not state\n", *lines, ""])
