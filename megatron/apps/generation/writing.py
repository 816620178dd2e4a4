"""Texts that a model writes on every rank of a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron.apps.generation.execution.runner import PagedRunner
from megatron.apps.generation.request import Completion, GenerationRequest
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.parallel.mesh import Mesh
from megatron.tokenizer import Tokenizer
from megatron.util.progress import progress_bar

OnCompletion = Callable[[int, Completion], object]
"""Called on the main rank with the number of a request and what it got, as it comes."""
Share = dict[int, Completion] | ValueError | None
"""What a rank has found, by number of the request; all but one of a replica find nothing."""


class TextWriter:
    """Generates with a model in any layout. Every rank calls it with the same requests, of which
    each replica of the model generates a share; or, with ``together``, all of them, in the same
    steps, which replicas that gather their weights from each other (ZeRO 3) need."""

    def __init__(
        self, mesh: Mesh, tokenizer: Tokenizer, runner: PagedRunner, together: bool = False
    ) -> None:
        self.mesh, self.tokenizer, self.runner = mesh, tokenizer, runner
        self.together = together

    def completions(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion = lambda n, c: None
    ) -> list[Completion]:
        """What each request gets, on every rank. Raises ValueError if one can never run."""
        data = self.mesh.data
        replicas, replica = (1, 0) if self.together else (data.size, data.rank)
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
