"""torchtitan: a torchrun line for torchtitan.train and the Python file that describes the model to it.

How the batch is spelt: without a pipeline ``local_batch_size`` is the micro-batch and torchtitan accumulates
``global_batch_size / (local_batch_size * dp)`` times. In a pipeline all microbatches of a step are one local batch
(mbs * grad_acc), split by ``pipeline_parallel_microbatch_size`` = mbs, and nothing is accumulated outside of it.

How dp is spelt: zero 0 is dp replicas; zero 1 to 3 is one group of dp shards, or replicas of a shard group (hybrid
sharding), weights gathered once (1, 2) or again in the backward pass (3).
Source: torchtitan 0.3, config/configs.py, distributed/parallel_dims.py, trainer.py.
"""

from __future__ import annotations

from parsolve.config import Config
from parsolve.constraints.fsdp import torchtitan_gap
from parsolve.errors import NotExpressibleError
from parsolve.launchers.base import Arguments, Launch, ShellWord, shard_copies, torchrun, train_steps
from parsolve.launchers.torchtitan_model import model_file
from parsolve.problem import Problem
from parsolve.specs import Recompute

MODEL_FILE, MODULE = "titan_model.py", "titan_model"
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
ASSETS = ShellWord('"${HF_ASSETS_PATH:-./tests/assets/tokenizer}"')


class TorchtitanLauncher:
    """``torchrun … -m torchtitan.train --module titan_model …``."""

    name = "torchtitan"
    framework = "torchtitan"

    def launch(self, problem: Problem, config: Config) -> Launch:
        """The torchrun line and the model's file; see ``Launcher.launch``."""
        _refuse(problem, config)
        args = Arguments("torchtitan")
        args.add("--module", MODULE)
        args.add("--config", "pretrain")
        args.add("--hf-assets-path", ASSETS)
        _add_grid(args, problem, config)
        _add_batch(args, problem, config)
        args.words.append("activation-checkpoint:full" if config.recompute else "activation-checkpoint:none")
        args.note(f"run it in a checkout of torchtitan, beside {MODEL_FILE}: data and tokenizer are its test assets")
        if config.pp > 1 and problem.workload.schedule == "dualpipev":
            args.note("torchtitan logs on the last rank, but the loss of DualPipeV is on the first: it shows as -1")
        if problem.model.mtp_layers:
            args.note("multi-token-prediction layers are left out, as in the estimate")
        argv = [*torchrun(args, problem), "-m", "torchtitan.train", *args.words]
        env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        return Launch(env, argv, {MODEL_FILE: model_file(problem, config)}, args.notes)


def _refuse(problem: Problem, config: Config) -> None:
    gap = torchtitan_gap(problem.model)
    if gap:
        raise NotExpressibleError(f"{problem.model.name}: torchtitan's families have no {gap}")
    if config.recompute not in (Recompute.NONE, Recompute.FULL):
        raise NotExpressibleError(
            f"recompute={config.recompute.text}: torchtitan's selective policy keeps other tensors; none or full"
        )
    if config.zero == 1 if config.pp == 1 else config.zero > 1:
        raise NotExpressibleError(f"zero={config.zero} with pp={config.pp}: see `parsolve explain fsdp_stages`")


def _add_grid(args: Arguments, problem: Problem, config: Config) -> None:
    copies = shard_copies(problem, config) if config.zero else config.dp
    args.add("--parallelism.data-parallel-replicate-degree", copies)
    args.add("--parallelism.data-parallel-shard-degree", config.dp // copies)
    args.add("--parallelism.fsdp-reshard-after-forward", "always" if config.zero == 3 else "never")
    args.add("--parallelism.tensor-parallel-degree", config.tp)
    if config.tp > 1 and not config.sequence_parallel:
        args.add("--parallelism.no-enable-sequence-parallel")
    args.add("--parallelism.context-parallel-degree", config.cp)
    args.add("--parallelism.pipeline-parallel-degree", config.pp)
    if config.pp > 1:
        schedule = SCHEDULES[problem.workload.schedule]
        interleaved = schedule == "1F1B" and config.vpp > 1
        args.add("--parallelism.pipeline-parallel-schedule", "Interleaved1F1B" if interleaved else schedule)
        args.add("--parallelism.pipeline-parallel-microbatch-size", config.mbs)
    if problem.model.moe:
        args.add("--parallelism.expert-parallel-degree", config.ep)


def _add_batch(args: Arguments, problem: Problem, config: Config) -> None:
    args.add("--training.local-batch-size", config.mbs * config.grad_acc if config.pp > 1 else config.mbs)
    args.add("--training.global-batch-size", config.gbs)
    args.add("--training.seq-len", problem.workload.seq_len)
    args.add("--training.steps", train_steps(problem, config))
    if config.pp > 1 or config.ep > 1:
        args.add("--training.disable-cuda-graphs")
    if problem.workload.precision == "fp8":
        args.add("--compile.enable")
