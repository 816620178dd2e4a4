"""A model is an ordered list of layers, and a state that flows through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ParallelConfig
from megatron.model.attention_masks import AttentionMasks
from megatron.model.caches import LayerCache
from megatron.parallel.context import Context
from megatron.parallel.loss_head import Objective, Targets, TokenScores
from megatron.parallel.mesh import ALONE, Coordinates
from megatron.parallel.random import derive_seed, generator, seed_devices
from megatron.parallel.shard import Buffer, init_of, shard_of
from megatron.parallel.tensor_parallel import TensorParallel, autocast_dtype


class EmbeddingNoise(NamedTuple):
    """Noise on token embeddings in training: uniform between -w and w, where w is ``alpha`` over
    the root of tokens x hidden size (NEFTune, Jain et al. 2023, arXiv:2310.05914, algorithm 1).

    Attributes:
        longest: most tokens of a sample: as many are drawn, whatever the padding.
        tokens_BS: how many tokens the example has that each token is in, padding left out; float32.
    """

    alpha: float
    longest: int
    tokens_BS: Tensor

    def drawn(self, x_BSH: Tensor, seed: int, tp: TensorParallel) -> Tensor:
        """The noise of embeddings, which are this rank's slice in a split region: the same values
        in every layout."""
        random = torch.Generator(x_BSH.device).manual_seed(seed)
        samples, length = self.tokens_BS.shape
        shape = (samples, self.longest, x_BSH.shape[-1])
        draws_BSH = torch.rand(shape, generator=random, device=x_BSH.device)[:, :length]
        width_BS = self.alpha * (self.tokens_BS * shape[-1]).rsqrt()
        draws_BSH, width_BS = (
            tp.own(tp.context.take(each, 1), 1) for each in (draws_BSH, width_BS)
        )
        noise_BSH = (2 * draws_BSH - 1) * width_BS[..., None]
        return noise_BSH.to(x_BSH.dtype)


class LayerState(NamedTuple):
    """Input and output of a layer.

    ``hidden``, ``encoder`` and ``losses`` are computed, and can travel between pipeline stages; the
    others belong to the micro batch, of which every stage has its own copy. A layer returns
    unchanged what it does not use.

    Attributes:
        hidden: token ids int64 [B, S] into the first layer; hidden states [B, S, H] between layers
            (this rank's slice of S where the sequence is split); without targets, logits
            [B, S, V / tensor size] out of the last layer.
        encoder: output of the encoder that decoder blocks attend to, [B, T, H], sliced as
            ``hidden`` is; None in a family without one.
        losses: scalars by name, added by layers; with targets the last layer adds its own.
        position_ids: positions int64 [B, S]; None for 0, 1, 2, ...
        token_types: int64 [B, S], for models that have an embedding of them.
        dropout_seed: seed of the dropout masks of this micro batch; None leaves torch's generators
            alone.
        bias: addend of the attention scores, masks included, that all blocks of a stack share,
            [1 or B, N / tensor size, S, S]; with a cache the addend by distance,
            [N / tensor size, positions]; None without relative positions. Every stage computes its
            own.
        pending: between blocks that hand their last sum on, what is to be added to ``hidden``.
        pooled: what stands for a whole sample after the blocks, [B, H], which every rank has;
            without targets, the logits of a head on it.
        scores: of the targets, where they are to be scored.
        objective: what the head computes instead of the cross entropy of the targets.
        noise: on the token embeddings.
        apart: the numbers of a sample must not depend on the samples next to it, as in generation.
        ahead: of each multi-token prediction, the initial state of the same micro batch with the
            tokens, positions and targets that it reads; empty where nothing further is predicted.
    """

    hidden: Tensor
    encoder: Tensor | None = None
    losses: Mapping[str, Tensor] = {}
    position_ids: Tensor | None = None
    masks: AttentionMasks | None = None
    cache: LayerCache | None = None
    dropout_seed: int | None = None
    targets: Targets | None = None
    batch: Any = None
    bias: Tensor | None = None
    pending: Tensor | None = None
    token_types: Tensor | None = None
    pooled: Tensor | None = None
    scores: TokenScores | None = None
    objective: Objective | None = None
    noise: EmbeddingNoise | None = None
    apart: bool = False
    ahead: Sequence[Any] = ()

    def changed(self, **fields: Any) -> LayerState:
        """This state with other values of some fields."""
        # Not _replace: a tuple that leaves compiled code through it is empty with torch 2.11.
        return LayerState(**dict(zip(LayerState._fields, self, strict=True)) | fields)

    def with_hidden(self, hidden: Tensor) -> LayerState:
        return self.changed(hidden=hidden, pending=None)

    def divided(self, context: Context) -> LayerState:
        """The part of a rank of a context of the state before the first layer, with the positions
        of its tokens in the whole sequences; ``batch``, ``masks`` and ``noise`` stay whole."""
        length, positions_BS = self.hidden.shape[1], self.position_ids
        if positions_BS is None:
            positions_BS = torch.arange(length, device=self.hidden.device)[None]
        types_BS, targets = self.token_types, self.targets
        return self.changed(
            hidden=context.take(self.hidden, 1),
            position_ids=context.take(positions_BS, 1),
            token_types=None if types_BS is None else context.take(types_BS, 1),
            targets=None if targets is None else targets.divided(context, length),
            ahead=tuple(state.divided(context) for state in self.ahead),
        )

    @property
    def total(self) -> Tensor:
        """The hidden states, with what is pending."""
        return self.hidden if self.pending is None else self.hidden + self.pending

    def with_loss(self, name: str, loss: Tensor) -> LayerState:
        before = self.losses.get(name)
        total = loss if before is None else before + loss
        return self.changed(losses={**self.losses, name: total})


@dataclass(frozen=True)
class LayerSpec:
    """Recipe of one layer.

    Attributes:
        name: canonical name (``layers.3``), the prefix of its parameters' names.
        tied_key: layers with the same key are one module at several positions of the list.
        forward: how the module runs at this position; None calls it with the state.
        with_next_block: whether it must be on the pipeline stage of the next block, which, after a
            block of which that is so, is no block that a stage can begin with.
        once_per_stage: whether, of several in a stage that are one module, only the first runs: it
            computes what all blocks after it share.
        cost: of a block: work, compared with other blocks.
        ahead: of a layer that only predicts a further token, the number of that token, from 0; the
            layers of one follow each other, and the last is its output head.
    """

    name: str
    build: Callable[[], nn.Module]
    tied_key: str | None = None
    forward: Callable[[nn.Module, LayerState], LayerState] | None = None
    block: bool = False
    with_next_block: bool = False
    once_per_stage: bool = False
    cost: int = 1
    ahead: int | None = None


Step = Callable[[LayerState], LayerState]
"""Applies one layer, or several, to the state."""


class LayerSequence:
    """Consecutive layers, as they run on one process: layers with their indices in the whole list,
    or, with None, several that are recomputed together; and the repeated blocks among them."""

    def __init__(
        self, steps: Sequence[tuple[int | None, Step]], blocks: Sequence[nn.Module] = ()
    ) -> None:
        self.steps, self.blocks = list(steps), list(blocks)

    def __call__(self, state: LayerState) -> LayerState:
        for index, step in self.steps:
            if state.dropout_seed is not None and index is not None:
                # A layer's masks depend on its index, not on the layers before it on this process:
                # they are the same however the list is cut into pipeline stages.
                seed_devices(derive_seed(state.dropout_seed, index))
            state = step(state)
        return state

    def part(self, first: int, end: int) -> LayerSequence:
        """The layers with these indices, without recomputation."""
        return LayerSequence([step for step in self._flat() if first <= (step[0] or 0) < end])

    def _flat(self) -> Iterator[tuple[int | None, Step]]:
        for index, step in self.steps:
            if isinstance(step, LayerSequence):
                yield from step._flat()
            else:
                yield index, step

    def hand_on(self) -> None:
        """Lets every block leave its last sum to the block after it, which computes it together
        with its norm. Nothing changes for other layers, nor for what is kept to recompute: before
        and after such blocks nothing is pending."""
        runs: list[list[int]] = [[]]
        for place, (_, step) in enumerate(self.steps):
            if isinstance(step, LayerSequence):
                step.hand_on()
            if getattr(step, "may_hand_on", False):
                runs[-1].append(place)
            else:
                runs.append([])
        for run in (run for run in runs if len(run) > 1):
            for place in run:
                self.steps[place][1].hands_on = True  # type: ignore[attr-defined]
            for place, around in ((run[0], _from_zero), (run[-1], _with_total)):
                index, step = self.steps[place]
                self.steps[place] = index, partial(around, step)

    def wrap(self, around: Callable[[int, Step], Step]) -> None:
        """Replace every layer with ``around(index, layer)``."""
        for place, (index, step) in enumerate(self.steps):
            if index is not None:
                self.steps[place] = index, around(index, step)
            elif isinstance(step, LayerSequence):
                step.wrap(around)

    def observe(self, observer: Callable[[int, LayerState], None]) -> None:
        """Calls a function with the index of every layer and the state after it."""
        self.wrap(partial(_observed, observer))


class RecomputedLayers(LayerSequence):
    """Layers whose first input alone is kept for the backward pass."""

    def __call__(self, state: LayerState) -> LayerState:
        if not torch.is_grad_enabled():
            return super().__call__(state)
        # Of what is computed by the arguments: so it is saved as other tensors are, by their hooks.
        rest = state.changed(hidden=None, encoder=None)
        return checkpoint(self._again, state.hidden, state.encoder, rest, use_reentrant=False)

    def _again(self, hidden: Tensor, encoder: Tensor | None, rest: LayerState) -> LayerState:
        # Recomputation must not find masks that the first pass made: compiled code would differ.
        masks = None if rest.masks is None else rest.masks.unmade()
        return super().__call__(rest.changed(hidden=hidden, encoder=encoder, masks=masks))


def _from_zero(block: Step, state: LayerState) -> LayerState:
    # The first of several blocks is then compiled as the others are, whose input has a gradient.
    x = state.hidden
    zeros = torch.zeros_like(x, dtype=autocast_dtype(x), requires_grad=x.requires_grad)
    return block(state.changed(pending=zeros))


def _with_total(block: Step, state: LayerState) -> LayerState:
    state = block(state)
    return state.with_hidden(state.total)


def _observed(observer: Callable[[int, LayerState], None], index: int, step: Step) -> Step:
    def observed(state: LayerState) -> LayerState:
        state = step(state)
        observer(index, state.with_hidden(state.total))
        return state

    return observed


def layer_sequence(
    specs: Sequence[LayerSpec],
    first: int,
    modules: Sequence[nn.Module],
    parallel: ParallelConfig,
) -> LayerSequence:
    """Consecutive layers with their modules, from index ``first`` of the whole list, with the
    recomputation of ``parallel``."""
    running: list[tuple[int, LayerSpec, nn.Module]] = []
    for n, (spec, module) in enumerate(zip(specs, modules, strict=True)):
        if not (spec.once_per_stage and any(module is other for _, _, other in running)):
            running.append((first + n, spec, module))
    specs = [spec for _, spec, _ in running]
    layers: list[tuple[int | None, Step]] = [
        (index, module if spec.forward is None else partial(spec.forward, module))
        for index, spec, module in running
    ]
    steps: list[tuple[int | None, Step]] = []
    for begin, end, recomputed in recomputed_chunks(specs, parallel):
        chunk = layers[begin:end]
        steps += [(None, RecomputedLayers(chunk))] if recomputed else chunk
    blocks = [module for _, spec, module in running if spec.block]
    # A block may have others inside.
    for mlp in (getattr(module, "mlp", None) for block in blocks for module in block.modules()):
        if mlp is not None and hasattr(mlp, "recomputes_activation"):
            mlp.recomputes_activation = "mlp_act" in parallel.recomputed_modules
    return LayerSequence(steps, blocks)


class LayerStack(nn.Module):
    """The whole layer list as one module. Layers are registered as DeepSpeed's PipelineModule
    registers them (by index, tied ones under ``tied_modules.<key>``), so that parameter names are
    the same in both engines."""

    def __init__(self, specs: Sequence[LayerSpec], parallel: ParallelConfig) -> None:
        super().__init__()
        self.layers = tuple(specs)
        self.tied_modules = nn.ModuleDict()
        modules: list[nn.Module] = []
        for place, spec in enumerate(specs):
            if spec.tied_key is None:
                modules.append(spec.build())
                self.add_module(str(place), modules[-1])
            else:
                if spec.tied_key not in self.tied_modules:
                    self.tied_modules[spec.tied_key] = spec.build()
                modules.append(self.tied_modules[spec.tied_key])
        self.sequence = layer_sequence(specs, 0, modules, parallel)

    def forward(self, state: LayerState) -> LayerState:
        """From the state with token ids to that after the last layer: with losses if there are
        targets, else with logits. Nothing but losses has a gradient: DeepSpeed 0.19.0 divides that
        of every output by the number of micro batches, which would count twice where two outputs
        depend on one."""
        state = self.sequence(state)
        if not state.losses:
            return state
        encoder = None if state.encoder is None else state.encoder.detach()
        return state.changed(hidden=state.hidden.detach(), encoder=encoder, bias=None)

    def blocks(self) -> list[nn.Module]:
        return self.sequence.blocks

    def canonical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter) of every parameter once, in registration order."""
        return canonical_parameters(self, self.layers)

    def canonical_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """(canonical name, buffer) of every buffer once."""
        return canonical_buffers(self, self.layers)

    def canonical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of parameters and buffers as in checkpoints, by canonical name."""
        shards = [(name, shard_of(param)) for name, param in self.canonical_parameters()]
        shards += [(name, buffer.shard) for name, buffer in self.canonical_buffers()]
        return {name: shard.canonical_shape for name, shard in shards}


def recomputed_chunks(
    specs: Sequence[LayerSpec], parallel: ParallelConfig
) -> list[tuple[int, int, bool]]:
    """(first, end, recomputed) of consecutive parts that cover the list. ``full`` recomputation
    with method ``uniform`` recomputes all blocks, ``recompute_num_layers`` at a time; with
    ``block`` the first ``recompute_num_layers`` blocks, one at a time."""
    length = len(specs)
    if parallel.recompute_granularity != "full":
        return [(0, length, False)]
    blocks, step = [place for place, spec in enumerate(specs) if spec.block], 1
    if parallel.recompute_method == "block":
        blocks = blocks[: parallel.recompute_num_layers]
    else:
        step = parallel.recompute_num_layers
    chunks, done = [], 0
    for at in range(0, len(blocks), step):
        part = blocks[at : at + step]
        chunks += [(done, part[0], False), (part[0], part[-1] + 1, True)]
        done = part[-1] + 1
    return [chunk for chunk in (*chunks, (done, length, False)) if chunk[0] < chunk[1]]


def canonical_parameters(
    module: nn.Module, specs: Sequence[LayerSpec]
) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of the parameters of a module that registers layers of this list
    by their indices; parts of one parameter share its name."""
    prefixes = canonical_prefixes(specs)
    for registered, param in module.named_parameters():
        name = canonical_name(registered, prefixes)
        whole = shard_of(param).whole
        yield (name if whole is None else f"{name.rpartition('.')[0]}.{whole}"), param


def canonical_buffers(
    module: nn.Module, specs: Sequence[LayerSpec]
) -> Iterator[tuple[str, Buffer]]:
    """(canonical name, buffer) of the buffers of such a module."""
    prefixes = canonical_prefixes(specs)
    for registered, part in module.named_modules():
        for attribute, value in vars(part).items():
            if isinstance(value, Buffer):
                yield canonical_name(f"{registered}.{attribute}", prefixes), value


def canonical_prefixes(specs: Sequence[LayerSpec]) -> dict[str, str]:
    """Registered prefix (``3`` or ``tied_modules.embed``) to canonical layer name."""
    prefixes: dict[str, str] = {}
    for place, spec in enumerate(specs):
        key = str(place) if spec.tied_key is None else f"tied_modules.{spec.tied_key}"
        prefixes.setdefault(key, spec.name)
    return prefixes


def canonical_name(registered: str, prefixes: dict[str, str]) -> str:
    """Canonical name of a parameter: ``3.mlp.up.weight`` is ``layers.2.mlp.up.weight``."""
    parts = registered.split(".")
    length = 2 if parts[0] == "tied_modules" else 1
    return ".".join([prefixes[".".join(parts[:length])], *parts[length:]])


@torch.no_grad()
def initialise(name: str, param: nn.Parameter, seed: int, coordinates: Coordinates = ALONE) -> None:
    """Fill a parameter of local shape: drawn whole in any layout, then divided. The canonical name
    and the seed determine the values."""
    shard, init, random = shard_of(param), init_of(param), generator(seed, name)
    plain = param.device.type == "cpu" and param.dtype == torch.float32 and param.is_contiguous()
    if plain and tuple(param.shape) == shard.full_shape == shard.canonical_shape:
        # The same values without a second copy, whose pages cost as much as the numbers.
        init.fill(param, random)
        return
    whole = init.draw(shard.canonical_shape, random)
    param.copy_(shard.cut(whole, coordinates))
