"""Random legal plans of every launcher, one JSON object a line: what is printed, and what the real parser should see.

``python conformance/plans.py LAUNCHER VERSION COUNT [SEED]``. Memory is left out of the rules, so that shapes of all
sizes come up; everything else that `parsolve check` knows must hold.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import parsolve
from parsolve.config import Config
from parsolve.constraints.multi_token import may_be_apart
from parsolve.errors import NotExpressibleError
from parsolve.evaluation import instance_of, violations
from parsolve.launchers import launch
from parsolve.launchers.base import shard_copies
from parsolve.objectives import parameters
from parsolve.objectives.schedule import orders, shape_of
from parsolve.objectives.split_backward import FORWARD, sequence
from parsolve.optimizer.domains import divisors, split_list, takes_any_cut
from parsolve.presets import model_names
from parsolve.problem import Problem
from parsolve.specs import Recompute
from parsolve.specs.workload import FOLDED, MEGATRON_LIKE, SPLIT_BACKWARD
from parsolve.splits import Layers, Splits, bounds, free_shape, rank_cuts

CLUSTERS = (
    *("h100-sxm:1x8", "h100-sxm:2x8", "h100-sxm:4x8", "h100-sxm:16x8", "a100-sxm-80gb:4x8", "a100-sxm-80gb:6x8"),
    *("b200:4x8", "gb200-nvl72:2x64", "h100-sxm:3x8", "v100-sxm-32gb:2x8", "h200-sxm:32x8"),
)
SEQUENCES = (2048, 4096, 8192, 32768)
SCHEDULES = ("1f1b", "1f1b", "gpipe", *SPLIT_BACKWARD)
"""Of a launcher that has more than one."""
TRIES = 400
"""Random draws for each plan that is wanted, before giving up."""


def draw(rng: random.Random, framework: str, version: str | None) -> tuple[Problem, Config] | None:
    """One problem and a random configuration that fills its grids; None when the numbers do not go together."""
    cluster, precision = rng.choice(CLUSTERS), "bf16"
    if cluster.startswith("v100"):
        precision = "fp16"
    elif cluster[0] in "hb" and framework != "deepspeed" and rng.random() < 0.2:
        precision = "fp8"
    gbs = rng.choice((64, 96, 128, 256, 512))
    try:
        problem = Problem(
            cluster,
            rng.choice(MODELS),
            seq_len=rng.choice(SEQUENCES),
            gbs=gbs,
            framework=framework,
            framework_version=version,
            precision=precision,
            optimizer=rng.choice(("adam", "adam", "adam", "sgd")),
            sequence_parallel=rng.choice((None, None, False)) if framework != "deepspeed" else rng.choice((None, True)),
            train_tokens=rng.choice((None, 10**12)),
            schedule=rng.choice(SCHEDULES) if framework == "torchtitan" else "1f1b",
            shard_group=rng.choice((None, None, None, 2, 4, 8)),
            zero_quantized=rng.choice((None, "weights", "gradients", "both")) if framework == "deepspeed" else None,
            mtp_layers=rng.choice((None, None, 0, 1, 2)) if framework in MEGATRON_LIKE else None,
            without={"memory"},
        )
    except parsolve.ParsolveError:
        return None
    world, model = problem.cluster.num_gpus, problem.model
    alone = framework == "accelerate" or (framework == "deepspeed" and rng.random() < 0.4)
    tp = 1 if alone else rng.choice(divisors(min(world, 8)))
    alone = alone or (problem.instance(gbs, Splits((), ())).auto_tp and rng.random() < 0.8)
    pp = 1 if alone else rng.choice([d for d in divisors(world // tp) if d <= min(model.num_layers, 16)])
    cp = 1 if alone else rng.choice([1, 1, 1, *(d for d in divisors(world // tp // pp) if d <= 8)])
    dp = world // (tp * pp * cp)
    ep, etp = 1, tp
    if model.moe and not alone:
        etp = rng.choice([1, tp])
        ep = rng.choice([d for d in divisors(world // pp // etp) if model.moe.num_experts % d == 0])
    mbs = rng.choice((1, 1, 2, 4))
    if gbs % (dp * mbs):
        return None
    depths = dict.fromkeys(FOLDED, (2,)) | {"gpipe": (1,)}
    vpp = rng.choice(depths.get(problem.workload.schedule, (1, 1, 2, 3, 4))) if pp > 1 else 1
    layers = draw_cut(rng, problem, pp, vpp)
    if layers is None:
        return None
    split = problem.workload.splits_backward and pp > 1
    recompute = Recompute.NONE if split else rng.choice(list(Recompute))
    config = Config(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        zero=rng.choice((0, 1, 1, 2, 3)),
        recompute=recompute,
        recompute_layers=rng.randint(1, max(map(max, layers))) if recompute == Recompute.BLOCK else 0,
        mbs=mbs,
        grad_acc=gbs // (dp * mbs),
        dp=dp,
        edp=world // (ep * etp * pp),
        layers_per_stage=layers,
        sequence_parallel=tp > 1 and problem.instance(gbs, split_list(problem, (1,), (1,))).sequence_parallel,
        mtp_apart=pp > 2 and may_be_apart(problem) and not layers[-1][-1],
    )
    return problem, config


def draw_cut(rng: random.Random, problem: Problem, pp: int, vpp: int) -> Layers | None:
    """One of the cuts that can be listed, or any cut of the stated domain where the launcher takes such."""
    num_layers = problem.model.num_layers
    if pp > 1 and takes_any_cut(problem) and rng.random() < 0.5 and free_shape(num_layers, pp, vpp):
        side = rng.random() < 0.5
        low, high = bounds(num_layers, pp, vpp)
        ranks, left = [], num_layers
        for rank in range(pp):
            later = slice(rank + 1, None)
            least, most = left - int(high[later].sum()), left - int(low[later].sum())
            every = rank_cuts(num_layers, pp, vpp, rank)
            options = every.only(every.window(max(0, least), most))
            sizes = options.sizes[options.fuller_first if side else options.fuller_last].tolist()
            if not sizes:
                return None
            ranks.append(tuple(rng.choice(sizes)))
            left -= sum(ranks[-1])
        return tuple(ranks) if not left else None
    cuts = split_list(problem, (pp,), (vpp,)).cuts
    return rng.choice(cuts).layers if cuts else None


MODELS = model_names()


def plans(framework: str, version: str | None, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The plans; those that the rules allow and the launcher cannot say come as ``{"gap": reason}``."""
    rng = random.Random(f"{framework} {version} {seed}")
    found = 0
    for _ in range(count * TRIES):
        drawn = draw(rng, framework, version)
        if drawn is None:
            continue
        problem, config = drawn
        if violations(instance_of(problem, config), config):
            continue
        try:
            made = launch(framework, problem, config)
        except NotExpressibleError as error:
            yield {"gap": str(error)}
            continue
        argv, env = made.command({})
        found += 1
        yield {
            "id": found,
            "model": problem.model.name,
            "gpu": problem.cluster.gpu.compute_capability,
            "world": problem.cluster.num_gpus,
            "argv": argv,
            "env": {name: env[name] for name in made.env},
            "files": made.files,
            "config": config.to_json(),
            "shard_copies": shard_copies(problem, config),
            "shard_group": problem.workload.shard_group,
            "zero_quantized": problem.workload.zero_quantized,
            "params": problem.model.num_params,
            "mtp_layers": problem.mtp_layers,
            "per_stage": per_stage(problem, config),
            "schedule": problem.workload.schedule,
            "passes": passes(problem, config) if framework == "torchtitan" and config.pp > 1 else [],
        }
        if found == count:
            return


