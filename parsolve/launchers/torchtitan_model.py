"""The Python file that tells torchtitan a model's shape and its pipeline cut.

It builds on torchtitan's own families (llama3, qwen3, deepseek_v3) and holds numbers only, no text of the user.
"""

from __future__ import annotations

from typing import Any

from parsolve.config import Config
from parsolve.problem import Problem
from parsolve.specs import MLA, Model, MoE
from parsolve.splits import model_order

IMPORTS = """from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import {family} as family
from torchtitan.models.common import {rope}, Embedding, Linear, RMSNorm
from torchtitan.trainer import Trainer
"""
FP8_IMPORT = "from torchtitan.components.quantization import Float8LinearConverter\n"
KEPT_GRAPHS_IMPORT = "import torch._functorch.config\n"
KEPT_GRAPHS = """
# gradients of inputs and of weights are made one after the other from one graph, that of compiled attention too
torch._functorch.config.donated_buffer = False
"""
"""Source: PyTorch 2.13, _functorch/config.py: must be False for a backward pass that keeps its graph; else, measured,
it is refused once the same function has run a whole backward pass."""
BODY = """

def shape():
    norm = RMSNorm.Config(normalized_shape={hidden}, param_init=family._NORM_INIT)
    return family.{model}.Config(
        dim={hidden},
        vocab_size={vocab},
        enable_weight_tying={tied},
        tok_embeddings=Embedding.Config(
            num_embeddings={vocab}, embedding_dim={hidden}, param_init=family.{embedding_init}
        ),
        norm=norm,
        lm_head=Linear.Config(in_features={hidden}, out_features={vocab}, param_init={head_init}),
        layers=family.{builder}(
            rope={rope}.Config(dim={rope_dim}, max_seq_len={seq_len}, theta={theta}),
            attn_backend="flex",
{arguments}
        ),
    )


def pretrain():
    model = shape()
{convert}    spec = replace(family.model_registry("debugmodel"), flavor="parsolve", model=model)
    loss = CrossEntropyLoss.Config(global_vocab_size={vocab})
    return Trainer.Config(
        model_spec=spec,
        loss={loss},
        optimizer=default_adamw(lr=1e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        parallelism=ParallelismConfig(module_fqns_per_model_part={stages}),
    )
"""
CONVERT = """    converter = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)
    model = converter.build().convert(model)
"""


def model_file(problem: Problem, config: Config) -> str:
    """The file's text: ``pretrain()`` returns the configuration that the command line completes."""
    model = problem.model
    family, rope, rope_dim, builder, arguments = _family(model)
    fp8 = problem.workload.precision == "fp8"
    lines = [f"            {name}={value!r}," for name, value in arguments.items()]
    own_init = family == "qwen3"
    body = BODY.format(
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        tied=model.tied_embeddings,
        model={"llama3": "Llama3Model", "qwen3": "Qwen3Model", "deepseek_v3": "DeepSeekV3Model"}[family],
        embedding_init="_EMBEDDING_SKIP_INIT" if model.tied_embeddings else "_EMBEDDING_INIT",
        head_init="family._LINEAR_INIT" if own_init else f"family._output_linear_init({model.hidden_size})",
        builder=builder,
        rope=rope,
        rope_dim=rope_dim,
        seq_len=problem.workload.seq_len,
        theta=float(model.rope_base),
        arguments="\n".join(lines),
        convert=CONVERT if fp8 else "",
        loss="loss" if config.pp > 1 else "ChunkedLossWrapper.Config(loss_fn=loss)",
        stages=_stages(config, problem.workload.schedule),
    )
    imports = IMPORTS.format(family=family, rope=rope) + (FP8_IMPORT if fp8 else "")
    first = "from dataclasses import replace\n"
    if config.pp > 1 and problem.workload.splits_backward:
        first, imports = f"{first}\n{KEPT_GRAPHS_IMPORT}", f"{imports}{KEPT_GRAPHS}"
    return f'"""A model of parsolve for torchtitan 0.3."""\n\n{first}\n{imports}{body}'


def _stages(config: Config, schedule: str) -> str:
    """The modules of each pipeline stage in model order, as a Python expression; None without a pipeline."""
    if config.pp == 1:
        return "None"
    counts = model_order(config.layers_per_stage, schedule)
    parts, first = [], 0
    for i, count in enumerate(counts):
        names = [f"layers.{n}" for n in range(first, first + count)]
        names = ["tok_embeddings", *names] if i == 0 else names
        parts.append([*names, "norm", "lm_head"] if i == len(counts) - 1 else names)
        first += count
    return "[\n" + "".join(f"            {part!r},\n" for part in parts) + "        ]"


def _family(model: Model) -> tuple[str, str, int, str, dict[str, Any]]:
    """Family, class of its rotary positions and their width, function that builds the layers, its arguments."""
    common = {"n_layers": model.num_layers, "dim": model.hidden_size, "n_heads": model.num_heads}
    if model.mla and model.moe:
        arguments = {**common, **_latent(model, model.mla, model.moe)}
        return "deepseek_v3", "ComplexRoPE", model.mla.qk_rope_head_dim, "_build_dsv3_layers", arguments
    common["n_kv_heads"] = model.num_kv_heads
    if model.qk_norm == "none":
        return "llama3", "ComplexRoPE", model.head_dim, "_build_llama3_layers", {**common, "hidden_dim": model.ffn_size}
    common["head_dim"] = model.head_dim
    if model.moe is None:
        return "qwen3", "CosSinRoPE", model.head_dim, "_build_qwen3_layers", {**common, "hidden_dim": model.ffn_size}
    experts = {
        "moe_hidden_dim": model.moe.ffn_size,
        "num_experts": model.moe.num_experts,
        "top_k": model.moe.top_k,
        "moe_comm_backend": "standard",
    }
    return "qwen3", "CosSinRoPE", model.head_dim, "_build_qwen3_moe_layers", {**common, **experts}


def _latent(model: Model, mla: MLA, moe: MoE) -> dict[str, Any]:
    return {
        "n_dense_layers": len(moe.dense_layers),
        "q_lora_rank": mla.q_lora_rank or 0,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mscale": 1.0,
        "dense_hidden_dim": model.ffn_size,
        "moe_hidden_dim": moe.ffn_size,
        "num_experts": moe.num_experts,
        "num_shared_experts": moe.shared_ffn_size // moe.ffn_size,
        "router_top_k": moe.top_k,
        "router_score_func": moe.router_score,
        "router_num_expert_groups": moe.num_groups,
        "router_num_limited_groups": moe.group_top_k,
        "moe_comm_backend": "standard",
        "non_blocking_capacity_factor": None,
    }
