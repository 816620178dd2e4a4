#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Shows runs on one page of charts, while they train and afterwards.

    python tools/dashboard.py runs/small/metrics.jsonl
    python tools/dashboard.py small=runs/a large=runs/b --port 8000
    python tools/dashboard.py runs/a --follow
    python tools/dashboard.py runs/a runs/b --export runs.html

RUN is a file that a run wrote with --metrics-file, a folder with metrics.jsonl in it or in its
folders, or NAME=PATH. Prints the address of the page, which needs no network, and runs until
Ctrl+C; with --follow it shows the runs in the terminal instead, with --export it writes the page
as one file of HTML and ends. An index is kept next to each file,
so that a run of a million steps opens at once the next time. Exit status: 2 if a run cannot be read
or the port is taken.
"""

import contextlib
import errno
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.apps.dashboard.export import export
from megatron.apps.dashboard.follow import follow
from megatron.apps.dashboard.runs import WatchedRun, find_runs
from megatron.apps.dashboard.server import LOCAL_NAMES, Dashboard
from megatron.config import ConfigError, FlagParser
from megatron.config.flags import build, option
from megatron.util.errors import one_line
from megatron.util.files import write_whole


@dataclass(frozen=True)
class DashboardConfig:
    """Dashboard: where the page is."""

    host: str = option("127.0.0.1")
    """Address to listen on. With another than this machine's own, --token is needed to read the
    page; one is made if it is not given."""
    port: int = option(8600)
    """Port to listen on; 0 takes a free one."""
    token: str | None = option(None)
    """Secret without which the page is not shown; it is a part of the printed address."""
    follow: bool = option(False)
    """Show curves, last values and events in the terminal, and no page; where the output is not a
    terminal, a line for each run that has new steps."""
    export: str | None = option(None)
    """File of HTML to write instead of listening: the page with the runs as they are now, which
    needs no server and no network."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = FlagParser(DashboardConfig, description=__doc__)
    parser.usage = "%(prog)s RUN ... [flags]"
    parser.add_argument("runs", nargs="+", metavar="RUN")
    settings: dict[str, Any] = parser.settings(argv)
    words = settings.pop("runs")
    try:
        show(words, build(DashboardConfig, settings))
    except (ValueError, OSError) as error:
        print(f"dashboard.py: error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def show(words: Sequence[str], config: DashboardConfig) -> None:
    """Serves the page until a signal."""
    if not 0 <= config.port < 65536:
        raise ConfigError(f"--port {config.port}: expected 0 to 65535")
    token = config.token
    if config.host not in LOCAL_NAMES and token is None:
        token = secrets.token_urlsafe(18)
    runs = [_open(str(n), name, path) for n, (name, path) in enumerate(find_runs(words), 1)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if config.export is not None:
        save_page(runs, Path(config.export))
        return
    if config.follow:
        with contextlib.suppress(KeyboardInterrupt):
            follow(runs)
        for run in runs:
            run.close()
        return
    try:
        server = Dashboard(runs, config.host, config.port, token)
    except OSError as error:
        raise _address_error(error, config) from None
    print(f"{server.url} shows {len(runs)} run{'s' * (len(runs) > 1)}; Ctrl+C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the end has begun
        server.server_close()


def save_page(runs: Sequence[WatchedRun], path: Path) -> None:
    """Reads runs and writes the page with them."""
    for run in runs:
        run.refresh()
        listing = run.listing()
        for line in filter(None, (listing["error"], *listing["left_out"])):
            print(f"{listing['name']}: {line}", file=sys.stderr)
    content = export(runs)
    for run in runs:
        run.close()
    write_whole(path, content)
    print(f"{path}: {len(runs)} run{'s' * (len(runs) > 1)}, {len(content):,} bytes")


def _open(id: str, name: str, path: Path) -> WatchedRun:
    try:
        return WatchedRun(id, name, path)
    except OSError as error:
        raise OSError(
            f"{path}: {error.strerror or error}; the dashboard must be able to read it"
        ) from None


def _address_error(error: OSError, config: DashboardConfig) -> OSError:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        text = f"--port {config.port} is taken; give another one, or 0 for a free one"
    elif error.errno == errno.EACCES:
        text = f"--port {config.port}: {reason}; ports below 1024 are the system's"
    else:
        text = f"--host {config.host}: {reason}; give an address of this machine"
    return OSError(text)


if __name__ == "__main__":
    main()
