"""The text of docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parsolve.validation import Prediction, Runs
from parsolve.validation.metrics import ENOUGH
from parsolve.validation.report import percent
from parsolve.validation.runs import Run

DRAINED = """## Rows of another batch than stated

aleph_alpha_2023, 13B at 2k tokens, FlashAttention 2, pp=2: 16 of its 151 rows. With FlashAttention 1 the layouts tp=1
pp=2 with full recomputation and 1, 2, 4, 8 sequences a microbatch took 42.4, 42.3, 42.5, 44.7 s, with the faster kernel
44.1, 47.4, 55.6, 72.8 s. No column separates them, but one number does: they took as long as a pipeline that is drained
8 times a step, so 8 times the fill and drain of m/8 microbatches (the table marks the batch of this source as derived).
The same kernel at 8k tokens, 30B and 65B shows nothing of it, so it is not modelled: the rows count in every figure
above and in the fit, as they are stated.
"""
INTRO = """# Accuracy: predicted against measured

Written by `python docs/generate_accuracy.py RUNS.csv`; do not edit by hand. The runs are published measurements
(none was taken by this project), each evaluated with the functions that the solver uses. `parsolve validate RUNS.csv`
prints the same figures for any table of runs.

**The first table is out of fold**: the constants of each profile, and those of the hardware base that it starts from,
were fitted again without a fifth of the groups (a group is one model, cluster, sequence length and batch in different
layouts), and every run is predicted by constants that have not seen its group. Memory constants likewise, from peaks
and from which layouts ran out of memory. The shipped constants, fitted on all runs, stand in the second table.
Outside the folds stand what was chosen by trying a few values on all runs: the share of its rate that Omni-Path reaches
(0.18), the rate of products with sides off 128 bytes (0.9), how strongly the priors pull, and, on all rows of
aleph_alpha_2023, how sharply a run on the edge of the card is judged when memory constants are fitted. The pull was
chosen by the means out of fold: 5 everywhere gives a MAPE of 9.2 %, 1 everywhere but on nanotron 8.5 % with a regret of
4.3 % on vtrain_single, 5 where stacks or clusters share constants and 1 elsewhere what stands below.
"""
MEANING = """
MAPE and median are of |predicted/measured - 1|. Kendall's tau ranks the layouts of a group (groups whose slowest and
fastest differ by at least 1.1). Regret is what following the prediction costs: measured time of the layout predicted
fastest over the measured best, less 1. *OOM called legal* is the costly error: a layout that ran out of memory and is
predicted to fit; *ok refused* the opposite. Memory compares what the published meter sees (allocated, reserved, whole
device) on the stage that was read. The last line is the plain mean over sources with at least ten rows of the kind.
"""
LIMITS = """## What is modelled

Matrix products by a roofline with an efficiency that falls where the output has few tiles for the processors and with
a short inner loop; fused (FlashAttention 1 and 2), fused-softmax and unfused attention; memory-bound norms,
residuals, activations, loss; gradients handed over once a microbatch, whatever its tokens; host launch time as a
floor under small layers; tensor-, context-, expert-, pipeline- and data-parallel communication on two network levels
with the overlap that a stack reaches and the share of its rate that a fabric reaches; 1F1B and interleaved pipelines
with unequal stages; ZeRO 0 to 3; recomputation; fp8 with its casts; the optimizer step; memory per stage with logits,
activations in flight, gathered layers, allocator loss and what lies outside the tensors.

## What is not, and where it shows

* **aleph_alpha_2023, 13B at 2k tokens, FlashAttention 2 with pp=2** (16 of its 151 rows) took as long as a pipeline
  that is drained eight times a step: the section below has the rows. A layout of this kind is predicted fastest in
  its group and costs 14 %.
* **aleph_alpha_2023, one stage or two.** At tp=2 without recomputation the older kernels (fused softmax, torch) ran
  pp=2 6 % faster than pp=1, FlashAttention 1 1 to 10 % faster. Attention is the same work in both, so a slower kernel
  makes pp=2 dearer, never cheaper, and the order that they show would hold for FlashAttention 2 as well, where pp=1
  is the fastest with a fused norm, by 17 % over the best pp=2. Either order costs the source at least 1.2 % in the
  mean over its ten groups: 6.0 and 6.5 % in two of them as the model has it, 17 % in one the other way round.
