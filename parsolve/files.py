"""Spec files: TOML, YAML or JSON into plain data, with every odd file refused by name and line."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from parsolve.errors import SpecError

SUFFIXES = (".toml", ".yaml", ".yml", ".json")
MAX_FILE_BYTES = 2**20
MAX_DEPTH = 50
MAX_VALUES = 100_000
MAX_YAML_ALIASES = 30
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def read_file(path: str | Path) -> dict[str, Any]:
    """The table of keys in a TOML, YAML or JSON file (by suffix; a file that starts with ``{`` is JSON in any case).

    NaN and infinity are refused, but for a Hugging Face config (``model_type``), which may hold them in keys that do
    not matter.

    Raises
    ------
    SpecError: naming the file, and the line or key, for anything that is not one such table.
    """
    path = Path(path)
    where = str(path)
    text = _read_text(path, where)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        if not text.lstrip().startswith("{"):
            raise SpecError(f"cannot tell the format; name the file {', '.join(SUFFIXES)}", where)
        suffix = ".json"
    parse = {".toml": _parse_toml, ".json": _parse_json}.get(suffix, _parse_yaml)
    try:
        data = parse(text, where)
    except RecursionError:
        raise SpecError("nested too deeply to be a spec", where) from None
    if data is None or data == {}:
        raise SpecError("the file has no keys", where)
    if not isinstance(data, dict):
        raise SpecError(f"expected a table of keys at the top level, got {type(data).__name__}", where)
    _check_values(data, where, finite="model_type" not in data)
    return data


def _read_text(path: Path, where: str) -> str:
    try:
        if path.is_dir():
            raise SpecError("is a folder, not a file", where)
        if not path.exists():
            raise SpecError("no such file", where)
        if not path.is_file():
            raise SpecError("is not a regular file", where)
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where) from None
    if len(raw) > MAX_FILE_BYTES:
        raise SpecError(f"is larger than {MAX_FILE_BYTES // 2**20} MiB, too large for a spec", where)
    if b"\x00" in raw:
        raise SpecError("is a binary file; expected TOML, YAML or JSON text", where)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SpecError("is not UTF-8 text; save it as UTF-8", f"{where}: line {line}") from None
    if not text.strip():
        raise SpecError("the file is empty", where)
    return text


def _parse_toml(text: str, where: str) -> Any:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        line = re.search(r"at line (\d+)", str(error))
        place = f"{where}: line {line[1]}" if line else where
        raise SpecError(f"not valid TOML: {re.sub(r' [(]at .*', '', str(error))}", place) from None


def _parse_json(text: str, where: str) -> Any:
    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            key = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
            found = [str(n) for n, line in enumerate(text.splitlines(), 1) if json.dumps(key) in line]
            raise SpecError(f"the key {key!r} occurs twice; keep one", f"{where}: line {', '.join(found[:8]) or '?'}")
        return result

    try:
        return json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        raise SpecError(f"not valid JSON: {error.msg}", f"{where}: line {error.lineno}") from None
    except ValueError as error:
        raise SpecError(f"not valid JSON: {error}", where) from None


def _parse_yaml(text: str, where: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Plain data only: no duplicate or merged keys, few aliases, bounded depth."""

        depth = 0
        num_aliases = 0

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            self.num_aliases += self.check_event(yaml.AliasEvent)
            if self.num_aliases > MAX_YAML_ALIASES:
                raise yaml.MarkedYAMLError(problem=f"more than {MAX_YAML_ALIASES} aliases", problem_mark=mark)
            if self.depth > MAX_DEPTH:
                raise yaml.MarkedYAMLError(problem="nested too deeply to be a spec", problem_mark=mark)
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if key.tag != "tag:yaml.org,2002:str":
                    problem = f"keys must be text, and merges (<<) are not read; got {key.value!r:.80}"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                if key.value in seen:
                    problem = f"the key {key.value!r} occurs twice; keep one"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}: line {mark.line + 1}" if mark else where
        raise SpecError(f"not valid YAML: {error.problem or error.context}", place) from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:  # ill-typed scalars
        raise SpecError(f"not valid YAML: {' '.join(str(error).split())}", where) from None


def _check_values(data: dict[str, Any], where: str, *, finite: bool) -> None:
    """Plain values only, finite, printable, bounded in depth and (aliases written out) in number."""
    stack: list[tuple[str, int, Any]] = [("", 0, data)]
    count = 0
    while stack:
        key, depth, value = stack.pop()
        place = f"{where}: {key}" if key else where
        count += 1
        if count > MAX_VALUES or depth > MAX_DEPTH:
            raise SpecError("too many or too deeply nested values to be a spec", where)
        if isinstance(value, dict):
            stack.extend((f"{key}.{part}" if key else str(part), depth + 1, item) for part, item in value.items())
            stack.extend((key, depth + 1, part) for part in value)
        elif isinstance(value, (list, tuple)):
            stack.extend((key, depth + 1, item) for item in value)
        elif isinstance(value, str):
            if _CONTROL.search(value):
                raise SpecError("holds a control character or a broken character", ascii(place)[1:-1])
        elif isinstance(value, float):
            if finite and not math.isfinite(value):
                raise SpecError(f"{value} is not a finite number", place)
        elif value is not None and not isinstance(value, (bool, int)):
            raise SpecError(f"cannot use a {type(value).__name__} here; quote it if it is meant as text", place)
