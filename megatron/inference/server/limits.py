"""What a client may ask for, and what it gets where it does not say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceLimits:
    """What a single client may ask for; fields as the flags of a server."""

    tokens: int = 12000
    request_seconds: float = 600.0
    request_bytes: int = 4 * 2**20
    read_seconds: float = 30.0

    @property
    def held_bytes(self) -> int:
        """Of large bodies of all clients that are being read at once."""
        return 16 * self.request_bytes


@dataclass(frozen=True)
class RequestDefaults:
    """What requests get that do not say how to sample; as in Megatron's API 0 is for all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
