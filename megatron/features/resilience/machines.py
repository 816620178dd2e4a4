"""Whether the machine of a process that says nothing still answers.

A machine that loses its power or its network closes no connection: whoever waits for it would wait
until the limit for hangs. A process that is only stopped, as in a suspended job, is another matter:
the system of its machine answers for it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Hashable, Mapping

SECONDS = 4.0
"""For which a machine may not answer: three tries of the system's."""
_STALE = 5
"""Looks after which a process that says nothing new is looked into."""
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}
_ANY_PORT = 9


class Door:
    """A port of this process. Connections to it succeed while the machine lives, also while the
    process is stopped; nothing is said over them.

    Args:
        towards: an address of the network in which others look for it.
    """

    def __init__(self, towards: str) -> None:
        self.address: tuple[str, int] = ("", 0)
        """Host and port; port 0 where there can be none, which says nothing about the machine."""
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            family = _family(towards)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((towards, _ANY_PORT))  # sends nothing
                own = probe.getsockname()[0]
            self._socket = socket.create_server((own, 0), family=family)
            self._socket.setblocking(False)
            self.address = self._socket.getsockname()[:2]

    def clear(self) -> None:
        """Lets those go that have connected."""
        with contextlib.suppress(BlockingIOError):
            while self._socket is not None:
                self._socket.accept()[0].close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _family(address: str) -> int:
    return socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0][0]


def is_gone(host: str, port: int, seconds: float = SECONDS) -> bool:
    """Whether nothing answers there. A refusal is an answer; an unknown name, or port 0, says
    nothing."""
    if port == 0:
        return False
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        return isinstance(error, TimeoutError) or error.errno in _UNREACHABLE
    return False


class SilentMachines:
    """Which of some machines are gone. It costs nothing while they say something new.

    Args:
        gone: whether nothing answers at an address.
    """

    def __init__(self, gone: Callable[[str, int], bool] = is_gone) -> None:
        self._gone = gone
        self._heard: dict[str, tuple[Hashable, int]] = {}
        """What each has said last, and for how many looks."""

    def look(self, said: Mapping[str, tuple[Hashable, tuple[str, int]]]) -> str:
        """A machine that is gone, or an empty text; looked for again and again.

        Args:
            said: by each machine, and the address of a door there.
        """
        for name, (words, address) in said.items():
            last, looks = self._heard.get(name, (None, 0))
            looks = looks + 1 if words == last else 0
            if looks >= _STALE:
                if self._gone(*address):
                    return name
                looks = 0
            self._heard[name] = (words, looks)
        return ""
