"""Reads the shape that a row of the table of families describes out of a config.json."""

from __future__ import annotations

from parsolve.errors import UnknownNameError
from parsolve.huggingface.family import Experts, Family, Fields
from parsolve.huggingface.reader import SPELLINGS, ConfigReader

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "relu2",
    **dict.fromkeys(["gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh"], "gelu"),
}
MOST_LAYERS = 10_000
PLAIN_MTP = (
    "its multi-token-prediction layers have a plain MLP; here, as in Megatron-Core, they are of the last layer's kind"
)


def read_shape(c: ConfigReader, family: Family, kind: str) -> Fields:
    """The fields of the model spec, but for name, sources and whether embeddings are tied."""
    layers, hidden, heads = c.integer("num_layers"), c.integer("hidden_size"), c.integer("num_heads")
    if layers > MOST_LAYERS:
        raise c.error("num_hidden_layers", f"must be at most {MOST_LAYERS} (got {layers})")
    m: Fields = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": c.integer("vocab_size")}
    m |= dict(family.fixed)
    _check_required(c, family, kind)
    for key, (default, sets) in family.flags.items():
        if c.flag(key, default):
            m |= dict(sets)
    m |= _activation(c)
    if m.get("position") == "learned":
        m["max_positions"] = c.integer("max_positions")
    m |= _latent_attention(c, family, heads) if family.mla else _attention(c, family, kind, heads, hidden)
    m |= _window(c, family, layers)
    if family.experts:
        m |= _experts(c, family.experts, layers)
    else:
        m["ffn_size"] = c.integer("ffn_size", family.ffn_factor and family.ffn_factor * hidden)
    if family.extra:
        m |= family.extra(c, m)
    m["mtp_layers"] = c.integer("mtp_layers", 0, minimum=0) if c.flag("use_mtp", True) else 0
    if m["mtp_layers"] and family.plain_mtp:
        m["notes"] = (PLAIN_MTP,)
    return m


def _check_required(c: ConfigReader, family: Family, kind: str) -> None:
    for key, value in family.require.items():
        given = c.get(key)
        if given is not None and given != value:
            raise c.error(key, f"must be {value!r} for {kind} (got {given!r}); other values are not supported")


def _activation(c: ConfigReader) -> Fields:
    keys = SPELLINGS["mlp_activation"]
    found = {key: c.text(key) for key in keys if c.get(key) is not None}
    unknown = [key for key, name in found.items() if name not in ACTIVATIONS]
    if unknown:
        raise UnknownNameError("activation", found[unknown[0]], ACTIVATIONS, f"{c.where}: {c.prefix}{unknown[0]}")
    kinds = {ACTIVATIONS[str(name)] for name in found.values()}
    if len(kinds) > 1:
        raise c.error(
            next(iter(found)), f"the file names two activations: {', '.join(sorted(map(str, found.values())))}"
        )
    return {"activation": kinds.pop()} if kinds else {}


def _latent_attention(c: ConfigReader, family: Family, heads: int) -> Fields:
    """Multi-head latent attention: ``head_dim`` and ``num_key_value_heads`` in the file mean nothing."""
    if not c.has("q_lora_rank"):
        raise c.error("q_lora_rank", "this key is required (null: full-rank queries)")
    mla: Fields = {"q_lora_rank": c.integer("q_lora_rank") if c.get("q_lora_rank") is not None else None}
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        mla[key] = c.integer(key)
    size = c.integer("qk_nope_head_dim") + c.integer("qk_rope_head_dim")
    return {"mla": mla, "num_kv_heads": heads, "head_dim": size, "rope_base": c.number("rope_base", family.rope_base)}


def _attention(c: ConfigReader, family: Family, kind: str, heads: int, hidden: int) -> Fields:
    """Key/value heads, the size of a head and rotary positions."""
    kv_heads = heads
    if family.kv_heads == "key" and not any(c.has(key.split(".")[0]) for key in SPELLINGS["num_kv_heads"]):
        raise c.missing("num_kv_heads")
    if family.kv_heads != "all":
        kv_heads = c.integer("num_kv_heads", heads)
    elif family.extra is None and c.get("num_key_value_heads") not in (None, heads):
        raise c.error("num_key_value_heads", f"must be {heads} for {kind}, which has as many as heads")

    given = c.find("head_dim") is not None
    if not given and family.head_dim == "key":
        raise c.missing("head_dim")
    if hidden % heads and (family.head_dim == "derived" or (not given and family.head_dim != "floor")):
        raise c.error("head_dim", f"this key is required: {heads} heads do not divide the hidden size {hidden}")
    size = c.integer("head_dim", hidden // heads)
    if family.head_dim == "derived" and size != hidden // heads:
        raise c.error("head_dim", f"must be hidden/heads = {hidden // heads} for {kind} (got {size})")
    return {"num_kv_heads": kv_heads, "head_dim": size, **_rope(c, family, size)}


def _rope(c: ConfigReader, family: Family, head_dim: int) -> Fields:
    if family.fixed.get("position", "rope") != "rope":
        return {}
    fraction = c.number("rope_fraction", family.rope_fraction)
    if c.find("rope_fraction") is None and c.get("rotary_dim") is not None:
        fraction = c.integer("rotary_dim") / head_dim
    return {"rope_base": c.number("rope_base", family.rope_base), "rope_fraction": fraction}


def _window(c: ConfigReader, family: Family, layers: int) -> Fields:
    """The sliding window and its layers; ``layer_types`` decides where it is given."""
    kinds = c.names("layer_types", layers)
    window = family.window
    if window is None or (window.switch and not c.flag(window.switch, False)):
        return {}
    if c.has(window.key) and not c.get(window.key):
        return {}
    if not c.has(window.key) and window.size is None:
        return {}
    if kinds is not None:
        where = tuple(i for i, kind in enumerate(kinds) if kind != "full_attention")
    else:
        where = tuple(window.layers(c, layers))
    return {"window": c.integer(window.key, window.size), "window_layers": where} if where else {}


def _experts(c: ConfigReader, e: Experts, layers: int) -> Fields:
    """The mixture of experts, and the width of the dense layers' MLP."""
    width = c.integer(e.width)
    sparse = set(e.layers(c, layers))
    if not sparse:
        raise c.error("num_experts", "by the file's layer rule no layer has experts; the file is not what it seems")
    score = c.text("scoring_func") or e.score
    if score not in ("softmax", "sigmoid"):
        score = e.score  # the model code does not look at the key, which names other things in some files
    moe: Fields = {
        "num_experts": c.integer("num_experts"),
        "top_k": c.integer("top_k"),
        "ffn_size": width,
        "shared_ffn_size": _shared_width(c, e, width),
        "dense_layers": tuple(i for i in range(layers) if i not in sparse),
        "router_score": score,
        **e.fixed,
    }
    groups = c.integer("n_group", 1)
    if groups > 1 and c.text("topk_method") != "greedy":
        moe |= {"num_groups": groups, "group_top_k": c.integer("topk_group")}
    return {"moe": moe, "ffn_size": c.integer("ffn_size", width if len(sparse) == layers else None)}


def _shared_width(c: ConfigReader, e: Experts, width: int) -> int:
    if e.shared is None:
        return 0
    if e.shared == "one":
        return width
    if e.shared == "count":
        if not any(c.has(key) for key in SPELLINGS["shared_experts"]):
            raise c.missing("shared_experts")
        return width * c.integer("shared_experts", 0, minimum=0)
    return c.integer(e.shared, minimum=1 if e.fixed.get("shared_gate") else 0)
