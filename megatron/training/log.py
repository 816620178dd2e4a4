"""What the package logs, on the console."""

from __future__ import annotations

import logging

from megatron.util.processes import is_main_process


class _Formatter(logging.Formatter):
    """The plain message; a warning says that it is one."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        return f"warning: {message}" if record.levelno >= logging.WARNING else message


def show_log() -> None:
    """Lets the main process say what takes a while (an index that is built), and every process
    warn; a second call does nothing."""
    logger = logging.getLogger("megatron")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if is_main_process() else logging.WARNING)
    logger.propagate = False