def per_stage(problem: Problem, config: Config) -> list[list[float]]:
    """Dense and expert parameters of one GPU of every pipeline rank.

    With multi-token prediction Megatron-Core puts the final norm behind the last layer, wherever that is.
    """
    p = instance_of(problem, config)
    flags, result = problem.model.layer_is_moe, []
    first, order = 0, {}
    for chunk in range(config.vpp):
        for rank in range(config.pp):
            size = config.layers_per_stage[rank][chunk]
            order[rank, chunk] = flags[first : first + size]
            first += size
    for rank in range(config.pp):
        layers = [is_moe for chunk in range(config.vpp) for is_moe in order[rank, chunk]]
        dense = layers.count(False) * float(parameters.dense_layer_params(p, config.tp))
        experts = 0.0
        if problem.model.moe:
            dense += layers.count(True) * float(parameters.moe_layer_dense_params(p, config.tp))
            experts = layers.count(True) * float(parameters.expert_layer_params(p, config.etp, config.ep))
        if rank == 0:
            dense += float(parameters.embedding_params(p, config.tp))
        if rank == config.pp - 1:
            tied = problem.model.tied_embeddings and config.pp == 1
            head = parameters.tied_head_params if tied else parameters.head_params
            dense += float(head(p, config.tp))
        if rank == config.mtp_rank and problem.mtp_layers:
            dense += problem.mtp_layers * float(parameters.mtp_own_params(p, config.tp))
            if flags[-1]:
                dense += problem.mtp_layers * float(parameters.moe_layer_dense_params(p, config.tp))
                experts += problem.mtp_layers * float(parameters.expert_layer_params(p, config.etp, config.ep))
            else:
                dense += problem.mtp_layers * float(parameters.dense_layer_params(p, config.tp))
            if config.pp > 1:
                dense += float(parameters.embedding_params(p, config.tp))
        result.append([dense, experts])
    norm_on = next(rank for chunk, rank in reversed(order_of(config)) if config.layers_per_stage[rank][chunk])
    if problem.mtp_layers and norm_on != config.pp - 1:
        norm = problem.model.norm_params if problem.model.final_norm else 0
        result[-1][0] -= norm
        result[norm_on][0] += norm
    return result


