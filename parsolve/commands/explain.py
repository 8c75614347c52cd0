"""``parsolve explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from parsolve.commands.options import output_options

if TYPE_CHECKING:
    from parsolve.explaining import Entry
    from parsolve.specs import Profile

HEADS = {
    "rule": "rules: what makes a configuration legal",
    "limit": "limits: quantities that must stay within a budget",
    "warning": "warnings: legal but doubtful",
    "sum": "sums: how terms combine",
    "term": "terms: seconds, bytes or weights over few axes",
    "count": "counts: multipliers of terms by pipeline stage",
}


@click.command("explain", short_help="Formula, axes, source and code of a rule or term.")
@click.argument("name", metavar="[RULE|TERM|profile]", required=False)
@click.option("--profile", default="default", metavar="NAME|FILE", help="The profile that `explain profile` lists.")
@output_options("table", "json")
def command(name: str | None, profile: str, **options: Any) -> int:
    """The formula, axes, unit, source and code of a rule or term, printed from the function itself.

    Without a name: the list of all. The name of a line of the breakdown lists what adds to it; `profile` lists the
    efficiency constants with where each comes from.

    \b
    Example:
      parsolve explain attention_core
    """
    from parsolve.commands.output import Output
    from parsolve.render.data import to_json

    output = Output.of(options)
    if name == "profile":
        from parsolve.profiles import load_profile

        constants = load_profile(profile)
        output.emit(
            to_json(_profile_json(constants)) if output.format == "json" else _profile_text(constants, output.width)
        )
        return 0
    from parsolve.explaining import catalogue, find

    entries = list(catalogue()) if name is None else find(name)
    if output.format == "json":
        output.emit(to_json([entry.to_json(code=name is not None) for entry in entries]))
    elif name is None:
        output.emit(_listing(entries, output.width))
    else:
        output.emit(_full(name, entries, output.width))
    return 0


def _listing(entries: list[Entry], width: int) -> str:
    from parsolve.render.text import wrap

    blocks = []
    for kind, head in HEADS.items():
        lines = [head]
        for entry in entries:
            if entry.kind == kind:
                axes = f" ({', '.join(entry.axes)})" if entry.axes else ""
                lines.append(wrap(f"{entry.name}{axes}: {entry.summary}", width, "      ", "  "))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _full(name: str, entries: list[Entry], width: int) -> str:
    """Entries of the name in full; those that add to the line of that name in short."""
    from parsolve.render.text import wrap

    key = name.strip().lower().replace("-", "_")
    adding = [entry for entry in entries if entry.name != key]
    if all(entry.kind == "sum" for entry in adding):
        return "\n\n".join(_one(entry, width) for entry in entries)
    blocks = [_one(entry, width) for entry in entries if entry.name == key]
    if adding:
        lines = [f"functions that add to the line {key}:"]
        lines += [wrap(f"{entry.name} ({entry.unit}): {entry.summary}", width, "      ", "  ") for entry in adding]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _one(entry: Entry, width: int) -> str:
    from parsolve.functions import AXES
    from parsolve.render.text import wrap

    lines = [
        f"{entry.name}: {entry.kind}, {entry.unit}",
        "",
        *(f"  {line}".rstrip() for line in entry.doc.split("\n")),
        "",
    ]
    for axis in entry.axes:
        lines.append(f"  {axis:<10}{AXES.get(axis, 'slot of a pipeline stage')}")
    facts = {
        "source": entry.source,
        "adds to": ", ".join(entry.lines),
        "frameworks": ", ".join(entry.frameworks),
        "message": entry.message,
        "code": entry.place(),
    }
    lines += [wrap(f"{key}: {value}", width, "    ", "  ") for key, value in facts.items() if value]
    return "\n".join([*lines, "", *(f"    {line}".rstrip() for line in entry.code().split("\n"))])


def _units(profile: Profile) -> dict[str, str]:
    """The unit of every constant: from its type, else a size for half_* and a share for the rest."""
    units = {}
    for name, field in type(profile).model_fields.items():
        extra = field.json_schema_extra
        if name in ("name", "sources"):
            continue
        if isinstance(extra, dict) and "unit" in extra:
            units[name] = str(extra["unit"])
        else:
            units[name] = "elements" if "_half_" in name else "1"
    return units


def _profile_json(profile: Profile) -> dict[str, Any]:
    constants = {
        name: {"value": getattr(profile, name), "unit": unit, "source": profile.sources.get(name, "")}
        for name, unit in _units(profile).items()
    }
    return {"name": profile.name, "constants": constants}


def _profile_text(profile: Profile, width: int) -> str:
    from parsolve.render.text import wrap

    lines = [f"profile {profile.name}", ""]
    for name, unit in _units(profile).items():
        value, source = getattr(profile, name), profile.sources.get(name, "no origin given")
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        lines.append(wrap(f"{name} = {shown}{'' if unit == '1' else ' ' + unit}: {source}", width, "    ", ""))
    return "\n".join([lines[0], "", *(wrap(text, width) for text in [_meaning(profile)]), *lines[1:]])


def _meaning(profile: Profile) -> str:
    doc = (type(profile).__doc__ or "").replace("``", "")
    return " ".join(doc.split())
