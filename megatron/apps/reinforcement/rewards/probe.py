"""Probe that attempts what confined processes must not do, to find out which limits this node
enforces."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable

from megatron.apps.reinforcement.rewards.box import Box
from megatron.apps.reinforcement.rewards.confinement import LIMITS, Limits

_SECONDS = 20.0
_PROCESSES = 8


def unenforced(limits: Limits) -> dict[str, str]:
    """Return the limits that this node does not enforce, each with a description of what a process
    could do."""
    limits = dataclasses.replace(limits, processes=_PROCESSES)
    own = os.getpid()
    with tempfile.NamedTemporaryFile() as outside, socket.socket() as listening:
        try:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            port = listening.getsockname()[1]
        except OSError:  # a node without a network
            port = 9
        attempts: dict[str, Callable[[], str | None]] = {
            "files": lambda: _write(outside.name),
            "network": lambda: _connect(port),
            "signals": lambda: _signal(own),
            "processes": _multiply,
        }
        problems: dict[str, str] = {}
        for name in LIMITS:
            if problem := _attempted(attempts[name], limits):
                problems[name] = problem
    return problems


def _attempted(attempt: Callable[[], str | None], limits: Limits) -> str | None:
    """Run an attempt in a box. Return a description of what it could do, or None if it was
    prevented."""

    def tell() -> None:
        os.write(3, json.dumps(attempt()).encode())

    box = Box.start(limits, tell)
    try:
        problem = box.watch(time.monotonic() + _SECONDS, lambda: False)
        if problem == "processes":
            return None
        try:
            answer = json.loads(bytes(box.output[3]))
        except ValueError:
            said = bytes(box.output[2]).decode("utf-8", "replace").strip()
            return f"the attempt ended with {problem or box.status} {said}".strip()
        return None if answer is None else str(answer)
    finally:
        box.end()


def _write(path: str) -> str | None:
    try:
        with open(path, "a"):
            return "a process wrote outside of its folder (Landlock forbids it, from Linux 5.13 on)"
    except OSError:
        return None


def _connect(port: int) -> str | None:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2.0):
            return "a process opened a connection (seccomp, or a network namespace, forbids it)"
    except OSError:
        return None


def _signal(process: int) -> str | None:
    try:
        os.kill(process, 0)
    except OSError:
        return None
    return "a process could signal another (a process namespace, or seccomp, forbids it)"


def _multiply() -> str | None:
    """Fork more child processes than allowed. They end with this process."""
    children = []
    try:
        for _ in range(2 * _PROCESSES):
            child = os.fork()
            if not child:
                time.sleep(_SECONDS)
                os._exit(0)
            children.append(child)
        time.sleep(2.0)  # give the keeper time to notice
    except OSError:
        return None
    return "a process started more than it may (RLIMIT_NPROC, or a process namespace, forbids it)"
