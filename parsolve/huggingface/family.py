"""What a row of the table of families can say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from parsolve.huggingface.reader import ConfigReader
from parsolve.huggingface.rules import LayerRule, every_layer

Fields = dict[str, object]
Flags = dict[str, tuple[bool, Mapping[str, object]]]


@dataclass(frozen=True)
class Window:
    """Where a sliding window is read: its key, the size where the file is silent, the layers, the switch key."""

    layers: LayerRule = every_layer
    size: int | None = None
    key: str = "sliding_window"
    switch: str | None = None


@dataclass(frozen=True)
class Experts:
    """How a family writes its mixture of experts.

    ``width`` is the key of a routed expert's width. ``shared`` says how wide the shared expert is: ``count`` times
    the routed width, the key that holds the width, or ``one`` of the routed width. ``fixed`` are fields of MoE.
    """

    width: str = "moe_intermediate_size"
    layers: LayerRule = every_layer
    shared: str | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"
    fixed: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """How one architecture reads.

    ``tied``: tied embeddings where the file is silent. ``kv_heads``: ``key`` (required; null: as many as heads),
    ``optional`` (may be absent), ``all`` (no such key). ``head_dim``: ``key`` (required), ``optional``
    (hidden/heads where absent), ``floor`` (the same, rounded down), ``derived`` (always hidden/heads).
    ``ffn_factor``: ffn/hidden where the file is silent.
    ``fixed``: fields that the code sets without a key. ``flags``: boolean key to its default and the fields it sets
    when true. ``require``: keys that must have this value where present. ``extra`` reads what no column can say.
    ``plain_mtp``: layers of multi-token prediction have a plain MLP where the model's last one has experts.
    """

    tied: bool = False
    kv_heads: Literal["key", "optional", "all"] = "key"
    head_dim: Literal["key", "optional", "floor", "derived"] = "optional"
    ffn_factor: int | None = None
    fixed: Mapping[str, object] = field(default_factory=dict)
    flags: Mapping[str, tuple[bool, Mapping[str, object]]] = field(default_factory=dict)
    require: Mapping[str, object] = field(default_factory=dict)
    experts: Experts | None = None
    mla: bool = False
    window: Window | None = None
    rope_base: float = 10000.0
    rope_fraction: float = 1.0
    extra: Callable[[ConfigReader, Fields], Fields] | None = None
    plain_mtp: bool = False
