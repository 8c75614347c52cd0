"""The common base of all specs and the field types that read human units."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from parsolve import units
from parsolve.errors import SpecError, UnknownNameError


def _reader(parse: Any) -> BeforeValidator:
    def read(value: object) -> object:
        try:
            return parse(value)
        except SpecError as error:
            raise ValueError(error.message) from None

    return BeforeValidator(read)


Bytes = Annotated[int, _reader(units.parse_bytes), Field(json_schema_extra={"unit": "bytes"})]
BytesPerSecond = Annotated[float, _reader(units.parse_rate), Field(gt=0, json_schema_extra={"unit": "bytes/s"})]
FlopsPerSecond = Annotated[float, _reader(units.parse_flops), Field(gt=0, json_schema_extra={"unit": "FLOP/s"})]
Seconds = Annotated[float, _reader(units.parse_seconds), Field(json_schema_extra={"unit": "s"})]
Count = Annotated[int, _reader(units.parse_count), Field(gt=0)]


class Spec(BaseModel):
    """Frozen, strict about keys: a typo is an error, never ignored."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,  # nested specs are built once, within the spec that is read
    )

    @classmethod
    def read(cls, data: object, where: str) -> Self:
        """Validate plain data; every error names the file, the key and the mend.

        Raises
        ------
        SpecError: with ``where`` (file or preset) and the key path.
        """
        if not isinstance(data, dict):
            raise SpecError(f"expected a table of keys, got {type(data).__name__}", where)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _first_error(cls, error, where) from None


def _field_names(cls: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at ``path`` below ``cls``, as far as nested specs can be followed."""
    here: type[BaseModel] = cls
    for part in path:
        field = here.model_fields.get(str(part))
        nested = list(getattr(field.annotation, "__args__", None) or (field.annotation,)) if field else []
        specs = [t for t in nested if isinstance(t, type) and issubclass(t, BaseModel)]
        if not specs:
            return []
        here = specs[0]
    return sorted(here.model_fields)


def _first_error(cls: type[BaseModel], error: ValidationError, where: str) -> SpecError:
    details = error.errors()
    # a misspelt key explains the missing one
    first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
    path = tuple(part for part in first["loc"] if part not in ("function-after", "function-before"))
    key = ".".join(str(part) for part in path)
    place = f"{where}: {key}" if key else where
    if first["type"] == "extra_forbidden":
        return UnknownNameError("key", path[-1], _field_names(cls, path[:-1]), place)
    if first["type"] == "missing":
        return SpecError(f"this key is required{_about(cls, path)}", place)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    got = first.get("input")
    shown = "" if isinstance(got, dict) or first["type"] == "value_error" else f" (got {str(got)[:80]!r})"
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return SpecError(f"{message}{shown}{more}", place)


def _about(cls: type[BaseModel], path: tuple[int | str, ...]) -> str:
    """What a missing key is, where its field says so."""
    field = cls.model_fields.get(str(path[-1])) if len(path) == 1 else None
    return f" ({field.description})" if field is not None and field.description else ""
