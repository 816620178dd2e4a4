"""A model over the ranks of a layout that computes the steps of generation, with paged keys and
values.

Every rank makes a :class:`PagedRunner`; the main one gets the steps (`run`), the others
:meth:`PagedRunner.follow` it until it closes. Results do not depend on what else is in a step where
rows of a GEMM do not (see :mod:`megatron.inference.paged_attention`).

Shapes: T tokens of all parts, R rows whose logits are wanted, H hidden, V vocabulary, P one rank's
columns of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import ModelConfig
from megatron.families import Generation
from megatron.inference.page_memory import PageMemory, PageShape
from megatron.inference.paged_attention import EncodedPrompt, PagedCache
from megatron.inference.stages import Stages
from megatron.inference.step import Part, Step, StepResult, TargetScores
from megatron.inference.target_scores import score_rows, whole_logits
from megatron.model.attention import Attention
from megatron.model.layer_list import LayerState
from megatron.parallel.mesh import MODEL, Mesh, memberships

PAGE_SIZE = 64
FEWEST_ROWS = 4
"""A GEMM of fewer rows may round differently."""
CHUNK_BYTES = 64 * 2**20
"""Of float32 logits of targets at a time."""


class PagedRunner:
    """See `megatron.inference.step.Runner`; every rank makes one, with the same arguments.

    Args:
        stages: the layers, in evaluation mode.
        pages: how many there are.
        page_size: positions of a page.

    Attributes:
        main: whether this rank gets the steps of its replica of the model.
    """

    def __init__(
        self,
        stages: Stages,
        model: ModelConfig,
        generation: Generation,
        pages: int,
        page_size: int = PAGE_SIZE,
    ) -> None:
        assert model.vocabulary.size is not None
        self._stages, self._generation = stages, generation
        self.vocab_size = model.vocabulary.size
        self.pages, self.page_size = pages, page_size
        self.max_positions = generation.max_positions
        self.max_prompt, self.start_token = generation.max_prompt, generation.start_token
        scaling = model.positions.rope_scaling
        self.long_after = None
        if scaling.rope_type == "longrope":
            self.long_after = scaling.original_max_position_embeddings
        self._mesh, self._device = stages.mesh, stages.device
        layers = cached_layers(stages)
        shape = page_shape(stages, model, page_size)
        self.memory = PageMemory(layers, shape, pages, self._device)
        self._encoded: dict[int, EncodedPrompt] = {}
        self._group = self._mesh.model
        self.main = self._group.rank == 0
        self._steps = _patient_group(self._mesh) if self._mesh.world.size > 1 else None

    def run(self, step: Step) -> StepResult:
        """See `Runner.run`."""
        self._announce(step)
        result = self._computed(step)
        assert result is not None
        return result

    def follow(self) -> None:
        """Computes this rank's part of all steps until the main rank closes."""
        while True:
            box: list[Step | None] = [None]
            dist.broadcast_object_list(box, self._group.ranks[0], group=self._steps)
            if box[0] is None:
                return
            self._computed(box[0])

    def close(self) -> None:
        """See `Runner.close`."""
        self._announce(None)

    def _announce(self, step: Step | None) -> None:
        if self._steps is not None:
            dist.broadcast_object_list([step], self._group.ranks[0], group=self._steps)

    @torch.inference_mode()
    def _computed(self, step: Step) -> StepResult | None:
        """The result on the main rank."""
        self.memory.copy(step.copies)
        for number, tokens in step.encode:
            self._encoded[number] = EncodedPrompt(self._encode(tokens))
        for number in step.forget:
            del self._encoded[number]
        if not step.parts:
            return StepResult(torch.empty(0, self.vocab_size), ())
        P = self.page_size
        self.memory.clear(
            [page for part in step.parts for page in part.pages[-(-part.start // P) :]]
        )
        tokens_T = [token for part in step.parts for token in part.tokens]
        tokens_T += [0] * (FEWEST_ROWS - len(tokens_T))
        rows = len(tokens_T)
        cache = PagedCache(self.memory, step.parts, rows, self.max_positions, self._encoded)
        tokens_1T = torch.tensor([tokens_T], device=self._device)
        begin = self._generation.begin(tokens_1T, cache.position_ids_BS, cache)
        first, head = self._generation.encoder_layers, self._stages.layers - 1
        state = self._stages.run(begin, rows, first, head)
        return self._answered(state, step.parts)

    def _encode(self, tokens: Sequence[int]) -> Tensor:
        """[1, S, H] on every rank."""
        begin = LayerState(torch.tensor([tokens], device=self._device))
        layers = self._generation.encoder_layers
        state = self._stages.run(begin, len(tokens), 0, layers)
        hidden = None if state is None else state.hidden
        return self._stages.broadcast(hidden, len(tokens), layers - 1)

    def _answered(self, state: LayerState | None, parts: Sequence[Part]) -> StepResult | None:
        """What the parts want, from the rank with the head to the main one."""
        rows, begin = [], 0
        scored: list[tuple[Part, int]] = []
        for part in parts:
            if part.logits:
                rows.append(begin + len(part.tokens) - 1)
            if part.targets:
                scored.append((part, begin))
            begin += len(part.tokens)
        found: list[Tensor] = []
        if self._stages.last:
            assert state is not None
            found.append(self._logits(state, rows))
            found += self._scores(state, scored)
        found = self._to_main(found, len(rows), scored)
        if not self.main:
            return None
        logits_RV, *numbers = (each.cpu() for each in found)
        of_parts = iter(numbers)
        scores = (TargetScores(*islice(of_parts, 3)) for _ in scored)
        return StepResult(logits_RV, tuple(scores))

    def _logits(self, state: LayerState, rows: Sequence[int]) -> Tensor:
        if not rows:
            return torch.empty(0, self.vocab_size, device=self._device)
        logits_RP = self._head(state, rows)
        return whole_logits(logits_RP, self.vocab_size, self._mesh.tensor)[: len(rows)]

    def _head(self, state: LayerState, rows: Sequence[int]) -> Tensor:
        """This rank's logits [R or more, P] of some rows."""
        wanted = list(rows) + [rows[0]] * (FEWEST_ROWS - len(rows))
        hidden = state.total.index_select(1, torch.tensor(wanted, device=self._device))
        layers = self._stages.layers
        head = self._stages.own[max(self._stages.own)].part(layers - 1, layers)
        return head(state.with_hidden(hidden)).hidden[0]

    def _scores(self, state: LayerState, scored: Sequence[tuple[Part, int]]) -> list[Tensor]:
        found: list[Tensor] = []
        group, most = self._mesh.tensor, max(FEWEST_ROWS, CHUNK_BYTES // (4 * self.vocab_size))
        for part, begin in scored:
            pieces = []
            for first in range(0, len(part.targets), most):
                targets = part.targets[first : first + most]
                rows = range(begin + first, begin + first + len(targets))
                logits_RP = self._head(state, rows)
                targets_R = torch.zeros(len(logits_RP), dtype=torch.int64)
                targets_R[: len(targets)] = torch.tensor(targets)
                targets_R = targets_R.to(self._device)
                scores = score_rows(logits_RP, targets_R, part.top, self.vocab_size, group)
                pieces.append([each[: len(targets)] for each in scores])
            found += [torch.cat(each) for each in zip(*pieces, strict=True)]
        return found

    def _to_main(
        self, found: list[Tensor], rows: int, scored: Sequence[tuple[Part, int]]
    ) -> list[Tensor]:
        """The results on the main rank, wherever the last stage is."""
        source, main = self._stages.last_rank, self._group.ranks[0]
        own = self._mesh.world.rank
        if self._mesh.tensor.rank or source == main or own not in (main, source):
            return found
        if own == source:
            for each in found:
                dist.send(each.cpu().contiguous(), main, group=self._steps)
            return found
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((rows, self.vocab_size), torch.float32)
        ]
        for part, _ in scored:
            count = len(part.targets)
            shapes += [((count,), torch.float32)]
            shapes += [((count, part.top), kind) for kind in (torch.int64, torch.float32)]
        found = [torch.empty(shape, dtype=kind) for shape, kind in shapes]
        for each in found:
            dist.recv(each, source, group=self._steps)
        return found


def _patient_group(mesh: Mesh) -> dist.ProcessGroup:
    """The ranks of this replica of the model, on CPUs: whoever follows may wait for days."""
    for ranks in memberships(mesh.sizes, MODEL):
        handle = dist.new_group(ranks, backend="gloo", timeout=timedelta(days=365))
        if mesh.world.rank in ranks:
            found = handle
    return found


def cached_layers(stages: Stages) -> list[int]:
    """The numbers of this process's blocks whose keys and values are kept."""
    return [
        module.layer
        for block in stages.blocks()
        for module in block.modules()
        if isinstance(module, Attention) and module.scores.causal
    ]


def page_shape(stages: Stages, model: ModelConfig, page_size: int = PAGE_SIZE) -> PageShape:
    """Of a page on this rank."""
    attention = model.attention
    heads = max(1, attention.num_query_groups // stages.mesh.tensor.size)
    blocks = len(cached_layers(stages))
    return PageShape(blocks, heads, page_size, attention.kv_channels, stages.dtype)
