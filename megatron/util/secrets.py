"""Texts without passwords, tokens and keys, which a folder that is shared must not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

HIDDEN = "***"

_SECRET = frozenset(
    "apikey auth authorization cookie credential credentials jwt passphrase passwd password "
    "pwd secret secrets sig signature".split()
)
"""Words of a name whose value is a secret."""
_PERHAPS = frozenset(("key", "pat", "token"))
_WITH = frozenset(
    "access account api aws azure bearer client encryption gcp github gitlab hf hub huggingface "
    "master mlflow ngc nvidia openai private read refresh session signing ssh trackio upload user "
    "wandb write".split()
)
"""Words next to which those of ``_PERHAPS`` mean a secret: ``--eod-token`` has none."""

_NEXT_ADDRESS = re.compile(r"(?<![,;|&<>(){}\[\]=])([,;|&<>(){}\[\]=]+[A-Za-z][\w+.-]*://)")
_USER = re.compile(r"[^:/?#]*:")
_HOST = re.compile(r"(?:[\w-]+(?:\.[\w-]+)+|localhost|\[[\da-fA-F:.]+\]):\d{1,5}[/?#]")
"""A host with its port, after which "@" is a part of the path."""


def _without_passwords(found: re.Match[str]) -> str:
    """Addresses without what is before their last "@": a password may have "/" and "@" in it."""
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
"""Addresses with a name or password, or a key in their query, and forms that services give keys."""
_LEAST = 8
"""Characters of a secret that is looked for everywhere."""


def is_secret(name: str) -> bool:
    """True if a flag or key of this name has a value that only its owner may see."""
    words = _words(name)
    return bool(words & _SECRET) or bool(words & _PERHAPS and (len(words) == 1 or words & _WITH))


def is_secret_variable(name: str) -> bool:
    """True if an environment variable has such a value: a key or token in its name is no token of
    a text, as in flags."""
    return is_secret(name) or bool(_words(name) & _PERHAPS)


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower())) - {""}


class Redactor:
    """Replaces secrets by ``***``: those of known forms, and the values of an environment's secret
    variables wherever they are."""

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
        """A JSON value without secrets, whose tuples stay tuples."""
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

    def arguments(self, words: Sequence[str]) -> list[str]:
        """The words of a command line."""
        shown: list[str] = []
        hide = False
        for word in words:
            name, equals, _ = word.partition("=")
            flag = is_secret(name) and bool(re.fullmatch(r"-{1,2}[\w-]+|\w+", name))
            if hide and not word.startswith("--"):
                shown.append(HIDDEN)
            elif flag and equals:
                shown.append(f"{name}={HIDDEN}")
            else:
                shown.append(self.text(word))
            hide = flag and not equals and word.startswith("--")
        return shown


def without_secrets(value: Any) -> Any:
    """A JSON value without secrets of known names and forms, for what is kept or sent."""
    return Redactor({}).tree(value)
