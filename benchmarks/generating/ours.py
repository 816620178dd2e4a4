"""This project's engine over its runner, as tools/generate.py builds them: batch-invariant."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from generating.load import Request
from megatron.apps.generation.memory import CacheConfig
from megatron.apps.generation.opening import opened_runner
from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.config import Settings
from megatron.run.run import RunToolParser, start_processes

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
        self.most_pages = 0

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
            updates = engine.step()
            stats = engine.stats
            self.most_pages = max(self.most_pages, stats.pages_used + stats.pages_cached)
            for update in updates:
                place = places[update.number]
                if update.tokens:
                    first(place)
                found[place] += update.tokens
        return found

    def facts(self) -> dict[str, Any]:
        """The memory of keys and values: what the system has given, and the most pages that texts
        and prompts had until now by the formula of a page."""
        memory = self.runner.memory
        return {
            "cache_resident_bytes": _resident(memory.pool),
            "cache_pages": self.most_pages,
            "page_bytes": memory.shape.bytes,
            "page_positions": memory.shape.positions,
        }


def _resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's memory that the system has given (mincore(2))."""
    size = mmap.PAGESIZE
    begin = tensor.data_ptr() // size * size
    count = -(-(tensor.data_ptr() + tensor.nbytes - begin) // size)
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(count * size), found):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(each & 1 for each in found) * size
