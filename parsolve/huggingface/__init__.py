"""Reads a Hugging Face config.json into a model spec whose parameter count is exact, or refuses it with the reason."""

from __future__ import annotations

from pathlib import PurePath

from parsolve.errors import SpecError, UnknownNameError
from parsolve.huggingface.defaults import WRITTEN_BY_TRANSFORMERS, class_defaults
from parsolve.huggingface.families import ALIASES, FAMILIES, WRAPPERS, Wrapper
from parsolve.huggingface.family import Family, Fields
from parsolve.huggingface.reader import SPELLINGS, ConfigReader
from parsolve.huggingface.refused import FOREIGN_KEYS, REFUSED_KEYS, REFUSED_TYPES, agrees, with_hint
from parsolve.huggingface.shape import read_shape
from parsolve.specs.model import Model

__all__ = ["read_config"]

TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config.text_config")
OTHER_PARTS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "thinker_config", "visual")
OTHER_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice", "RewardModel", "MaskedLM")
MODEL_FILE = "or write a model file (parsolve schema model)"
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def read_config(data: dict[str, object], where: str, text_only: bool = False) -> Model:
    """The model that a config.json describes.

    Parameters
    ----------
    data: the parsed file.
    where: the file's name, for messages and for the model's name.
    text_only: of a multimodal model, read the language model and leave the rest out.

    Raises
    ------
    SpecError: what cannot be read for certain, with the file, the key and the reason.
    """
    if not isinstance(data, dict):
        raise SpecError(f"expected a table of keys, got {type(data).__name__}", where)
    top = ConfigReader(data, where)
    kind = top.text("model_type") or ""
    if kind in REFUSED_TYPES:
        raise top.error("model_type", f"{kind} {with_hint(REFUSED_TYPES[kind])}")
    _check_words(top)
    if not kind:
        raise top.error("model_type", "this key is required in a Hugging Face config.json")
    part = _text_part(top)
    wrapper = None if kind in FAMILIES or kind in ALIASES else WRAPPERS.get(kind, Wrapper())
    config, text_kind = part or top, kind
    if part is not None:
        _check_levels(top, part)
        text_kind = part.text("model_type") or (wrapper.text if wrapper else None) or ""
    elif kind in WRAPPERS:
        text_kind = WRAPPERS[kind].text or ""
    family = _family(config, text_kind, kind)
    others = [key for key in OTHER_PARTS if top.get(key)]
    multimodal = part is not None or bool(others) or kind in WRAPPERS
    if multimodal and not text_only:
        raise top.error(
            others[0] if others else "model_type",
            f"{kind} is multimodal and only its language model can be planned; pass --text-only to leave the rest out",
        )
    implied = dict(ALIASES.get(text_kind, ("", {}))[1])
    assumed = class_defaults(text_kind, config.data) if any(top.get(key) for key in WRITTEN_BY_TRANSFORMERS) else {}
    config = ConfigReader({**implied, **assumed, **config.data}, where, config.prefix)
    _check_words(config)
    _check_architectures(top, family, text_kind)
    fields = read_shape(config, family, text_kind)
    _refuse_foreign(config, fields, text_kind)
    notes = fields.get("notes", ())
    fields |= {
        "name": _name(where, top, kind),
        "tied_embeddings": _tied(top, config, wrapper if multimodal else None, family),
        "sources": {"shape": f"{where} (Hugging Face {kind})"},
        "notes": (
            *_notes(top, kind, multimodal),
            *_assumed(assumed, config, text_kind),
            *(notes if isinstance(notes, tuple) else ()),
        ),
    }
    return Model.read(fields, where)


def _text_part(top: ConfigReader) -> ConfigReader | None:
    for key in TEXT_PARTS:
        value = top.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise top.error(key, f"must be a table of keys (got {value!r})")
        return ConfigReader(value, top.where, f"{key}.")
    return None


def _check_words(c: ConfigReader) -> None:
    """Keys that no family can be read with, and kinds of layers other than attention."""
    for key, reason in REFUSED_KEYS.items():
        if c.data.get(key):
            raise c.error(key, f"the model {with_hint(reason)} (got {str(c.data[key])[:40]})")
    kinds = c.data.get("layer_types")
    odd = [kind for kind in kinds if kind not in LAYER_TYPES] if isinstance(kinds, list) else []
    if odd:
        raise c.error("layer_types", f"has {odd[0]!r} layers; only {', '.join(LAYER_TYPES)} are modelled")
    flags = c.data.get("attn_type_list")
    if isinstance(flags, list) and any(flag != 1 for flag in flags):
        raise c.error("attn_type_list", "has layers of linear attention, which are not modelled")


