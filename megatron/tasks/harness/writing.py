"""Texts that a model writes on every rank of a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron.engine.train_engine import ModelEngine
from megatron.inference.engine import GenerationEngine
from megatron.inference.memory import CacheConfig
from megatron.inference.opening import runner_of
from megatron.inference.request import Completion, GenerationRequest
from megatron.tokenizer import Tokenizer
from megatron.util.progress import progress_bar

OnCompletion = Callable[[int, Completion], object]
"""Called on the main rank with the number of a request and what it got, as it comes."""
Share = dict[int, Completion] | ValueError | None
"""What a rank has found, by number of the request; all but one of a replica find nothing."""


class TextWriter:
    """Generates with a model in any layout. Every rank calls it with the same requests, of which
    each replica of the model generates a share. Keys and values get their memory at once.

    Raises:
        ConfigError: models of this family do not generate, or there is no memory for pages.
    """

    def __init__(
        self, engine: ModelEngine, tokenizer: Tokenizer, cache: CacheConfig
    ) -> None:
        self.mesh, self.tokenizer = engine.mesh, tokenizer
        self.runner = runner_of(engine, tokenizer, cache)

    def completions(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion = lambda n, c: None
    ) -> list[Completion]:
        """What each request gets, on every rank. Raises ValueError if one can never run."""
        replicas, replica = self.mesh.data.size, self.mesh.data.rank
        numbers = range(replica, len(requests), replicas)
        found: Share = None
        if self.runner.main:
            try:
                found = self._written(requests, numbers, on_completion)
            except ValueError as error:
                found = error
            finally:
                self.runner.close()
        else:
            self.runner.follow()
        together: dict[int, Completion] = {}
        for share in self._all(found):
            if isinstance(share, ValueError):
                raise share
            together.update(share or {})
        return [together[number] for number in range(len(requests))]

    def _written(
        self,
        requests: Sequence[GenerationRequest],
        numbers: Sequence[int],
        on_completion: OnCompletion,
    ) -> dict[int, Completion]:
        engine = GenerationEngine(self.runner, self.tokenizer)
        found: dict[int, Completion] = {}
        mine = engine.completions(requests[number] for number in numbers)
        for number, completion in zip(
            numbers, progress_bar("generating", mine, len(numbers), " requests"), strict=True
        ):
            found[number] = completion
            on_completion(number, completion)
        return found

    def _all(self, found: Share) -> list[Share]:
        """What every rank has found, on every rank."""
        if self.mesh.world.size == 1:
            return [found]
        shares: list[Share] = [None] * self.mesh.world.size
        dist.all_gather_object(shares, found, group=self.mesh.world.handle)
        return shares
