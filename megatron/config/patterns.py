"""Patterns of blocks: which of them have something, by a number or by a list with 0 or 1 for each.

Megatron writes both as Python: ``3``, ``[0, 1, 1]``, ``([0]*3+[1]*9)*2``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import groupby

from megatron.config.flags import Bounds, ConfigError, ConfigResolver

FREQUENCY = Bounds(lambda value: isinstance(value, str) or value > 0, "must be positive")
"""A number of blocks, or a list, which :func:`layer_pattern` checks."""
MOST_LAYERS = 1 << 14
"""Blocks of the largest network."""

Every = Callable[[int, int], bool]
"""Rule that tells whether a number N means a block, counted from 0."""


def every_last(layer: int, n: int) -> bool:
    """True for the last of N blocks, and the last of the next N."""
    return (layer + 1) % n == 0


def but_every_last(layer: int, n: int) -> bool:
    """True for all but the last of N blocks, and the last of the next N."""
    return (layer + 1) % n != 0


def every_first(layer: int, n: int) -> bool:
    """True for the first of N blocks, and the first of the next N."""
    return layer % n == 0


@lru_cache(maxsize=64)
def layer_pattern(flag: str, value: int | str, layers: int, every: Every) -> tuple[bool, ...]:
    """The blocks that the value of a flag means: N those of ``every``, a list those with 1. Raises
    ConfigError for any other value, and for a list of another length."""
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
    """The list of blocks that are chosen and that are not, as a flag has it."""
    runs = [(int(kind), len(list(run))) for kind, run in groupby(chosen)]
    return f"({'+'.join(f'[{kind}]*{length}' for kind, length in runs)})"


def shortest(chosen: tuple[bool, ...], every: Every) -> int | str:
    """The smallest number that means these blocks, else their list."""
    layers = len(chosen)
    for n in range(1, layers + 1):
        if all(every(layer, n) == has for layer, has in enumerate(chosen)):
            return n
    return pattern_text(chosen)


def in_pattern(value: int | str, layer: int, every: Every) -> bool:
    """True if a checked value includes a block; blocks after a list are like its last."""
    if isinstance(value, int):
        return every(layer, value)
    digits = _listed(value)
    return bool(digits[min(layer, len(digits) - 1)])


def resolved_pattern(
    name: str, value: int | str, layers: int, every: Every, resolver: ConfigResolver
) -> int | str:
    """The value of a flag in its shortest form. Raises ConfigError as :func:`layer_pattern`."""
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
    """An expression of integers, lists of them, + and *, without calling anything. Raises
    ValueError for any other, and for lists that are much longer than ``limit``."""
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
