"""Token counts of a request for the log, and the server's metrics for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OF_ENGINE = {
    "running": (GaugeMetricFamily, "Requests that are being generated."),
    "waiting": (GaugeMetricFamily, "Requests in the queue."),
    "pages_used": (GaugeMetricFamily, "Pages of keys and values that running requests use."),
    "pages_cached": (GaugeMetricFamily, "Pages of prompts that may come again."),
    "pages_free": (GaugeMetricFamily, "Other pages."),
    "slots_used": (GaugeMetricFamily, "Running texts whose states are kept, of a model with any."),
    "slots": (GaugeMetricFamily, "Texts whose states there is memory for."),
    "prompt_tokens": (CounterMetricFamily, "Tokens of the prompts that were started."),
    "prefix_hit_tokens": (CounterMetricFamily, "Tokens of prompts that were found computed."),
    "new_tokens": (CounterMetricFamily, "Tokens that were generated."),
    "draft_tokens": (CounterMetricFamily, "Tokens that were computed in advance."),
    "accepted_tokens": (CounterMetricFamily, "Those of them that were the next of their text."),
    "steps": (CounterMetricFamily, "Passes through the model."),
    "step_seconds": (CounterMetricFamily, "How long the passes took."),
}


@dataclass
class RequestRecord:
    """Token counts of a request, its client, and its start time on the monotonic clock."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    begun: float = field(default_factory=time.monotonic)
    client: str = ""


current_record: ContextVar[RequestRecord] = ContextVar("record")
"""Record of the request that the current task answers."""


class Metrics:
    """Metrics of one server. Their names begin with ``megatron_``."""

    def __init__(self, stats: Callable[[], Any]) -> None:
        """``stats`` returns the engine's statistics, or None before there is an engine."""
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "megatron_requests",
            "Requests by endpoint and status.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.seconds = self._histogram("request_seconds", "How long requests took.")
        self.first_token = self._histogram("time_to_first_token_seconds", "Wait for a first token.")
        self.next_token = self._histogram("inter_token_seconds", "Wait for each further token.")
        self._registry.register(_EngineNumbers(stats))

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"megatron_{name}", text, buckets=_SECONDS, registry=self._registry)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineNumbers(Collector):
    def __init__(self, stats: Callable[[], Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Any]:
        stats = self._stats()
        if stats is not None:
            for name, (kind, text) in _OF_ENGINE.items():
                if name.startswith("slots") and not stats.slots:
                    continue
                yield kind(f"megatron_{name}", text, value=getattr(stats, name))
