"""transformers' `generate`, in batches of requests that start and end together.

Prompts are padded on the left. A batch ends when its longest text is complete, as one does
whose texts end at different places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from generating.load import Request


class Static:
    """Batches in the order of the requests."""

    def __init__(self, folder: str, threads: int, concurrency: int, longest: int) -> None:
        torch.set_num_threads(threads)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
        self.model = model.to(self.device).eval()

    def order(self, requests: Sequence[Request]) -> list[int]:
        """Choose which requests are batched together."""
        return list(range(len(requests)))

    def run(
        self, requests: Sequence[Request], concurrency: int, first: Callable[[int], None]
    ) -> list[list[int]]:
        """See `Program`."""
        order, found = self.order(requests), [[0]] * len(requests)
        for begin in range(0, len(order), concurrency):
            places = order[begin : begin + concurrency]
            longest = max(requests[place].new_tokens for place in places)
            prompts = [requests[place].prompt for place in places]
            for place, tokens in zip(
                places, self._batch(prompts, longest, places, first), strict=True
            ):
                found[place] = tokens[: requests[place].new_tokens]
        return found

    def _batch(
        self, prompts: list[list[int]], new: int, places: list[int], first: Callable[[int], None]
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask_BT = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        out_BT = self.model.generate(
            ids_BT.to(self.device),
            attention_mask=mask_BT.to(self.device),
            max_new_tokens=new,
            min_new_tokens=None,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[_Heard(places, first)],
        )
        return out_BT[:, width:].tolist()


class Sorted(Static):
    """Batches of requests of similar length, the longest first."""

    def order(self, requests: Sequence[Request]) -> list[int]:
        """See :class:`Static`."""
        return sorted(
            range(len(requests)),
            key=lambda place: (requests[place].new_tokens, len(requests[place].prompt)),
            reverse=True,
        )


class _Heard(StoppingCriteria):
    """Is asked after each token, and ends nothing."""

    def __init__(self, places: list[int], first: Callable[[int], None]) -> None:
        self.places, self.first = places, first

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        for place in self.places:
            self.first(place)
        self.places = []
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
