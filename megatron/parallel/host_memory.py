"""Memory that the ranks of a group on one host share, for collectives between CPU processes.

gloo takes a tensor through the loopback device, in pieces and by threads of its own. Here each rank
writes it once where the others can read it, tells them by a byte through a socket, and reads what
they wrote: two copies, no further thread, and nothing that spins while it waits.

The memory has no name in any file system, so that nothing is left behind however a process ends:
it is an anonymous file (memfd_create) whose descriptor goes through the sockets.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST_RANKS = 8
"""Every rank reads what every other wrote: past this number, rings that gloo forms send less."""

LARGEST_BYTES = 64 * 2**20
"""Of a tensor; larger ones would hold too much memory."""

DISABLED = "MEGATRON_NO_HOST_MEMORY"
"""Environment variable that leaves all collectives to gloo, where any rank sets it to 1."""

Read = Callable[[list[Tensor]], Tensor]
"""Makes the result of a collective from what each rank wrote, flat, in the order of ranks."""

_SLOTS = 2
_STARTED, _DONE = b"s", b"d"
_CONNECT_SECONDS = 30.0


class HostMemory:
    """One rank's part of a group's shared memory. All ranks must start the same collectives in the
    same order; they may finish them in any.

    Operation k lies in slot k modulo 2 of each rank's memory. A rank overwrites a slot when all
    have said that they are done with what was there. To that end it finishes the operation itself
    first, so that two ranks never wait for each other.

    Args:
        rank: this rank's place in the group.
        peers: connected stream sockets of the Unix domain to each other rank, by rank.
        timeout: seconds that a wait for another rank may take.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._peers = {other: _Peer(other, peer, timeout) for other, peer in peers.items()}
        self._capacity = 0
        self._memory: Tensor | None = None
        self._started = self._finished = self._untold = 0
        self._pending: deque[_Operation] = deque()

    def start(self, x: Tensor, read: Read) -> Callable[[], Tensor]:
        """Shows a tensor to the other ranks; what is returned waits for theirs.

        Args:
            x: contiguous, on the CPU, of one size on all ranks.
            read: makes the result.

        Raises:
            RuntimeError: here or in what is returned, another rank ended, or did not get here in
                time; the message names it.
        """
        number, size = self._started, x.numel() * x.element_size()
        descriptor = None
        if size > self._capacity:
            self._finish_before(number)
            descriptor = self._grow(size)
        self._finish_before(number - _SLOTS + 1)
        self._wait_until_free(number)
        assert self._memory is not None
        _slot(self._memory, number, x).copy_(x.detach().view(-1))
        self._started += 1
        self._tell(_DONE * self._untold + _STARTED, descriptor)
        self._untold = 0
        operation = _Operation(number, x, read)
        self._pending.append(operation)

        def finish() -> Tensor:
            if operation.result is None:
                self._finish_before(number + 1)
            assert operation.result is not None
            return operation.result

        return finish

    def close(self) -> None:
        """Ends the connections; ranks that wait for this one then raise an error."""
        for peer in self._peers.values():
            peer.socket.close()

    __del__ = close

    def _grow(self, size: int) -> int:
        """Makes memory for tensors of ``size`` bytes; returns its file, for the others."""
        page = 2**16
        self._capacity = -(-size // page) * page
        descriptor = os.memfd_create("megatron-collectives", os.MFD_CLOEXEC)
        # Not ftruncate: where there is too little memory, the first write would end the process.
        os.posix_fallocate(descriptor, 0, _SLOTS * self._capacity)
        self._memory = _mapped(descriptor)
        return descriptor

    def _wait_until_free(self, number: int) -> None:
        busy = [peer for peer in self._peers.values() if peer.done < number - _SLOTS + 1]
        if busy and self._untold:
            self._tell(_DONE * self._untold, None)  # they may be waiting for just that
            self._untold = 0
        for peer in busy:
            while peer.done < number - _SLOTS + 1:
                peer.receive()

    def _tell(self, message: bytes, descriptor: int | None) -> None:
        for peer in self._peers.values():
            peer.send(message, descriptor)
        if descriptor is not None:
            os.close(descriptor)

    def _finish_before(self, number: int) -> None:
        while self._pending and self._pending[0].number < number:
            operation = self._pending[0]
            parts = []
            for rank in range(len(self._peers) + 1):
                if rank == self._rank:
                    assert self._memory is not None
                    memory = self._memory
                else:
                    peer = self._peers[rank]
                    while peer.started <= operation.number:
                        peer.receive()
                    memory = peer.memory_at(operation.number)
                parts.append(_slot(memory, operation.number, operation.x))
            operation.result = operation.read(parts)
            self._pending.popleft()
            self._untold += 1


class _Operation:
    """A collective between its start and its finish."""

    def __init__(self, number: int, x: Tensor, read: Read) -> None:
        self.number, self.x, self.read = number, x, read
        self.result: Tensor | None = None


class _Peer:
    """Another rank: how many collectives it started and is done with, and its memory."""

    def __init__(self, rank: int, connection: socket.socket, timeout: float) -> None:
        self.rank, self.socket, self.timeout = rank, connection, timeout
        self.started = self.done = 0
        self._memories: list[tuple[int, Tensor]] = []
        # The kernel's own limit spares the call of poll that Python's timeouts make.
        connection.setblocking(True)
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: bytes, descriptor: int | None) -> None:
        try:
            if descriptor is None:
                self.socket.sendall(message)
            else:
                socket.send_fds(self.socket, [message], [descriptor])
        except OSError as error:
            raise RuntimeError(self._lost(error)) from error

    def receive(self) -> None:
        """Waits for what this rank says next."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 1)
        except OSError as error:
            raise RuntimeError(self._lost(error)) from error
        if not message:
            raise RuntimeError(self._lost(None))
        self.started += message.count(_STARTED)
        self.done += message.count(_DONE)
        for descriptor in descriptors:
            # A message ends where a descriptor was sent along: it came with the last start.
            self._memories.append((self.started - 1, _mapped(descriptor)))
            os.close(descriptor)

    def memory_at(self, number: int) -> Tensor:
        """The memory in which an operation lies; older ones are let go."""
        while len(self._memories) > 1 and self._memories[1][0] <= number:
            self._memories.pop(0)
        return self._memories[0][1]

    def _lost(self, error: OSError | None) -> str:
        if isinstance(error, BlockingIOError):
            return (
                f"rank {self.rank} of the group did not come to a collective within "
                f"{self.timeout:g} s (--distributed-timeout-minutes)"
            )
        return f"rank {self.rank} of the group ended during a collective ({error or 'closed'})"


def host_memory_of(
    ranks: Sequence[int], rank: int, handle: dist.ProcessGroup | None
) -> HostMemory | None:
    """Connects the ranks of a group; None on all of them where they cannot share memory: not on one
    host, too many, not with gloo, or :data:`DISABLED`. All ranks must call it at the same point.

    Args:
        ranks: the group's global ranks.
        rank: this process's place among them.
        handle: torch's group.
    """
    if not 1 < len(ranks) <= MOST_RANKS or handle is None or dist.get_backend(handle) != "gloo":
        return None
    timeout = handle._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    listener = None
    place, address, token = _host(), "\0megatron-" + secrets.token_hex(16), secrets.token_bytes(16)
    if place is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.settimeout(_CONNECT_SECONDS)
        listener.bind(address)
        listener.listen(MOST_RANKS)
    offers = _gathered((place, address, token), len(ranks), handle)
    if listener is None or any(offer[0] != place for offer in offers):
        if listener is not None:
            listener.close()
        return None
    peers: dict[int, socket.socket] | None
    try:
        peers = _connect(rank, listener, offers)
    except OSError:
        peers = None
    finally:
        listener.close()
    everywhere = all(_gathered(peers is not None, len(ranks), handle))
    if peers is not None and everywhere:
        return HostMemory(rank, peers, timeout)
    for connection in (peers or {}).values():
        connection.close()
    return None


def _host() -> str | None:
    """What processes have in common that can share memory through abstract sockets; None where the
    system has no such thing."""
    if os.environ.get(DISABLED) == "1" or not hasattr(os, "memfd_create"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return None


def _gathered(value: Any, size: int, handle: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, value, group=handle)
    return found


def _connect(
    rank: int, listener: socket.socket, offers: list[tuple[str, str, bytes]]
) -> dict[int, socket.socket]:
    """Sockets to all others: lower ranks are called, higher ones call."""
    peers: dict[int, socket.socket] = {}
    for other in range(rank):
        _, address, token = offers[other]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(address)
        connection.sendall(token + bytes([rank]))
        peers[other] = connection
    while len(peers) < len(offers) - 1:
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT_SECONDS)
        greeting = connection.recv(17)
        # Any process of the host may call this address; only the group's know the token.
        if not secrets.compare_digest(greeting[:16], offers[rank][2]) or len(greeting) != 17:
            connection.close()
            continue
        peers[greeting[16]] = connection
    return peers


def _mapped(descriptor: int) -> Tensor:
    """All bytes of a file, shared with whoever else maps it."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)


def _slot(memory: Tensor, number: int, like: Tensor) -> Tensor:
    """The elements of operation ``number`` in a rank's memory, flat."""
    begin = number % _SLOTS * (memory.numel() // _SLOTS)
    size = like.numel() * like.element_size()
    return memory[begin : begin + size].view(like.dtype)


def sum_of(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """The sum of what ranks wrote, bitwise the same on each: the order is that of ranks, and more
    than two addends of 16 bits are added in float32 and rounded once.

    Args:
        parts: equally many elements each.
        out: where the sum goes, contiguous.
    """
    flat = out.detach().view(-1)
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=flat)
        return out
    half = out.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32 if half else out.dtype, copy=True)
    for part in parts[1:]:
        total += part.to(total.dtype)
    flat.copy_(total)
    return out
