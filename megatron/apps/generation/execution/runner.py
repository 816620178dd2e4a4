"""Run the steps of generation over the ranks of a layout, with a paged KV cache.

Every rank creates a :class:`PagedRunner`. The main rank runs the steps; the others call
:meth:`PagedRunner.follow` until the main rank closes its runner. A sequence's results do not depend
on the other sequences of a step, unless the rows of a GEMM depend on each other (see
:mod:`megatron.apps.generation.execution.paged_attention`).

Shapes: S tokens of an encoded prompt, T tokens of a pass, H hidden.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.apps.generation.execution.adapters import ServedAdapters
from megatron.apps.generation.execution.drafting import BlocksAhead, Drafts
from megatron.apps.generation.execution.neighbor_memory import (
    NeighborCache,
    NeighborMemory,
    NeighborShape,
    ending,
)
from megatron.apps.generation.execution.paged_attention import EncodedPrompt, PagedCache
from megatron.apps.generation.execution.row_rule import PackedWeights, RowRule, is_packed
from megatron.apps.generation.execution.stages import (
    EncoderOutput,
    Head,
    Numbers,
    StagedLayers,
    WantedRows,
)
from megatron.apps.generation.execution.states import StateCache
from megatron.apps.generation.memory import TEXTS, PageMemory, PageShape, StateMemory, StateShape
from megatron.apps.generation.request import SequencePart, StepInput, StepOutput
from megatron.config import ModelConfig
from megatron.config.sections import LayerMemory, States, memory_of
from megatron.families import GenerationSpec
from megatron.features.retro.neighbors import NeighborSpec
from megatron.model.attention import Attention
from megatron.model.block import Block
from megatron.model.layer_list import LayerState
from megatron.parallel.mesh import MODEL, Mesh, memberships

PAGE_SIZE = 64


class PagedRunner:
    """Implementation of `megatron.apps.generation.request.Runner`. Every rank creates one, with the
    same arguments. ``main`` is true on the rank that runs the steps of its model replica.

    Args:
        stages: the model's layers, in evaluation mode.
        pages: number of pages.
        page_size: positions per page. None uses the default of :func:`page_size_of`.
        in_training: whether the weights change between passes. Weights are then not packed.
        steps: process group from :func:`step_group` of an earlier runner, to reuse.
        slots: number of sequences whose recurrent states are stored, for models that have such
            states.
        drafts: maximum number of tokens that the model's MTP blocks draft for a part.
    """

    def __init__(
        self,
        stages: StagedLayers,
        model: ModelConfig,
        generation: GenerationSpec,
        pages: int,
        page_size: int | None = None,
        in_training: bool = False,
        steps: dist.ProcessGroup | None = None,
        adapters: ServedAdapters | None = None,
        slots: int = TEXTS,
        drafts: int = 0,
    ) -> None:
        assert model.vocabulary.size is not None
        self._stages, self._generation = stages, generation
        self.vocab_size = model.vocabulary.size
        page_size = page_size or page_size_of(generation)
        self.pages, self.page_size = pages, page_size
        self.max_positions = generation.max_positions
        self.max_prompt, self.start_token = generation.max_prompt, generation.start_token
        scaling = model.positions.rope_scaling
        self.long_after = None
        if scaling.rope_type == "longrope":
            self.long_after = scaling.original_max_position_embeddings
        self._mesh, self._device = stages.mesh, stages.device
        shape = page_shape(stages, model, page_size, drafts=drafts)
        self.memory = PageMemory(shape, pages, self._device)
        states = state_shape(stages, model)
        self.slots = slots if has_states(model) else None
        self.states = StateMemory(states, slots if states.layers else 0, self._device)
        self._groups: dict[object, int] = {}
        self.neighbors: NeighborMemory | None = None
        if generation.neighbors is not None:
            assert page_size == generation.neighbors.chunk_length
            neighbors = neighbor_shape(stages, model, generation.neighbors)
            self.neighbors = NeighborMemory(neighbors, pages, self._device)
        self._encoded: dict[int, EncodedPrompt] = {}
        self._group = self._mesh.model
        self.main = self._group.rank == 0
        # At ZeRO stage 3, weights that a step has gathered are released after the step, which
        # inference tensors do not allow.
        partitioned = in_training and any(hasattr(p, "ds_id") for p in stages.weights)
        self._without_gradients = torch.no_grad if partitioned else torch.inference_mode
        self._packed = PackedWeights(() if in_training else stages.weights)
        self._adapters = adapters
        self.adapters = () if adapters is None else adapters.names
        matrices = [*stages.weights, *(() if adapters is None else adapters.matrices)]
        self._rows = RowRule.of(matrices, is_packed).agreed(self._group)
        self.piece = 1
        if self.slots is not None:
            self.piece = math.gcd(page_size, self._rows.most or page_size)
        self._head = Head(stages, self.vocab_size, self._rows) if stages.last else None
        self._steps = steps or step_group(self._mesh)
        self.drafts, self._ahead = drafts, None
        if drafts:
            self._ahead = BlocksAhead(
                stages,
                self._head,
                self.memory,
                self.max_positions,
                drafts,
                self._rows.padded,
                adapters,
            )

    def run(self, step: StepInput) -> StepOutput:
        """See `Runner.run`."""
        came: list[int] = []
        # Defer Ctrl-C: if this rank left in the middle of a step, the other ranks would hang.
        signals = () if self._steps is None else (signal.SIGINT,)
        with _handling(lambda number, frame: came.append(number), *signals):
            self._announce(step)
            result = self._computed(step)
        if came:
            signal.raise_signal(signal.SIGINT)
        assert result is not None
        return result

    def follow(self) -> None:
        """Compute this rank's part of each step until the main rank closes its runner. Ignores
        SIGINT and SIGTERM, because the main rank may first have to finish requests."""
        with _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
            while True:
                box: list[StepInput | None] = [None]
                dist.broadcast_object_list(box, self._group.ranks[0], group=self._steps)
                if box[0] is None:
                    return
                self._computed(box[0])

    def close(self) -> None:
        """See `Runner.close`."""
        self._announce(None)

    def _announce(self, step: StepInput | None) -> None:
        if self._steps is not None:
            dist.broadcast_object_list([step], self._group.ranks[0], group=self._steps)

    def _computed(self, step: StepInput) -> StepOutput | None:
        """Compute a step. Return its result on the main rank, None on the others."""
        with self._without_gradients():
            self.memory.copy(step.copies)
            self.states.copy(step.state_copies)
            if self.neighbors is not None:
                self.neighbors.copy(step.copies)
            if self._ahead is not None:
                self._ahead.copy(step.copies)
            for number, tokens in step.encode:
                self._encoded[number] = EncodedPrompt(self._encode(tokens))
            for number in step.forget:
                del self._encoded[number]
            if not step.parts:
                return StepOutput(torch.empty(0, self.vocab_size), ())
            parts: Sequence[SequencePart] = step.parts
            P, numbers, drafts = self.page_size, None, Drafts()
            self.memory.clear(
                [page for part in parts for page in part.pages[-(-part.start // P) :]]
            )
            with self._packed:
                if self._ahead is not None:
                    parts, drafts = self._ahead.extended(parts)
                rows = WantedRows.of(parts)
                passes = [self._hidden(each) for each in cut(parts, self._rows.most, P, self.piece)]
                if self._head is not None:
                    hidden = torch.cat([each for each in passes if each is not None], dim=1)
                    numbers = self._head.numbers(LayerState(hidden), rows)
                    if self._ahead is not None:
                        self._ahead.read(parts, hidden[0])
            numbers = self._to_main(numbers, rows)
            return None if numbers is None else rows.result(numbers, drafts)

    def _hidden(self, parts: Sequence[SequencePart]) -> Tensor | None:
        """Run these parts through all layers before the head. Return the head's input [1, T, H] on
        the last stage, None on others."""
        tokens = [token for part in parts for token in part.tokens]
        rows = self._rows.padded(len(tokens))
        near, encoded = None, None
        if self.neighbors is not None:
            near, spec = NeighborCache(self.neighbors, parts), self.neighbors.shape.spec
            encoded = EncoderOutput(len(near.ended) * spec.tokens, spec.crosses)
        states = None
        if self.slots is not None:
            states = StateCache(self.states, parts, self.piece, self._groups)
        cache = PagedCache(
            self.memory,
            parts,
            rows,
            self.max_positions,
            self._encoded,
            near,
            self._rows.padded,
            states,
        )
        padded = tokens + [0] * (rows - len(tokens))
        if self._adapters is not None:
            self._adapters.begin(parts, rows)
        tokens_1T = torch.tensor([padded], device=self._device)
        begin = self._generation.begin(tokens_1T, cache.position_ids_BS, cache)
        first, head = self._generation.encoder_layers, self._stages.layers - 1
        state = self._stages.run(begin, rows, first, head, encoded)
        return None if state is None else state.total[:, : len(tokens)]

    def _encode(self, tokens: Sequence[int]) -> Tensor:
        """Run the encoder on a prompt, and return its output [1, S, H] on every rank."""
        begin = LayerState(torch.tensor([tokens], device=self._device))
        layers = self._generation.encoder_layers
        state = self._stages.run(begin, len(tokens), 0, layers)
        hidden = None if state is None else state.hidden
        return self._stages.broadcast(hidden, len(tokens), layers - 1)

    def _to_main(self, numbers: Numbers | None, rows: WantedRows) -> Numbers | None:
        """Send the results from the last stage to the main rank. Return them on the main rank, None
        on other ranks."""
        source, main = self._stages.last_rank, self._group.ranks[0]
        rank = self._mesh.world.rank
        if rank == main and source != main:
            numbers = rows.empty(self.vocab_size)
            for each in numbers:
                dist.recv(each, source, group=self._steps)
        elif rank == source != main and not self._mesh.tensor.rank:
            assert numbers is not None
            for each in numbers:
                dist.send(each, main, group=self._steps)
        return numbers if self.main else None


def cut(
    parts: Sequence[SequencePart], most: int | None, page_size: int, piece: int = 1
) -> list[list[SequencePart]]:
    """Split parts into passes of at most ``most`` tokens, in order. A prompt may span several
    passes; it is cut at positions that are multiples of ``piece``."""
    if most is None:
        return [list(parts)]
    passes: list[list[SequencePart]] = [[]]
    room = most
    for part in parts:
        first, count = 0, len(part.tokens)
        while first < count:
            if not room:
                passes.append([])
                room = most
            end = min(count, first + room)
            if end < count:
                end -= (part.start + end) % piece
            if end <= first:
                room = 0
                continue
            tokens, start = part.tokens[first:end], part.start + first
            of_pass = replace(part, tokens=tokens, start=start)
            if part.neighbors:
                chunks, of_part = ending(of_pass, page_size), ending(part, page_size).start
                neighbors = part.neighbors[chunks.start - of_part : chunks.stop - of_part]
                of_pass = replace(of_pass, neighbors=neighbors)
            passes[-1].append(of_pass)
            room -= end - first
            first = end
    return passes


@contextmanager
def _handling(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """Handle ``signals`` with ``handler`` in the block. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def step_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Create the gloo group of this replica's ranks, or return None for a single process. The
    timeout is a year, since followers may wait days for a request. Collective: every rank must call
    it."""
    if mesh.world.size == 1:
        return None
    for ranks in memberships(mesh.sizes, MODEL):
        handle = dist.new_group(ranks, backend="gloo", timeout=timedelta(days=365))
        if mesh.world.rank in ranks:
            group = handle
    return group


def cached_layers(stages: StagedLayers) -> list[int]:
    """Return the numbers of this process's blocks that cache keys and values or states."""
    return [
        cast(int, module.layer)
        for block in stages.blocks()
        for module in block.modules()
        if _reads_itself(module)
    ]


