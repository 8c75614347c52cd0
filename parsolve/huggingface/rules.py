"""Which layers of a family have experts, and which attend to a sliding window only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parsolve.huggingface.reader import ConfigReader

LayerRule = Callable[[ConfigReader, int], Iterable[int]]


# ---- which layers ----------------------------------------------------------------------------------------------
def every_layer(c: ConfigReader, layers: int) -> Iterable[int]:
    """All layers alike."""
    return range(layers)


def after_first_dense(c: ConfigReader, layers: int) -> Iterable[int]:
    """``mlp_layer_types``, or all from ``first_k_dense_replace`` on, each ``moe_layer_freq``-th."""
    types = c.names("mlp_layer_types", layers)
    first = None if types and not c.has("first_k_dense_replace") else c.integer("first_k_dense_replace", minimum=0)
    every = c.integer("moe_layer_freq", 1)
    counted = None if first is None else [i for i in range(first, layers) if i % every == 0]
    if types is None:
        return counted or []
    unknown = sorted(set(types) - {"dense", "sparse"})
    if unknown:
        raise c.error("mlp_layer_types", f"has the unknown entry {unknown[0]!r}; known: dense, sparse")
    listed = [i for i, kind in enumerate(types) if kind == "sparse"]
    if counted is not None and counted != listed:
        raise c.error("mlp_layer_types", "disagrees with first_k_dense_replace; mend one")
    return listed


def sparse_step(c: ConfigReader, layers: int) -> Iterable[int]:
    """Layer i where (i + 1) is a multiple of ``decoder_sparse_step`` and i is not in ``mlp_only_layers``."""
    dense = c.indices("mlp_only_layers", layers) or ()
    step = c.integer("decoder_sparse_step", 1)
    return [i for i in range(layers) if (i + 1) % step == 0 and i not in dense]


def start_to_end(c: ConfigReader, layers: int) -> Iterable[int]:
    """``moe_layer_start_index`` to ``moe_layer_end_index`` (-1: the last), each ``moe_layer_interval``-th."""
    start, interval = c.integer("moe_layer_start_index", minimum=0), c.integer("moe_layer_interval", 1)
    end = c.integer("moe_layer_end_index", -1, minimum=-1)
    end = layers - 1 if end == -1 else end
    return [i for i in range(layers) if start <= i <= end and (i + 1) % interval == 0]


def interleaved(c: ConfigReader, layers: int) -> Iterable[int]:
    """``moe_layers``, or each ``interleave_moe_layer_step``-th."""
    listed = c.indices("moe_layers", layers)
    if listed is not None and not c.has("interleave_moe_layer_step"):
        return listed
    step = c.integer("interleave_moe_layer_step")
    counted = tuple(range(step - 1, layers, step))
    if listed is not None and tuple(sorted(listed)) != counted:
        raise c.error("moe_layers", "disagrees with interleave_moe_layer_step; mend one")
    return counted


# ---- sliding windows -------------------------------------------------------------------------------------------
def all_but_every(default: int) -> LayerRule:
    """Every n-th layer attends to everything (n: ``sliding_window_pattern`` or the default), the others to a window."""

    def layers_with_window(c: ConfigReader, layers: int) -> Iterable[int]:
        every = c.integer("sliding_window_pattern", default)
        return [i for i in range(layers) if (i + 1) % every]

    return layers_with_window


def from_max_window_layers(c: ConfigReader, layers: int) -> Iterable[int]:
    """Qwen: the layers from ``max_window_layers`` on."""
    return range(c.integer("max_window_layers", 28, minimum=0), layers)


def even_below_max_window_layers(c: ConfigReader, layers: int) -> Iterable[int]:
    """Qwen2-MoE: every other layer below ``max_window_layers``."""
    return range(0, min(layers, c.integer("max_window_layers", 28, minimum=0)), 2)


def rope_layers(c: ConfigReader, layers: int) -> Iterable[int]:
    """Llama 4: the layers with rotary positions attend within chunks."""
    every = c.integer("no_rope_layer_interval", 4)
    value = c.get("no_rope_layers")
    flags = value if isinstance(value, list) and len(value) == layers else [(i + 1) % every for i in range(layers)]
    return [i for i, rotary in enumerate(flags) if rotary]
