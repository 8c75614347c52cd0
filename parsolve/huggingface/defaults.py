"""What a published file leaves out: the defaults of the configuration class that transformers reads it with.

Only for files that transformers itself wrote (``architectures`` or ``transformers_version``): what such a file lacks is
a default for certain. In a file by hand a missing key is more likely a slip, and is asked for.
"""

from __future__ import annotations

import difflib
import importlib.resources
import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any

from parsolve.huggingface.reader import SPELLINGS

WRITTEN_BY_TRANSFORMERS = ("architectures", "transformers_version")
INSTEAD = {
    "first_k_dense_replace": ("mlp_layer_types",),
    "interleave_moe_layer_step": ("moe_layers",),
    "moe_layer_end_index": ("moe_layer_start_index",),
}
"""Keys that take the place of another: its default is then none of this file's."""
LIKENESS = 0.85


@cache
def _table() -> dict[str, dict[str, Any]]:
    file = importlib.resources.files("parsolve").joinpath("data/huggingface/defaults.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def class_defaults(kind: str, data: Mapping[str, object]) -> dict[str, object]:
    """The defaults of the class of ``kind`` for keys that ``data`` has under no spelling, nor as a typing error."""
    odd = [key for key in data if key not in _known()]
    found: dict[str, object] = {}
    for key, value in _table().get(kind, {}).items():
        others = next((group for group in SPELLINGS.values() if key in group), (key,))
        present = {name.split(".")[0] for name in (*others, *INSTEAD.get(key, ()))} & set(data)
        if not present and not difflib.get_close_matches(key, odd, 1, LIKENESS):
            found[key] = value
    return found


@cache
def _known() -> frozenset[str]:
    names = {name.split(".")[0] for group in SPELLINGS.values() for name in group}
    return frozenset(names.union(*(row for row in _table().values())))
