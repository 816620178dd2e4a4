"""transformers' continuous batching, what `generate_batch` calls.

`generate_batch` takes one length for all requests and builds its memory again every time; here its
manager is kept, and takes each request's own length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from generating.load import Request

PAGE = 32
BATCH_TOKENS = 512
NO_END = -1


class Continuous:
    """A manager for each concurrency, made when it is first asked for."""

    def __init__(self, folder: str, threads: int, concurrency: int, longest: int) -> None:
        torch.set_num_threads(threads)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        ).eval()
        self.longest = longest
        self.managers: dict[int, Any] = {}

    def _manager(self, concurrency: int) -> Any:
        if concurrency not in self.managers:
            for other in self.managers.values():
                other.stop(block=True)
            manager = self.model.init_continuous_batching(
                generation_config=GenerationConfig(
                    do_sample=False, eos_token_id=NO_END, pad_token_id=0, max_new_tokens=1
                ),
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=PAGE,
                    num_blocks=concurrency * -(-self.longest // PAGE) + concurrency,
                    max_batch_tokens=BATCH_TOKENS,
                    max_requests_per_batch=concurrency,
                ),
            )
            manager.start()
            self.managers = {concurrency: manager}
        return self.managers[concurrency]

    def run(
        self, requests: Sequence[Request], concurrency: int, first: Callable[[int], None]
    ) -> list[list[int]]:
        """See `Program`."""
        manager = self._manager(concurrency)
        places = {
            manager.add_request(
                request.prompt, max_new_tokens=request.new_tokens, streaming=True,
                eos_token_id=NO_END,
            ): place
            for place, request in enumerate(requests)
        }  # fmt: skip
        found: dict[int, list[int]] = {}
        while len(found) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None:
                assert manager.is_running(), "the manager has ended"
                continue
            assert result.error is None, result.error
            place = places[result.request_id]
            if result.generated_tokens:
                first(place)
            if result.is_finished():
                found[place] = list(result.generated_tokens)
        return [found[place] for place in range(len(requests))]
