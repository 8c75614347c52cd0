"""Typed look-ups in a config.json: every value is checked, every spelling is compared, nothing is guessed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from parsolve.errors import SpecError

SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "attn_config.kv_n_heads"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "ffn_config.ffn_hidden_size"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "num_experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "ffn_config.moe_num_experts",
    ),
    "top_k": ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", "ffn_config.moe_top_k"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "mtp_layers": ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"),
    "mlp_activation": (
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "activation",
        "ffn_config.ffn_act_fn.name",
    ),
    "rope_base": (
        "rope_theta",
        "rotary_emb_base",
        "rope_parameters.rope_theta",
        "rope_parameters.full_attention.rope_theta",
    ),
    "rope_fraction": (
        "partial_rotary_factor",
        "rotary_pct",
        "rope_pct",
        "rope_percent",
        "rope_parameters.partial_rotary_factor",
    ),
}


PER_LAYER = ("num_experts", "top_k")
"""Quantities that Hunyuan's files give layer by layer; one value where all are alike."""


class ConfigReader:
    """A config.json or a part of it, at the path ``prefix``. Remembers which keys were read."""

    def __init__(self, data: dict[str, object], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix
        self.used: set[str] = set()

    def error(self, key: str, message: str) -> SpecError:
        """The error about ``key``, to be raised by the caller."""
        return SpecError(message, f"{self.where}: {self.prefix}{key}")

    def get(self, key: str) -> object:
        """The value at a dotted path, None where absent or null."""
        self.used |= {key, key.split(".")[0]}
        here: object = self.data
        for part in key.split("."):
            here = here.get(part) if isinstance(here, dict) else None
        return here

    def has(self, key: str) -> bool:
        """Whether the top-level key is in the file, null or not."""
        return key in self.data

    def _given(self, name: str) -> Iterator[tuple[str, object]]:
        for key in SPELLINGS.get(name, (name,)):
            value = self.get(key)
            if value is not None:
                yield key, value

    def find(self, name: str) -> tuple[str, object] | None:
        """The key and value of a quantity under any of its spellings; None where absent or null.

        Raises
        ------
        SpecError: two spellings that disagree.
        """
        given = list(self._given(name))
        for key, value in given[1:]:
            if value != given[0][1]:
                raise self.error(
                    key, f"is {value!r}, but {given[0][0]} is {given[0][1]!r}: they mean the same; mend one"
                )
        return given[0] if given else None

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer quantity; ``default`` None means that the file must have it."""
        found = self.find(name)
        if found is None:
            if default is None:
                raise self.missing(name)
            return default
        key, value = found
        if name in PER_LAYER and isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if isinstance(value, list):
            raise self.error(key, "is a list, a value a layer; models whose layers differ in size are not supported")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer (got {value!r})")
        if value < minimum:
            raise self.error(key, f"must be at least {minimum} (got {value})")
        return value

    def missing(self, name: str) -> SpecError:
        """The error about a required quantity, with a hint at a key that looks like a typing error of it."""
        keys = SPELLINGS.get(name, (name,))
        present = [key for key in keys if key in self.data]
        if present:
            return self.error(present[0], "is null, but the shape depends on it; give its value")
        near = difflib.get_close_matches(keys[0], list(self.data), n=1, cutoff=0.85)
        hint = f"; did you mean it by {near[0]!r}?" if near else ""
        return self.error(keys[0], f"this key is required (the shape is not guessed from class defaults){hint}")

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        found = self.find(name)
        if found is None:
            return default
        key, value = found
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, f"must be a positive number (got {value!r})")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A true/false key."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false (got {value!r})")
        return value

    def text(self, name: str) -> str | None:
        """A string, None where absent."""
        found = self.find(name)
        if found is None:
            return None
        key, value = found
        if not isinstance(value, str):
            raise self.error(key, f"must be a string (got {value!r})")
        return value

    def names(self, key: str, length: int) -> list[str] | None:
        """A list of ``length`` strings (a word a layer), None where absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.error(key, "must be a list of strings")
        if len(value) != length:
            raise self.error(key, f"has {len(value)} entries for {length} layers")
        return value

    def indices(self, key: str, length: int) -> tuple[int, ...] | None:
        """A list of layer numbers from 0, None where absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.error(key, "must be a list of layer numbers")
        bad = [v for v in value if not 0 <= v < length]
        if bad:
            raise self.error(key, f"names layer {bad[0]}, but layers are 0 to {length - 1}")
        return tuple(value)