def _check_levels(top: ConfigReader, part: ConfigReader) -> None:
    """A shape key on both levels must say the same on both."""
    for key in sorted({spelling for spellings in SPELLINGS.values() for spelling in spellings}):
        outer, inner = top.get(key), part.get(key)
        if outer is not None and inner is not None and outer != inner:
            raise top.error(key, f"is {outer!r}, but {part.prefix}{key} is {inner!r}; mend one")


def _family(config: ConfigReader, text_kind: str, kind: str) -> Family:
    if not text_kind:
        raise config.error("model_type", f"this key is required: {kind} does not say which language model it holds")
    if text_kind in REFUSED_TYPES:
        raise config.error("model_type", f"{text_kind} {with_hint(REFUSED_TYPES[text_kind])}")
    family = FAMILIES.get(ALIASES.get(text_kind, (text_kind,))[0])
    if family is None:
        known = sorted({*FAMILIES, *ALIASES, *WRAPPERS})
        raise UnknownNameError("model_type", text_kind, known, f"{config.where}: {config.prefix}model_type", MODEL_FILE)
    return family


def _check_architectures(top: ConfigReader, family: Family, kind: str) -> None:
    """The class that the file names must be a language model, and no mixture of experts if the type is dense."""
    names = top.get("architectures")
    for name in names if isinstance(names, list) else []:
        if any(head in str(name) for head in OTHER_HEADS):
            raise top.error("architectures", f"{name} has another output head than a language model; not supported")
        if family.experts is None and any(word in str(name).lower() for word in ("moe", "mixtral")):
            raise top.error(
                "architectures", f"{name} is a mixture of experts, but model_type {kind} is dense; mend one"
            )


def _tied(top: ConfigReader, config: ConfigReader, wrapper: Wrapper | None, family: Family) -> bool:
    """Whether embedding and head are one matrix.

    Of a multimodal file transformers 4 asks the text part and its class, since 5 the top level and its class.
    ``transformers_version`` tells which of them wrote the file; without it both must come to the same.
    """
    key = "tie_word_embeddings"
    outer, inner = (reader.flag(key, False) if reader.get(key) is not None else None for reader in (top, config))
    version = (top.text("transformers_version") or "").partition(".")[0]
    since_5 = wrapper is not None and version not in ("", "4")
    if outer is not None and inner not in (None, outer):
        if outer and since_5:
            return True
        raise top.error(key, f"disagrees with {config.prefix}{key}; mend one")
    said = outer if outer is not None else inner
    if said is not None and (outer is not None or not since_5):
        return said
    if wrapper is None or version == "4":
        return family.tied
    said = wrapper.tied if said is None else said
    if said is None or (wrapper.tied if since_5 else family.tied) not in (None, said):
        raise top.error(key, "this key is required: the file does not say whether embedding and head are tied")
    return said


def _refuse_foreign(c: ConfigReader, fields: Fields, kind: str) -> None:
    """A key that shapes a model, but that this family does not read, would make the count a guess.

    Unless it says what the family has anyway.
    """
    for key, reason in FOREIGN_KEYS.items():
        if key not in c.used and c.data.get(key) and not agrees(key, c.data[key], fields):
            raise c.error(key, f"{reason}, but {kind} has no such key (got {str(c.data[key])[:40]}); check model_type")


def _assumed(assumed: dict[str, object], config: ConfigReader, kind: str) -> list[str]:
    taken = [f"{key} {value}" for key, value in assumed.items() if key in config.used]
    return [f"not in the file, so the default of transformers' class of {kind}: {', '.join(taken)}"] if taken else []


def _name(where: str, top: ConfigReader, kind: str) -> str:
    path = PurePath(where)
    stem = path.stem if path.suffix in (".json", ".yaml", ".yml", ".toml") else path.name
    stem = path.parent.name if stem == "config" else stem
    given = top.get("_name_or_path")
    return stem or (PurePath(given).name if isinstance(given, str) else "") or kind


def _notes(top: ConfigReader, kind: str, multimodal: bool) -> list[str]:
    notes = []
    if multimodal:
        notes.append(f"only the language model of {kind} is planned; its vision, audio or other parts are left out")
    if top.get("quantization_config") is not None:
        notes.append("quantization_config is ignored: the shape is that of the unquantised model")
    names = top.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith("Model") and not name.endswith("LMHeadModel"):
        notes.append(f"{name} has no output matrix; one is added for training")
    return notes