* **aleph_alpha_2023, 13B at 8k tokens, tp=1 pp=1**: 28.1 s where its neighbours lead to 22, and predicted fastest: 28 %
  regret in one of ten groups, half of the source's mean. The twin with
  FlashAttention 1 ran out of memory, so the allocator may have been freeing and allocating. There is no term for runs
  close to the limit: 13B at 2k tokens with a fused norm on tp=1 pp=1 fills the card as well and is the fastest of its
  group, and of the rows that the memory model puts at 95 % or more of the card about half are faster than predicted.
* **Running out of memory, aleph_alpha_2023**: 4 % called legal out of fold, 3 % by the shipped constants. Stronger
  priors, a softer edge and other starts give 4 to 5 % as well: rows on the edge decide, and a row is half a percent.
* **vtrain_multi, five rows of 41**: tp=8 with 64 sequences 9.84 s against 4.97 s with 32 (the same work), tp=8 with 2
  sequences 8.88 s against 5.62 s with 4, tp=4 with 2 sequences 6.23 s against 4.76 s; of 18.4B tp=8 with 16 sequences
  10.51 s against 9.60 s with 8, and tp=4 pp=2 with 4 sequences 10.95 s between 10.86 s (8) and 10.03 s (2). They are
  not monotone in the microbatch and make up a third of the source's error.
* **vtrain_multi, eight stages** (18.4B, four rows): times less the bubble of 1F1B with equal stages, t*m/(m+pp-1), are
  7.9 s with tp=2 pp=4 and 7.0 s with tp=2 pp=8; with tp=8, 8 sequences, 9.6 s on one stage and 9.0 s on eight. The
  output layer on the last stage should make eight stages dearer; the model, which waits for it, is 9 to 16 % above.
  bigscience_bloom shows the same, smaller: 12 stages cost 2 % more than 6, predicted 7 %. Transfers between stages at
  no cost at all do not change it. Without these and the five rows above the source is at 5 % out of fold.
* **vtrain_multi, regret**: tp=4 pp=2 with 2 sequences is predicted fastest, 10.03 s measured against 9.60 s (4.5 %; the
  other group has none). With 2, 4, 8 sequences that layout took 10.03, 10.95, 10.86 s while its bubble grows from 6
  to 25 %, and every row of the source with tp=4 took longer than predicted, by 4 to 8 % apart from two of the five.
* **korthikanti_2022_table5** has two models of two rows: each row is within 3.1 % by the shipped constants, and 6 % off
  in the mean out of fold, where 530B on 280 GPUs is predicted from 22B on one node and flagperf.
* **65B of aleph_alpha_2023 with tp=8, four sequences and sequence parallelism stated off** ran 25 % faster, and in less
  memory, than such layouts can: they look as if it was on.
* **Omni-Path** (Jean Zay: bigscience_bloom, lucie7b_jeanzay_a100): GPU buffers reach a fifth of the line rate; one
  constant of the cluster for both sources. One bloom layout was measured at 130.4 s and at 119.2 s.
* **nanotron (ultrascale_playbook_2025)** was measured over one iteration. Rows differ by 10 % in the median on repeats
  and some by 10 to 40 times (135 s against 4.8 s); pipelines with tensor parallelism pay host time per member, which
  is modelled; all runs on 512 GPUs are about three times slower than the trend of the smaller ones, which is not.
* **cuBLAS heuristics.** Single shapes are 20 to 35 % off the smooth efficiency in small models (vtrain_single, tp=8
  with one sequence; bigscience_bloom with a head size of 128 against 112 or 144, and with slices of 1800 columns).
* **fp8 recipes** (tensor-wise, row-wise, block, mx) share one constant; nvfp4 is costed as fp8. Recomputation is often
  not stated for tuned recipes and then assumed off.
* **Selective recomputation outside Megatron** is taken as half of a layer.
* Stragglers, clock throttling and shared fabrics are not modelled.
"""
PROFILES = """## Profiles