def order_of(config: Config) -> list[tuple[int, int]]:
    """(chunk, rank) of the stages in model order."""
    return [(chunk, rank) for chunk in range(config.vpp) for rank in range(config.pp)]


def passes(problem: Problem, config: Config) -> list[str]:
    """The passes of every rank as PyTorch writes them: ``0F3`` stage, kind and microbatch, ``0F3+5B1`` a pair.

    B: the whole backward pass, I and W: the gradients of inputs and of weights.
    """
    kind = problem.workload.schedule
    shape = shape_of(config.pp, config.vpp, config.grad_acc, kind)
    if not shape.splits_backward:
        stages, m = config.pp * config.vpp, shape.microbatches
        return [
            " ".join(f"{at // m % stages}{'FB'[at // m // stages]}{at % m}" for at in order.passes.tolist())
            for order in orders(shape)
        ]
    result = []
    for rank in range(config.pp):
        one = sequence(kind, config.pp, config.vpp, shape.microbatches, rank)
        mine = [stage for stage, home in enumerate(shape.ranks.tolist()) if home == rank]
        words, start = [], 0
        names = [
            f"{mine[chunk]}{'FIW'[what]}{microbatch}"
            for what, chunk, microbatch in zip(*(column.tolist() for column in one[:3]), strict=True)
        ]
        while start < len(names):
            end = int(one.sent_after[start])
            if one.kind[start] == FORWARD and end > start:
                words.append(f"{names[start]}+{_whole(names[start + 1 : end + 1])}")
            else:
                words.append(_whole(names[start : end + 1]))
            start = end + 1
        result.append(" ".join(words))
    return result


def _whole(names: list[str]) -> str:
    """A pass, or two that are one whole backward pass."""
    return names[0] if len(names) == 1 else names[0].replace("I", "B")


def main() -> None:
    """Print the plans of one launcher."""
    framework, version, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    for plan in plans(framework, None if version == "-" else version, count, seed):
        print(json.dumps(plan))


if __name__ == "__main__":
    main()
