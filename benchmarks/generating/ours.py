"""This project's engine over its runner, as tools/generate.py builds them: batch-invariant."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from generating.load import Request
from megatron.config import Settings
from megatron.inference.memory import CacheConfig
from megatron.inference.opening import opened_runner
from megatron.inference.request import GenerationRequest, Sampling, StopRules
from megatron.inference.scheduling.engine import GenerationEngine
from megatron.inference.scheduling.schedule import EngineLimits
from megatron.training.launch import start_processes
from megatron.training.run import RunToolParser

GREEDY = Sampling(greedy=True)


class Ours:
    """One process, with pages for as many of the longest requests as there are at once."""

    def __init__(self, folder: str, threads: int, concurrency: int, longest: int) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        torch.set_num_threads(threads)
        vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
        argv = ["--load", folder, "--tokenizer-type", "IdTokenizer", "--vocab-size", vocabulary]
        cache, settings = RunToolParser(CacheConfig, None).parse([str(each) for each in argv])
        self.runner = self._opened(settings, cache)
        self.engines: dict[int, GenerationEngine] = {}

    def _opened(self, settings: Settings, cache: CacheConfig) -> Any:
        processes = start_processes(settings, None)
        opened = ExitStack().enter_context(opened_runner(settings, processes, cache))
        assert opened is not None
        self.tokenizer = opened.tokenizer
        return opened.runner

    def run(
        self, requests: Sequence[Request], concurrency: int, first: Callable[[int], None]
    ) -> list[list[int]]:
        """See `Program`."""
        limits = EngineLimits(running=concurrency, waiting=len(requests))
        engine = GenerationEngine(self.runner, self.tokenizer, limits)
        places = {
            engine.submit(
                GenerationRequest(tuple(request.prompt), StopRules(request.new_tokens), GREEDY)
            ): place
            for place, request in enumerate(requests)
        }
        found: list[list[int]] = [[] for _ in requests]
        while engine.busy:
            for update in engine.step():
                place = places[update.number]
                if update.tokens:
                    first(place)
                found[place] += update.tokens
        return found

    def facts(self) -> dict[str, Any]:
        """The memory of keys and values: what the system has given, and its formula."""
        memory = self.runner.memory
        return {
            "cache_resident_bytes": _resident(memory.pool.data_ptr()),
            "cache_bytes": memory.pages * memory.shape.bytes,
            "page_bytes": memory.shape.bytes,
            "page_positions": memory.shape.positions,
        }


def _resident(address: int) -> int:
    """Bytes of the mapping with an address that are in memory (proc(5), smaps)."""
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                begin, end = (int(each, 16) for each in head.split("-"))
                inside = begin <= address < end
            elif inside and head == "Rss:":
                return int(line.split()[1]) * 1024
    return 0