def _reads_itself(module: nn.Module) -> bool:
    """Return whether a module is causal self-attention, or a block with another mixer."""
    if isinstance(module, Attention):
        return module.scores.causal
    mixer = module.attention if isinstance(module, Block) else None
    return mixer is not None and not isinstance(mixer, Attention)


def _memories(
    stages: StagedLayers, model: ModelConfig, ahead: bool = False
) -> dict[int, LayerMemory]:
    """Return the cache memory of each of this process's blocks. ``ahead`` includes MTP blocks."""
    size, blocks = stages.mesh.tensor.size, model.blocks + ahead * model.blocks_ahead
    each = {layer: memory_of(model, layer, size) for layer in cached_layers(stages)}
    return {layer: memory for layer, memory in each.items() if memory and layer < blocks}


def page_size_of(generation: GenerationSpec) -> int:
    """Return the number of positions per page. For a retrieval model, a page is one chunk."""
    return PAGE_SIZE if generation.neighbors is None else generation.neighbors.chunk_length


def page_shape(
    stages: StagedLayers,
    model: ModelConfig,
    page_size: int = PAGE_SIZE,
    neighbors: NeighborSpec | None = None,
    drafts: int = 0,
) -> PageShape:
    """Return the contents of a page on this rank, including the bytes of its neighbours and of the
    states that the MTP blocks need to draft ``drafts`` tokens."""
    others = 0 if neighbors is None else neighbor_shape(stages, model, neighbors).bytes
    if drafts and stages.last:
        others += len(stages.ahead) * (drafts + 1) * stages.hidden * stages.dtype.itemsize
    of_tokens = {
        layer: memory
        for layer, memory in _memories(stages, model, drafts > 0).items()
        if not isinstance(memory, States)
    }
    return PageShape(of_tokens, page_size, stages.dtype, others)


def state_shape(stages: StagedLayers, model: ModelConfig) -> StateShape:
    """Return the shape of one sequence's recurrent states on this rank."""
    memories = _memories(stages, model).items()
    states = {layer: memory for layer, memory in memories if isinstance(memory, States)}
    return StateShape(states, torch.promote_types(stages.dtype, torch.float32))


def has_states(model: ModelConfig) -> bool:
    """Return whether any block of a model, on any rank, has recurrent states."""
    return any(isinstance(memory_of(model, n), States) for n in range(model.num_layers))


def neighbor_shape(
    stages: StagedLayers, model: ModelConfig, neighbors: NeighborSpec
) -> NeighborShape:
    """Return the shape of a page's cached neighbours on this rank."""
    cached = set(cached_layers(stages))
    blocks = tuple(layer for layer in neighbors.layers if layer in cached)
    return NeighborShape(
        blocks,
        neighbors.layers[0] in cached,
        max(1, model.attention.num_query_groups // stages.mesh.tensor.size),
        model.attention.kv_channels,
        stages.hidden,
        neighbors,
        stages.dtype,
    )
