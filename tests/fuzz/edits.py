"""Edits of files that know what is inside: bytes, lines, JSON, pickles, members of archives.

An edit is two numbers, from which everything follows: a finding is reproduced by its edits.
"""

from __future__ import annotations

import gzip
import io
import json
import pickletools
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

NUMBERS = (
    0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32 - 6, 2**32 - 1, 2**53,
    2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), 10**30, 10**400, 0.5, -0.0, 1e300,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "a", "\0", "\n", "\r\n", "\t", "\ufeff", "\ud800", "\udfff\ud800", "e" + "\u0301" * 99,
    "\U0010ffff", "None", "null", "nan", "-1", "1e999", "0x10", "../../../etc/passwd",
    "/etc/passwd", "/dev/zero", "file:///etc/passwd", "http://127.0.0.1:9/x", "reference://a::/etc/passwd",
    "__class__", "{{ 7 * 7 }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}", "%s%n", "(a+)+$", "[[[[" * 50, "x" * 70_000, "[" * 3_000, "\\" * 3_000,
    '"' * 3_000, "<" * 3_000, "& " * 3_000, "9" * 5_000, "float99", "global_step9", "model_type",
)  # fmt: skip
"""What programs expect least."""


class Edit(NamedTuple):
    """One change of one file.

    Attributes:
        file: which, by its place in their order, modulo their number.
        seed: of everything else.
    """

    file: int
    seed: int


def files_of(folder: Path) -> list[Path]:
    """The files below a folder, in an order that does not depend on the file system."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def apply(folder: Path, edits: Sequence[Edit]) -> None:
    """Edits files below a folder, one edit after the other."""
    for edit in edits:
        files = files_of(folder)
        if not files:
            return
        path, rng = files[edit.file % len(files)], random.Random(edit.seed)
        if rng.random() < 0.04:
            _replace(path, rng)
        else:
            path.write_bytes(edited(path.read_bytes(), rng))


def _replace(path: Path, rng: random.Random) -> None:
    """The file is missing, empty, a folder, or has another's content."""
    content = rng.choice(files_of(path.parent)).read_bytes()
    path.unlink()
    match rng.randrange(4):
        case 0:
            path.touch()
        case 1:
            path.mkdir()
        case 2:
            path.write_bytes(content)


def edited(data: bytes, rng: random.Random) -> bytes:
    """The content with one edit, mostly one that keeps its structure."""
    if rng.random() > 0.15:
        for form in (_zip, _packed, _safetensors, _pickle, _json, _lines):
            found = form(data, rng)
            if found is not None:
                return found
    return edited_bytes(data, rng)


def edited_bytes(data: bytes, rng: random.Random) -> bytes:
    """The content with another byte, number, or range."""
    at = rng.randrange(len(data) + 1)
    if rng.random() < 0.5:
        at = min(at, rng.randrange(256))  # where headers are
    end = min(len(data), at + rng.choice((1, 2, 8, 64, 4096)))
    match rng.randrange(8):
        case 0:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 1:
            bit = data[at] ^ (1 << rng.randrange(8)) if at < len(data) else 0
            return data[:at] + bytes([bit]) + data[at + 1 :]
        case 2:
            form = rng.choice("HIQ")
            number = rng.choice([n for n in NUMBERS if isinstance(n, int)])
            bits = 8 * struct.calcsize(f"<{form}")
            packed = struct.pack(f"<{form}", number % (1 << bits))
            at = at & ~7 if rng.random() < 0.5 else at
            return data[:at] + packed + data[at + len(packed) :]
        case 3:
            return data[:at]
        case 4:
            return data[:at] + data[end:]
        case 5:
            return data[:end] + data[at:]
        case 6:
            return data[:at] + _text(rng) + data[at:]
        case _:
            return data[:at] + bytes(rng.choice((1, 16, 1 << 16))) + data[at:]


def _text(rng: random.Random) -> bytes:
    return rng.choice(TEXTS).encode("utf-8", "surrogatepass")


def _zip(data: bytes, rng: random.Random) -> bytes | None:
    """Another member, name or compression of an archive."""
    if not data.startswith(b"PK\3\4"):
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError, zlib.error):
        return None
    if not members:
        return None
    at = rng.randrange(len(members))
    if rng.random() < 0.5:  # the pickle, which all else follows from
        at = next((i for i, (name, _) in enumerate(members) if name.endswith(".pkl")), at)
    name, content = members[at]
    match rng.randrange(16):
        case 0:
            del members[at]
        case 1:
            members.append(members[at])
        case 2:
            members[at] = (rng.choice(("../x", "/x", "", name.upper(), "x" * 300)), content)
        case 3:
            members[at] = (name, bytes(1 << 26))
        case _:
            members[at] = (name, edited(content, rng))
    buffer = io.BytesIO()
    form = zipfile.ZIP_DEFLATED if rng.random() < 0.2 else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", form) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, form)
    return buffer.getvalue()


def _packed(data: bytes, rng: random.Random) -> bytes | None:
    """What is in a compressed file."""
    try:
        if data.startswith(b"\x1f\x8b"):
            return gzip.compress(edited(gzip.decompress(data), rng), 1)
        if data.startswith(b"\x28\xb5\x2f\xfd"):
            content = zstandard.ZstdDecompressor().stream_reader(data).read(1 << 26)
            return zstandard.ZstdCompressor(1).compress(edited(content, rng))
    except (OSError, EOFError, zlib.error, zstandard.ZstdError):
        pass  # an earlier edit damaged it
    return None


