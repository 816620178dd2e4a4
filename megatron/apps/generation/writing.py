"""Generate text on every rank of a layout, including during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.apps.generation.execution.runner import PAGE_SIZE, PagedRunner
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.generation.memory import TEXTS
from megatron.apps.generation.request import Completion, GenerationRequest
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.engine.train_engine import ModelEngine
from megatron.families import family_of
from megatron.parallel.mesh import Mesh
from megatron.tokenizer import Tokenizer
from megatron.util.progress import progress_bar

OnCompletion = Callable[[int, Completion], object]
"""Callback on each replica's main rank, called with a request's number and its result as soon as it
is complete."""
Share = dict[int, Completion] | ValueError | None
"""A rank's results by request number, or its error. None except on the main rank of a replica."""


class TextWriter:
    """Text generator for a model in any layout. Every rank calls it with the same requests, and
    each model replica generates a share of them. With ``together`` all replicas generate all
    requests in the same steps, as ZeRO stage 3 requires: it gathers weights from all replicas."""

    def __init__(
        self, mesh: Mesh, tokenizer: Tokenizer, runner: PagedRunner, together: bool = False
    ) -> None:
        self.mesh, self.tokenizer, self.runner = mesh, tokenizer, runner
        self.together = together

    def completions(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion = lambda n, c: None
    ) -> list[Completion]:
        """Return the results of all requests, in order, on every rank. Collective: every rank must
        call it. Raises ValueError if a request can never run."""
        share: Share = None
        if self.runner.main:
            try:
                share = self._share(requests, on_completion)
            except ValueError as error:
                share = error
            finally:
                self.runner.close()
        else:
            self.runner.follow()
        shares, world = [share], self.mesh.world
        if world.size > 1:
            shares = [None] * world.size
            dist.all_gather_object(shares, share, group=world.handle)
        completions: dict[int, Completion] = {}
        for share in shares:
            if isinstance(share, ValueError):
                raise share
            completions.update(share or {})
        return [completions[number] for number in range(len(requests))]

    def _share(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion
    ) -> dict[int, Completion]:
        """Return the results of this replica's requests by number."""
        data = self.mesh.samples
        replicas, replica = (1, 0) if self.together else (data.size, data.rank)
        numbers = range(replica, len(requests), replicas)
        engine = GenerationEngine(self.runner, self.tokenizer)
        coming = engine.completions(requests[number] for number in numbers)
        bar = progress_bar("generating", coming, len(numbers), " requests")
        share: dict[int, Completion] = {}
        for number, completion in zip(numbers, bar, strict=True):
            share[number] = completion
            on_completion(number, completion)
        return share


@contextmanager
def training_runner(
    engine: ModelEngine,
    tokenizer: Tokenizer,
    sequences: int,
    positions: int,
    steps: dist.ProcessGroup | None = None,
) -> Iterator[PagedRunner]:
    """Yield this rank's runner for a model in training, in any layout. It uses the current weights
    without copying them, and training can continue after the block. Collective: every rank must
    enter it. Within the block, the model must not be used for anything else.

    Args:
        sequences: number of sequences whose keys and values fit at a time, each of at most
            ``positions`` tokens.
        steps: :func:`megatron.apps.generation.execution.runner.step_group` of the run.
    """
    config = engine.config
    generation = family_of(config.model.family).generation(config, tokenizer)
    most = min(generation.max_positions, positions)
    generation = generation._replace(max_positions=most, neighbors=None)
    pages = sequences * -(-most // PAGE_SIZE)
    engine.prepare_evaluation()
    engine.kernels.refresh()
    stages = StagedLayers.of(engine)
    # Training compiles blocks for a single shape. The steps of generation have many shapes.
    with engine.backend.tensor_parallel.unsplit(), torch.compiler.set_stance("force_eager"):
        slots = min(sequences, TEXTS)
        yield PagedRunner(
            stages, config.model, generation, pages, in_training=True, steps=steps, slots=slots
        )
