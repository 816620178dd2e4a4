"""Errors of libraries that are written in Rust."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_PANIC = "PanicException"


@contextmanager
def rust_errors(subject: str) -> Iterator[None]:
    """Within it, what a Rust library raises about its input is a ValueError that begins with
    `subject`, which names the file or record: a bare Exception, or a panic, which PyO3 derives from
    BaseException, so that no `except Exception` sees it."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != _PANIC:
            raise
        reason = " ".join(str(error).split())[:300] or "it does not say why"
        raise ValueError(f"{subject}: {reason}") from None
