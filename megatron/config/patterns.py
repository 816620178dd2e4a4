"""Block patterns: flags that select blocks by a number N, or by a list of 0 or 1 for each block.

As in Megatron, lists are Python expressions: ``[0, 1, 1]`` or ``([0]*3+[1]*9)*2``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import groupby

from megatron.config.flags import Bounds, ConfigError, ConfigResolver

FREQUENCY = Bounds(lambda value: isinstance(value, str) or value > 0, "must be positive")
"""Bounds of a flag whose value is a number N or a list. :func:`layer_pattern` checks the lists."""
MOST_LAYERS = 1 << 14
"""Largest number of blocks in a network."""

Every = Callable[[int, int], bool]
"""Rule ``every(block, N)`` that tells whether a number N selects a block, by its index."""


def every_last(layer: int, n: int) -> bool:
    """Return whether a block is the last of a group of N consecutive blocks."""
    return (layer + 1) % n == 0


def but_every_last(layer: int, n: int) -> bool:
    """Return whether a block is not the last of a group of N consecutive blocks."""
    return (layer + 1) % n != 0


def every_first(layer: int, n: int) -> bool:
    """Return whether a block is the first of a group of N consecutive blocks."""
    return layer % n == 0


@lru_cache(maxsize=64)
def layer_pattern(flag: str, value: int | str, layers: int, every: Every) -> tuple[bool, ...]:
    """Return for each block whether a flag's value selects it: a number N by the rule ``every``, a
    list by its 1s. Raises ConfigError for any other value or a list of another length."""
    try:
        parsed = _evaluated(ast.parse(str(value).strip(), mode="eval").body, layers)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parsed = 0
    if isinstance(parsed, int):
        if parsed < 1:
            raise ConfigError(
                f"{flag} {value!s:.200}: expected a positive number, or a list with 0 or 1 "
                f"for each of the {layers} layers, as ([0]*1+[1]*{layers - 1})"
            )
        return tuple(every(layer, parsed) for layer in range(layers))
    if len(parsed) != layers or set(parsed) - {0, 1}:
        count = f"{len(parsed)} values" if len(parsed) != layers else "other values than 0 and 1"
        raise ConfigError(
            f"{flag} {value!s:.200} has {count}; expected 0 or 1 for each of the {layers} layers"
        )
    return tuple(bool(digit) for digit in parsed)


def pattern_text(chosen: Iterable[bool]) -> str:
    """Return the flag value, a list as text, that selects the given blocks."""
    runs = [(int(kind), len(list(run))) for kind, run in groupby(chosen)]
    return f"({'+'.join(f'[{kind}]*{length}' for kind, length in runs)})"


def shortest(chosen: tuple[bool, ...], every: Every) -> int | str:
    """Return the smallest number that selects exactly these blocks, or else their list."""
    layers = len(chosen)
    for n in range(1, layers + 1):
        if all(every(layer, n) == has for layer, has in enumerate(chosen)):
            return n
    return pattern_text(chosen)


def in_pattern(value: int | str, layer: int, every: Every) -> bool:
    """Return whether a valid flag value selects a block. A list's last entry is repeated."""
    if isinstance(value, int):
        return every(layer, value)
    digits = _listed(value)
    return bool(digits[min(layer, len(digits) - 1)])


def resolved_pattern(
    name: str, value: int | str, layers: int, every: Every, resolver: ConfigResolver
) -> int | str:
    """Return a flag's value in its shortest form. Raises ConfigError if it is not valid."""
    chosen = layer_pattern(resolver.flag(name), value, layers, every)
    if isinstance(value, int):
        return value
    return resolver.put(name, shortest(chosen, every), f"{resolver.flag(name)} {value}")


@lru_cache(maxsize=64)
def _listed(text: str) -> list[int]:
    digits = _evaluated(ast.parse(text, mode="eval").body, len(text) + MOST_LAYERS)
    assert isinstance(digits, list)
    return digits


def _evaluated(node: ast.expr, limit: int) -> int | list[int]:
    """Evaluate an expression of integers, lists of integers, + and *, without executing code.
    Raises ValueError for anything else, and for lists much longer than ``limit``."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=items):
            values = [_evaluated(item, limit) for item in items]
            if all(isinstance(value, int) for value in values):
                return values  # type: ignore[return-value]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _evaluated(left, limit), _evaluated(right, limit)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _evaluated(left, limit), _evaluated(right, limit)
            if isinstance(first, int):
                first, second = second, first
            match first, second:
                case list(), int() if len(first) * second <= 2 * limit:
                    return first * second
    raise ValueError
