"""NeMo's Megatron-Bridge: run_recipe.py on a bare recipe, every setting as an override ``section.field=value``.

Megatron-Bridge configures the same Megatron-Core, so that the plan is first spelt for Megatron-LM and then translated
option by option. Source: Megatron-Bridge 0.6, training/config.py, models/gpt_provider.py, recipes/gpt/vanilla_gpt.py.
"""

from __future__ import annotations

from parsolve.config import Config
from parsolve.launchers.base import Arguments, Launch, torchrun
from parsolve.launchers.megatron import add_arguments, environment
from parsolve.launchers.megatron_options import SINCE
from parsolve.launchers.nemo_options import FLAGS, SILENT, VALUES
from parsolve.problem import NEMO_MEGATRON_CORE, Problem

RECIPE, LATENT_RECIPE = "vanilla_gpt_pretrain_config", "deepseek_v3_pretrain_config"
SCRIPT = "scripts/training/run_recipe.py"
LAYER_LISTS = ("--moe-layer-freq", "--window-attn-skip-freq")


class NemoLauncher:
    """``torchrun … run_recipe.py --recipe vanilla_gpt_pretrain_config model.tensor_model_parallel_size=…``."""

    name = "nemo"
    framework = "nemo"

    def launch(self, problem: Problem, config: Config) -> Launch:
        """The torchrun line with its overrides; see ``Launcher.launch``."""
        args = Arguments("Megatron-LM", SINCE, NEMO_MEGATRON_CORE)
        add_arguments(args, problem, config)
        overrides = translate(args.words, problem, config)
        latent = problem.model.mla is not None
        if latent:
            args.note("the recipe reads the configuration of deepseek-ai/DeepSeek-V3 from the hub, then is overridden")
        args.note(f"run it in a checkout of Megatron-Bridge, which has {SCRIPT}")
        recipe = LATENT_RECIPE if latent else RECIPE
        argv = [*torchrun(args, problem), SCRIPT, "--recipe", recipe, *overrides]
        return Launch(environment(problem, config), argv, notes=args.notes)


def translate(words: list[str], problem: Problem, config: Config) -> list[str]:
    """Megatron-LM's options as overrides, and what the recipe would otherwise add."""
    given = _pairs(words)
    made: dict[str, str] = {}
    for option, value in given.items():
        if option in FLAGS:
            made |= FLAGS[option]
        elif option in LAYER_LISTS:
            made[VALUES[option][0]] = _layer_list(option, problem)
        elif option in VALUES:
            made |= dict.fromkeys(VALUES[option], _literal(option, value))
        elif option not in SILENT:
            raise AssertionError(f"{option} has no translation")  # pragma: no cover - a test compares the tables
    made |= _precision(given)
    if config.vpp > 1 and "--pipeline-model-parallel-layout" not in given:
        made["model.virtual_pipeline_model_parallel_size"] = str(config.vpp)
    made |= {name: value for name, value in _recipe_defaults(problem).items() if name not in made}
    return [f"{name}={value}" for name, value in made.items()]


def _pairs(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            found[word] = ""
        else:
            last = next(reversed(found))
            found[last] = f"{found[last]} {word}".strip()
    return found


def _literal(option: str, value: str) -> str:
    """A value in Hydra's grammar."""
    if option == "--window-size":
        return f"[{value}]"
    if option == "--recompute-modules":
        return f"[{','.join(value.split())}]"
    if option == "--pipeline-model-parallel-layout":
        return f'"{value}"'
    return value


def _layer_list(option: str, problem: Problem) -> str:
    model = problem.model
    windows = set(model.window_layers)
    flags = model.layer_is_moe if option == "--moe-layer-freq" else [i in windows for i in range(model.num_layers)]
    return f"[{','.join(str(int(flag)) for flag in flags)}]"


def _precision(given: dict[str, str]) -> dict[str, str]:
    """Mixed precision by its name. Source: training/mixed_precision.py."""
    if "--fp8-recipe" in given:
        name = "bf16_with_mxfp8_mixed" if given["--fp8-recipe"] == "mxfp8" else "bf16_with_fp8_current_scaling_mixed"
    else:
        name = "fp16_mixed" if "--fp16" in given else "bf16_mixed"
    return {"mixed_precision": name}


def _recipe_defaults(problem: Problem) -> dict[str, str]:
    """What the recipes set and a plan does not have, unless it says so itself."""
    off = {
        "ddp.use_distributed_optimizer": "false",
        "optimizer.use_distributed_optimizer": "false",
        "ddp.overlap_grad_reduce": "false",
        "ddp.overlap_param_gather": "false",
        "optimizer.overlap_param_gather": "false",
        "scheduler.lr_warmup_iters": "0",
        "checkpoint.save": "null",
    }
    if problem.model.mla is None:
        return off
    latent = {
        "model.mtp_num_layers": "null",
        "model.q_lora_rank": "null",
        "model.pipeline_model_parallel_layout": "null",
        "model.virtual_pipeline_model_parallel_size": "null",
        "model.context_parallel_size": "1",
        "model.sequence_parallel": "false",
        "model.recompute_granularity": "null",
        "model.recompute_modules": "null",
        "model.num_moe_experts": "null",
        "model.moe_shared_expert_intermediate_size": "null",
        "model.moe_router_num_groups": "null",
        "model.moe_router_group_topk": "null",
        "model.expert_model_parallel_size": "1",
        "model.expert_tensor_parallel_size": "1",
    }
    return {**off, **latent}
