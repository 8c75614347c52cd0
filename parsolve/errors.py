"""Every error that a user can cause. Each says what is wrong, where, and how to mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ParsolveError(Exception):
    """Base of all errors that parsolve raises on purpose; the command line turns it into exit code 2."""

    exit_code = 2


class SpecError(ParsolveError):
    """A cluster, model, workload or option that cannot be read for certain.

    Parameters
    ----------
    message: what is wrong and how to mend it.
    where: the file, preset or option, and the key inside it, e.g. ``cluster.toml: nic.bandwidth``.
    """

    def __init__(self, message: str, where: str | None = None) -> None:
        self.message, self.where = message, where
        super().__init__(f"{where}: {message}" if where else message)


class UnknownNameError(SpecError):
    """A name that is not in a closed list; suggests near misses, and ``mend`` as another way out."""

    def __init__(self, kind: str, name: object, known: Iterable[str], where: str | None = None, mend: str = "") -> None:
        known = sorted(known)
        near = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
        super().__init__(f"unknown {kind} {str(name)!r}; {hint}{'; ' if mend else ''}{mend}", where)


class NotExpressibleError(ParsolveError):
    """A plan that a launcher has no words for; the message is the reason."""


class InternalError(Exception):
    """A bug in parsolve: two ways of computing the same thing disagree. Exit code 101."""

    exit_code = 101