One file per software stack and hardware family in `parsolve/data/profiles`, each constant with its origin, over a
base per hardware (`ampere`, `hopper`) that is fitted on several stacks; a stack keeps the base's value where its runs
do not move it. `parsolve explain profile --profile NAME` prints them with meaning and unit. A constant at the
end of its range (an overlap of 1, an optimizer traffic of 1) means that the runs of that stack cannot tell it from
its neighbours, not that it is known. A stack of a kind that is not listed gets the conservative default; `parsolve
calibrate` fits a few own runs.
"""
DRAINS = 8


def drained(run: Run) -> bool:
    """13B at 2k tokens with FlashAttention 2 on two stages: rows whose stated batch does not explain their times."""
    problem = run.problem
    return (
        run.source == "aleph_alpha_2023"
        and "time" in run.uses
        and run.step_s is not None
        and problem.workload.attention_kernel == "flash2"
        and (problem.workload.seq_len, problem.model.hidden_size, run.config.pp) == (2048, 5120, 2)
    )


def drained_rows(runs: Runs, prediction: Prediction, others: Mapping[str, Any]) -> str:
    """The rows that look drained DRAINS times a step, as predicted and with the bubbles of as many drains."""
    lines = [
        DRAINED,
        "| tp | norm | recompute | mbs | m | measured s | predicted s | drained 8 times s |",
        "|---" * 8 + "|",
    ]
    errors: dict[str, list[float]] = {"as stated": [], "drained": []}
    for run, step in sorted(zip(runs.runs, prediction.step_s, strict=True), key=lambda pair: pair[0].step_s or 0.0):
        config, measured = run.config, run.step_s or 0.0
        ahead, m = config.pp - 1, config.grad_acc
        longer = step * (m + DRAINS * ahead) / (m + ahead)
        norm = "fused" if run.problem.workload.fused_norm else "unfused"
        cells = (config.tp, norm, config.recompute.text, config.mbs, m)
        times = (f"{value:.1f}" for value in (measured, step, longer))
        lines.append("| " + " | ".join([*map(str, cells), *times]) + " |")
        errors["as stated"].append(abs(step / measured - 1.0))
        errors["drained"].append(abs(longer / measured - 1.0))
    stated, longer_error = (percent(sum(values) / len(values)) for values in errors.values())
    lines += [
        "",
        f"Mean error of these rows: {stated} %, drained {DRAINS} times {longer_error} %. The source without them, same "
        f"constants: MAPE {percent(others['mape'])} %, tau {others['tau']:.2f}, mean regret "
        f"{percent(others['regret_mean'])} %.\n",
    ]
    return "\n".join(lines)


HEADER = (
    "| source | runs | MAPE % | median % | tau | regret mean / max % "
    "| OOM called legal % | ok refused % | memory MAPE % |"
)


def page(
    held_out: Mapping[str, Any], fitted: Mapping[str, Any], one_stage: Mapping[str, Any], odd: str, runs: Runs
) -> str:
    """The whole page from the summaries out of fold, in sample and for pp = 1, and the text on odd rows."""
    blocks = [INTRO, "## Out of fold\n", _table(held_out), MEANING, _coverage(held_out)]
    ultrascale = one_stage["sources"].get("ultrascale_playbook_2025")
    if ultrascale:
        blocks.append(
            f"ultrascale_playbook_2025 on its pp=1 rows alone: median error {percent(ultrascale['median_ape'])} %, "
            f"median regret {percent(ultrascale['regret_median'])} %, tau {ultrascale['tau']:.2f}.\n"
        )
        blocks.append(_regret(held_out))
    blocks += ["## The shipped constants, in sample\n", _table(fitted), "", LIMITS, odd, PROFILES, _assumptions(runs)]
    return "\n".join(blocks)


def _regret(summary: Mapping[str, Any]) -> str:
    """The mean regret with the source of single iterations, whose mean a few outliers make, by its median."""
    figures = [
        source["regret_median" if name == "ultrascale_playbook_2025" else "regret_mean"]
        for name, source in summary["sources"].items()
        if source["n_time"] >= ENOUGH and source["regret_mean"] is not None
    ]
    mean = percent(sum(figures) / len(figures))
    return f"Mean regret over sources with ultrascale_playbook_2025 by its median: {mean} %.\n"


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
