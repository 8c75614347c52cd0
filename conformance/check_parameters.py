"""Parameters of every pipeline rank of the real GPTModel, built on the meta device, against parsolve's count.

``MEGATRON=folder python check_parameters.py < plans``. Context parallelism changes no parameter and is left out; the
local layer specification stands in for Transformer Engine's, which has the same weights but for the down projections of
latent attention: those it holds whole on every tensor-parallel rank, and so they are counted here.
"""

from __future__ import annotations

import importlib
from typing import Any

import check_megatron as real
import forks
import torch
from megatron_groups import make_groups

TOLERANCE = 1e-9


def check(plan: dict[str, Any]) -> dict[str, Any]:
    """Build all chunks of every pipeline rank and count."""
    args = real.parse(plan)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.Event = lambda *a, **k: None
    args.transformer_impl, args.moe_grouped_gemm = "local", False
    args.recompute_granularity = args.recompute_method = args.recompute_num_layers = args.recompute_modules = None
    args.context_parallel_size = 1
    make_groups(args, args.num_distributed_optimizer_instances)
    config = real.model_config(args)
    for name in ("sequence_parallel", "gradient_accumulation_fusion", "persist_layer_norm", "perform_initialization"):
        setattr(config, name, False)
    config.use_cpu_initialization, config.context_parallel_size = True, 1
    ranks = range(args.pipeline_model_parallel_size)
    counts = [_rank(args, config, rank, ranks[-1] - plan["config"]["mtp_apart"]) for rank in ranks]
    for rank, (seen, wanted) in enumerate(zip(counts, plan["per_stage"], strict=True)):
        for kind, a, b in zip(("dense", "expert"), seen, wanted, strict=True):
            if abs(a - b) > TOLERANCE * max(a, b):
                raise forks.Refused(f"{plan['model']} rank {rank}: {kind} parameters are {a}, parsolve counts {b:.0f}")
    return {}


def _rank(args: Any, config: Any, rank: int, with_modules: int) -> tuple[int, int]:
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    gpt = importlib.import_module("megatron.core.models.gpt")
    padding = importlib.import_module("megatron.core.tokenizers.utils.build_tokenizer")
    gpt.GPTModel.setup_embeddings_and_output_layer = lambda self: None  # copies the tied weight between stages
    _without_head_sizes()
    groups, pp, vpp = real.groups, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    groups.set_pipeline_model_parallel_rank(rank)
    _number_from(rank)
    dense = experts = 0
    for chunk in range(vpp) if vpp else [None]:
        first = rank == 0 and not chunk
        own_last = chunk in (None, (vpp or 1) - 1)
        last = rank == pp - 1 and own_last
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=chunk, pp_rank=rank)
        with torch.device("meta"):
            model = gpt.GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=args.padded_vocab_size or padding.vocab_size_with_padding(args.vocab_size, args),
                max_sequence_length=args.max_position_embeddings,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                rotary_percent=args.rotary_percent,
                vp_stage=chunk,
                mtp_block_spec=_prediction(specs, config, spec, chunk) if own_last and rank == with_modules else None,
            )
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                experts += parameter.numel()
            else:
                whole = "_down_proj.weight" in name
                dense += parameter.numel() * (args.tensor_model_parallel_size if whole else 1)
    return dense, experts


def _number_from(rank: int) -> None:
    """Layers number themselves by their rank in the pipeline's process group, which is 0 in every fake one."""
    own = real.groups.get_pipeline_model_parallel_group()
    for name in ("transformer_layer", "transformer_block"):
        module = importlib.import_module(f"megatron.core.transformer.{name}")
        module.get_pg_rank = lambda group=None: rank if group is own else real.utilities.get_pg_rank(group)


def _prediction(specs: Any, config: Any, spec: Any, chunk: int | None) -> Any:
    """The prediction modules of a stage, whose layer is the stage's last, or the model's where it has none."""
    if not config.mtp_num_layers:
        return None
    if not spec.layer_specs:
        spec = specs.get_gpt_decoder_layer_specs(config, use_transformer_engine=False)[-1]
    return specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=chunk)


def _without_head_sizes() -> None:
    """The local attention product has no parameters; latent attention hands it sizes that only the other one takes."""
    product = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    if getattr(product, "_patched", False):
        return
    original = product.__init__

    def start(self: Any, *words: Any, **named: Any) -> None:
        original(self, *words, **{k: v for k, v in named.items() if k not in ("k_channels", "v_channels")})

    product.__init__, product._patched = start, True


if __name__ == "__main__":
    forks.run(check)