def _safetensors(data: bytes, rng: random.Random) -> bytes | None:
    """Another header, of the right length."""
    if data[8:9] != b"{":
        return None
    stop = 8 + int.from_bytes(data[:8], "little")
    header = _json(data[8:stop], rng)
    return None if header is None else struct.pack("<Q", len(header)) + header + data[stop:]


def _pickle(data: bytes, rng: random.Random) -> bytes | None:
    """Another opcode or argument."""
    if data[:1] != b"\x80":
        return None
    try:
        places = [place for _, _, place in pickletools.genops(data)]
    except Exception:  # what is not a pickle
        return None
    at = rng.randrange(1, len(places)) if len(places) > 1 else 0
    start, stop = places[at], places[at + 1] if at + 1 < len(places) else len(data)
    opcode = data[start:stop]
    match rng.randrange(6):
        case 0:
            opcode = b""
        case 1:
            opcode += opcode
        case 2:
            other = rng.randrange(len(places) - 1)
            opcode = data[places[other] : places[other + 1]]
        case 3:
            number = rng.choice([n for n in NUMBERS if isinstance(n, int)])
            packed = number.to_bytes(200, "little", signed=True).rstrip(b"\0") or b"\0"
            opcode = b"\x8a" + bytes([len(packed)]) + packed if len(packed) < 256 else b"N"
        case 4:
            text = _text(rng)
            opcode = b"X" + struct.pack("<I", len(text)) + text
        case _:
            opcode = rng.choice(
                (b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nTensor\n", b"N", b"}", b"]",
                 b")", b"R", b"b", b"0", b"(", b"u", b"\x88", b"G" + struct.pack(">d", 1e300))
            )  # fmt: skip
    return data[:start] + opcode + data[stop:]


def _json(data: bytes, rng: random.Random) -> bytes | None:
    """Another value or key somewhere in a JSON document."""
    if data.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return None
    try:
        text = json.dumps(edited_tree(tree, rng))
    except RecursionError:
        return None
    if rng.random() < 0.05:  # what json.dumps does not write
        text = text.replace(rng.choice((",", ":", "}", "1", '"')), _hostile_json(rng), 1)
    return text.encode("utf-8", "surrogatepass")


def _hostile_json(rng: random.Random) -> str:
    deep = rng.choice((50, 900, 5_000, 200_000))
    return rng.choice(
        ("[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep, "9" * 10_000, "1e999", "-",
         "\\ud800", "NaN", "'", "//", '{"a": 1, "a": 2}')
    )  # fmt: skip


def edited_tree(tree: Any, rng: random.Random) -> Any:
    """A JSON document with another value or key at a place that is drawn; it changes the given
    one."""
    places: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys = node if isinstance(node, dict) else range(len(node)) if node else ()
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                waiting.append(node[key])
    if not places:
        return _value(rng, tree)
    node, key = rng.choice(places)
    match rng.randrange(10):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[rng.choice(TEXTS)] = node.pop(key)
        case 1:
            node.insert(key, node[key])
        case 2:
            other, place = rng.choice(places)
            node[key] = json.loads(json.dumps(other[place]))
        case 3 if isinstance(node, list):
            node.extend(node[key : key + 1] * rng.choice((1, 100)))
        case 3:
            node[rng.choice(TEXTS)] = _value(rng, node[key])
        case _:
            node[key] = _value(rng, node[key])
    return tree


def _value(rng: random.Random, old: Any) -> Any:
    """Of the same type mostly: others are refused at once."""
    kind: Callable[[], Any]
    number, text = (lambda: rng.choice(NUMBERS)), (lambda: rng.choice(TEXTS))
    if isinstance(old, int | float) and not isinstance(old, bool) and rng.random() < 0.7:
        near = [old + 1, old - 1, old * 2, old // 2] if isinstance(old, int) else [-old, old * 1e9]
        return rng.choice(near) if rng.random() < 0.4 else number()
    if isinstance(old, str) and rng.random() < 0.6:
        at = rng.randrange(len(old) + 1)
        return old[:at] + text() + old[at + rng.randrange(3) :] if rng.random() < 0.5 else text()
    kind = rng.choice(
        (number, text, lambda: None, lambda: True, lambda: False, lambda: [], lambda: {},
         lambda: [old], lambda: {"a": old}, lambda: [number(), text()], lambda: _deep(rng))
    )  # fmt: skip
    return kind()


def _deep(rng: random.Random) -> Any:
    tree: Any = 1
    for _ in range(rng.choice((20, 200, 900))):
        tree = [tree] if rng.random() < 0.5 else {"a": tree}
    return tree


def _lines(data: bytes, rng: random.Random) -> bytes | None:
    """Another line of a text."""
    if b"\0" in data[:64] or not data:
        return None
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    line = lines[at]
    match rng.randrange(8):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, line)
        case 2:
            lines[at] = line.rstrip(b"\n") + rng.choice((b"\r", b"\0", b"\t", b" ", b"")) + b"\n"
        case 3:
            words = line.split(b" ")
            words[rng.randrange(len(words))] = _text(rng)
            lines[at] = b" ".join(words)
        case 4:
            lines[at] = line[: rng.randrange(len(line) + 1)]
        case 5:
            lines[at] = _hostile_json(rng).encode() + b"\n"
        case _:
            found = _json(line, rng)
            lines[at] = edited_bytes(line, rng) if found is None else found + b"\n"
    return b"".join(lines)


def copy(source: Path, target: Path) -> None:
    """A fresh copy of a folder, in place of what is at ``target``."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
