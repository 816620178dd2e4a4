"""Patches without the values of secret names, such as ``password = ...`` in a file of settings."""

from __future__ import annotations

import re

from megatron.util.secrets import HIDDEN, is_secret

_CODE = tuple(".c .cc .cpp .cu .cuh .go .h .hpp .java .js .py .pyi .pyx .rs .ts".split())
"""Files in which a word without quotes is an expression, which is no secret."""
_JSON = (".ipynb", ".json", ".jsonl")
_WORDS = tuple(".bash .md .rst .sbatch .sh .txt .zsh Dockerfile Makefile".split())
"""Files in which a value without quotes is one word. In all others it is the rest of the line."""

_HINT = r"(?=[\w.-]*(?:auth|cookie|cred|jwt|key|pass|pat|pwd|secret|sig|token))"
"""What every secret name has: no time is spent on others."""
_NAME = rf"(?<![\w$.-])(?P<opened>[\"']?){_HINT}(?P<name>-{{0,3}}[a-z_][\w.-]{{0,100}})(?P=opened)"
_ANNOTATION = r"(?::[\w.\[\]| \t]{1,60}(?==))?"
_QUOTED = r"""(?P<quote>"{3}|'{3}|["'])(?P<quoted>(?:\\.|(?!(?P=quote))[^\\\n])*)"""
_SCHEME = r"(?:(?:basic|bearer|digest|token)[ \t]+)?"

_CODE_NAME, _ANY_NAME = (
    re.compile(rf"{_NAME}\]?[ \t]*{pattern}[ \t]*", re.IGNORECASE)
    for pattern in (
        rf"{_ANNOTATION}(?:=>|:=|[:=])(?!=)[ \t]*[bru]{{0,2}}",
        r"(?:=>|:=|:[-=]|:(?!\?)|=(?!=)|(?<=[ \t])(?![-=:]))",
    )
)
"""Names up to their values. That of a flag may be without "="."""
_CODE_VALUE, _JSON_VALUE, _WORD, _LINE = (
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        _QUOTED,
        rf"{_QUOTED}|(?P<bare>[^\s,\"'}}\]]+)",
        rf"{_QUOTED}|(?P<bare>{_SCHEME}[^\s\"'`$;&|(){{}}<>]+)",
        rf"{_QUOTED}|(?P<bare>[^\s\"'][^\n]*)",
    )
)
_NO_SECRET = re.compile(
    r"(?:true|false|null|none|yes|no|on|off|~|-?\d{1,4}|\\|[|>][-+\d]*)?,?|\*{3}.*"
    r"|\$(?:\w+|[{(].*)|[{\[](?:.*[}\],])?|\{[\w.]+\}|<\w+>|%\(\w+\)s",
    re.IGNORECASE,
)
"""Values that say nothing, or where the secret is."""
_KEY_OF_CODE = re.compile(r"(?=.*\d)[\w+/=.-]{16,}")
"""What ``key = "..."`` must be for a secret in code, where most keys are names of something."""


def without_values(patch: str) -> str:
    """A patch of git with ``***`` in place of the values of secret names: those in quotes, and in
    files other than code also those without."""
    return "".join(map(_section, re.split(r"^(?=diff --git )", patch, flags=re.M)))


def _section(section: str) -> str:
    """The part for one file, which begins with its name."""
    title = section.partition("\n")[0].rstrip('"')
    text, binary, rest = section.partition("\nGIT binary patch\n")
    code = title.endswith(_CODE)
    names = _CODE_NAME if code else _ANY_NAME
    values = (
        _CODE_VALUE
        if code
        else _JSON_VALUE
        if title.endswith(_JSON)
        else _WORD
        if title.endswith(_WORDS)
        else _LINE
    )
    pieces, done = [], 0
    found = names.search(text)
    while found is not None:
        end = found.end()
        value = values.match(text, end) if _has_value(found) else None
        if value is not None and not _is_known(found["name"], value, code):
            pieces += [text[done:end], value["quote"] or "", HIDDEN]
            done = end = value.end()
        found = names.search(text, max(end, found.start() + 1))
    return "".join(pieces) + text[done:] + binary + rest


def _has_value(found: re.Match[str]) -> bool:
    assigned = found[0].rstrip()[-1] in ":=>-"
    return is_secret(found["name"]) and (assigned or found["name"].startswith("--"))


def _is_known(name: str, value: re.Match[str], code: bool) -> bool:
    """Whether a value may be seen."""
    quoted = value["quote"] is not None
    text = value["quoted"] if quoted else value["bare"]
    if code and name.lower() in ("key", "pat", "token") and not _KEY_OF_CODE.fullmatch(text):
        return True
    return bool(_NO_SECRET.fullmatch(text.strip()))
