"""Removal of passwords, tokens and keys from text that is stored in shared folders or uploaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

HIDDEN = "***"

_SECRET = frozenset(
    "apikey auth authorization cookie credential credentials jwt passphrase passwd password "
    "pwd secret secrets sig signature".split()
)
"""A name that contains one of these words has a secret value."""
_PERHAPS = frozenset(("key", "pat", "token"))
_WITH = frozenset(
    "access account api aws azure bearer client encryption gcp github gitlab hf hub huggingface "
    "master mlflow ngc nvidia openai private read refresh session signing ssh trackio upload user "
    "wandb write".split()
)
"""A name with one of these words and one of ``_PERHAPS`` is secret. ``--eod-token`` is not."""

_NEXT_ADDRESS = re.compile(r"(?<![,;|&<>(){}\[\]=])([,;|&<>(){}\[\]=]+[A-Za-z][\w+.-]*://)")
_USER = re.compile(r"[^:/?#]*:")
_HOST = re.compile(r"(?:[\w-]+(?:\.[\w-]+)+|localhost|\[[\da-fA-F:.]+\]):\d{1,5}[/?#]")
"""Host with a port. An "@" after it belongs to the path, not to a password."""


def _without_passwords(found: re.Match[str]) -> str:
    """Hide everything before the last "@" of each URL. A password may contain "/" and "@"."""
    parts = _NEXT_ADDRESS.split(found[0])
    for place in range(0, len(parts), 2):
        before, at, after = parts[place].rpartition("@")
        if at and _USER.match(before) and not _HOST.match(before):
            parts[place] = f"{HIDDEN}@{after}"
    return "".join(parts)


_Replacement = str | Callable[[re.Match[str]], str]
_IN_TEXT: tuple[tuple[re.Pattern[str], _Replacement], ...] = (
    (re.compile(r"(?<=://)[^\s'\"]+"), _without_passwords),
    (re.compile(r"(?<=://)[^/\s@'\"]+@"), f"{HIDDEN}@"),
    (
        re.compile(
            r"([?&](?=[^=&?\s]*(?:auth|credential|key|passw|secret|sig|token))[^=&?\s]*=)[^&\s'\"]+",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(Bearer|Basic) [\w.~+/=-]{8,}"), rf"\1 {HIDDEN}"),
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S
        ),
        HIDDEN,
    ),
    (
        re.compile(
            r"\b(?:hf_\w{20,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
            r"sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{35}|"
            r"wandb_v\d_\w{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
        ),
        HIDDEN,
    ),
)
"""Patterns of URLs with secrets and of known key formats, each with its replacement."""
_LEAST = 8
"""Minimum length for hiding a secret environment variable's value wherever it occurs."""


def is_secret(name: str) -> bool:
    """Return whether the value of a flag or key with this name is secret."""
    words = _words(name)
    return bool(words & _SECRET) or bool(words & _PERHAPS and (len(words) == 1 or words & _WITH))


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable's value is secret. In its name, unlike in a flag's,
    "key" or "token" always means a credential, never a token of text."""
    return is_secret(name) or bool(_words(name) & _PERHAPS)


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower())) - {""}


class Redactor:
    """Filter that replaces secrets by ``***``: secrets in known formats, and the values of secret
    environment variables wherever they occur."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = {
            value
            for name, value in environment.items()
            if is_secret_variable(name) and len(value) >= _LEAST and not value.startswith("/")
        }
        longest_first = sorted(values, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, longest_first))) if values else None

    def text(self, text: str) -> str:
        if self._values is not None:
            text = self._values.sub(HIDDEN, text)
        for pattern, replacement in _IN_TEXT:
            text = pattern.sub(replacement, text)
        return text

    def tree(self, value: Any) -> Any:
        """Return a copy of a JSON value with the secrets hidden. Tuples stay tuples."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                key: HIDDEN if isinstance(inner, str) and is_secret(str(key)) else self.tree(inner)
                for key, inner in value.items()
            }
        if isinstance(value, Iterable) and not isinstance(value, bytes):
            inside = map(self.tree, value)
            return tuple(inside) if isinstance(value, tuple) else list(inside)
        return value


def without_secrets(value: Any) -> Any:
    """Return a copy of a JSON value for storing or sending, with secrets of known forms hidden."""
    return Redactor({}).tree(value)
