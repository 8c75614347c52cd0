"""``parsolve models``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from parsolve.commands.options import output_options

if TYPE_CHECKING:
    from parsolve.specs import Model

COUNTS = ("num_params", "num_active_params", "embedding_and_head_params", "routed_expert_params", "mtp_params")


@click.command("models", short_help="Model presets, or a file as it is read.")
@click.argument("name", metavar="[NAME|FILE]", required=False)
@click.option("--text-only", is_flag=True, help="Of a multimodal config.json, read the language model only.")
@output_options("table", "json")
def command(name: str | None, text_only: bool, **options: Any) -> int:
    """Model presets; with a name or a file (a Hugging Face config.json too) the shape as read and its parameter counts.

    num_params counts tied weights once and leaves multi-token-prediction modules out: mtp_params are theirs, without
    the embedding and the output layer that they share.

    \b
    Example:
      parsolve models ./my-model/config.json -f json
    """
    from parsolve.commands.output import Output
    from parsolve.loading import load_model
    from parsolve.presets import load_model_preset, model_names
    from parsolve.render.data import to_json
    from parsolve.render.text import columns

    output = Output.of(options)
    if name is None:
        presets = [load_model_preset(stem) for stem in model_names()]
        if output.format == "json":
            output.emit(to_json([as_json(model) for model in presets]))
        else:
            output.emit(columns([_row(model) for model in presets], HEADER, numbers=range(1, 8)))
        return 0
    model = load_model(name, text_only=text_only)
    output.notes("note", model.notes)
    output.emit(to_json(as_json(model)) if output.format == "json" else _text(model, output.width))
    return 0


HEADER = ("model", "parameters", "active", "layers", "hidden", "heads", "kv heads", "experts")


def _row(model: Model) -> tuple[str, ...]:
    from parsolve.units import format_count

    experts = f"{model.moe.top_k} of {model.moe.num_experts}" if model.moe else ""
    active = format_count(model.num_active_params) if model.moe else ""
    shape = (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads)
    return (model.name, format_count(model.num_params), active, *map(str, shape), experts)


def as_json(model: Model) -> dict[str, Any]:
    """The shape as read and the counts."""
    return {**model.model_dump(mode="json"), **{name: getattr(model, name) for name in COUNTS}}


def _text(model: Model, width: int) -> str:
    from parsolve.render.specs import facts

    counts = "\n".join(f"  {name:<28}{getattr(model, name):>22,}" for name in COUNTS)
    return f"{facts(model, width)}\n\nparameters\n{counts}"
