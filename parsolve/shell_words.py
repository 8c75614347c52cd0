"""The words of a shell command as someone pastes it: continued lines, variables with values on the page, quoted parts.

Nothing is run. Variables are replaced where their values are given in the text; other expansions stay as written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

TYPOGRAPHIC = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " ", "–": "--", "—": "--", "−": "-"})
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[@\])?(?::?-([^{}]*))?\}|(\w+))")
SUM = re.compile(r"\$\(\(([^$()]*(?:\([^$()]*\)[^$()]*)*)\)\)")
MAX_DEPTH, MAX_WORDS, MAX_LETTERS = 8, 20_000, 2**20


def shell_words(text: str) -> tuple[list[str], list[str]]:
    """The words, with known variables replaced, and remarks about what was mended on the way.

    Raises
    ------
    ValueError: quotes that do not close, or variables that grow without end.
    """
    plain = text.translate(TYPOGRAPHIC)
    notes = ["typographic quotes and dashes are read as plain ones"] if _mended(text, plain) else []
    plain = re.sub(r"\\[ \t]*\r?\n", " ", plain)
    plain = re.sub(r"\$\(\(([^\n]*?)\)\)", lambda found: "$((" + re.sub(r"\s", "", found[1]) + "))", plain)
    known: dict[str, str] = {}
    words: list[str] = []
    _expand(shlex.split(plain, comments=True), known, words, 0)
    return words, notes


def _mended(text: str, plain: str) -> bool:
    return text.replace("\u00a0", " ") != plain


def _expand(raw: list[str], known: dict[str, str], words: list[str], depth: int) -> None:
    if depth > MAX_DEPTH or len(words) > MAX_WORDS:
        raise ValueError("its variables lead to more and more words")
    for word in raw:
        found = ASSIGNMENT.fullmatch(word)
        value = _replaced(word, known)
        if found and not found[2].startswith("("):
            known[found[1]] = _replaced(found[2], known)
            words.append(f"{found[1]}={known[found[1]]}")
        elif found:  # the first item of an array
            words.append(f"{found[1]}=(")
            _expand([found[2][1:]] if len(found[2]) > 1 else [], known, words, depth + 1)
        elif re.search(r"(^|\s)--[A-Za-z]", value) and re.search(r"\s", value.strip()):
            _expand(shlex.split(value, comments=True), known, words, depth + 1)  # bash -c '…', or "$OPTIONS"
        else:
            words.append(value)


def _replaced(word: str, known: Mapping[str, str]) -> str:
    """Variables and sums replaced as far as their values are known."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name in known:
            return known[name]
        return found[0] if found[2] is None else found[2]

    for _ in range(MAX_DEPTH):
        named = SUM.sub(
            lambda found: "$((" + re.sub(r"\b[A-Za-z_]\w*", lambda n: known.get(n[0], n[0]), found[1]) + "))", word
        )
        after = SUM.sub(_sum, VARIABLE.sub(value, named))
        if len(after) > MAX_LETTERS:
            raise ValueError("its variables grow without end")
        if after == word:
            break
        word = after
    return word


def _sum(found: re.Match[str]) -> str:
    """A sum of whole numbers as the shell works it out; as written where it is anything else."""
    tokens = re.findall(r"\d{1,18}|[-+*/%()]", found[1])
    if "".join(tokens) != found[1].replace(" ", ""):
        return found[0]
    try:
        return str(_added(tokens)) if tokens else found[0]
    except (ZeroDivisionError, ValueError, IndexError, RecursionError):
        return found[0]


def _added(tokens: list[str]) -> int:
    """``a + b*c / (d - e) % f``; takes all tokens.

    Raises
    ------
    ValueError, IndexError: it is no sum.
    """
    total = _sum_of(tokens)
    if tokens:
        raise ValueError(tokens[0])
    return total


def _sum_of(tokens: list[str]) -> int:
    total = _product(tokens)
    while tokens and tokens[0] in "+-":
        total += _product(tokens) if tokens.pop(0) == "+" else -_product(tokens)
    return total


def _product(tokens: list[str]) -> int:
    total = _number(tokens)
    while tokens and tokens[0] in "*/%":
        sign, other = tokens.pop(0), _number(tokens)
        total = total * other if sign == "*" else total // other if sign == "/" else total % other
    return total


def _number(tokens: list[str]) -> int:
    token = tokens.pop(0)
    if token == "-":
        return -_number(tokens)
    if token != "(":
        return int(token)
    total = _sum_of(tokens)
    if tokens.pop(0) != ")":
        raise ValueError(token)
    return total
