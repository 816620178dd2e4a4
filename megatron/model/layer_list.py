"""A model as an ordered list of layers, and the state that is passed through them.

Shapes: B batch, S sequence, H hidden; in generation S current tokens, N query heads, K key and
value heads, D head width, T distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ParallelConfig
from megatron.model.attention_masks import AttentionMasks, AttentionScoring
from megatron.parallel.context import Context
from megatron.parallel.loss_head import Objective, Targets
from megatron.parallel.mesh import ALONE, Coordinates
from megatron.parallel.random import derive_seed, generator, seed_devices
from megatron.parallel.shard import Buffer, init_of, shard_of
from megatron.parallel.tensor_parallel import autocast_dtype


class LayerCache(Protocol):
    """KV cache for generation. It stores the keys and values of the current tokens, which may
    belong to several sequences, and lets each token attend to its own sequence up to itself. The
    caches of features add methods, which their layers call.

    Attributes:
        lengths_BS: length of the sequence that each current token belongs to, int64.
        positions: maximum sequence length.
        neighbors: store of retrieved text, defined by the feature whose layers read it; None
            without retrieval.
        padded: returns the number of rows to which n rows of a GEMM are padded, so that a row's
            result has the same bits whatever n is.
    """

    padded: Callable[[int], int]
    lengths_BS: Tensor
    positions: int
    neighbors: Any

    def attend(
        self,
        layer: int,
        q_BSND: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        scores: AttentionScoring,
        bias_NT: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Attend in block ``layer``, and return [B, S, N, D]. The bias is added to the scores by
        the distance from query back to key. A sink is an extra score per query without a value."""
        ...


class LayerState(NamedTuple):
    """Input and output of a layer.

    ``hidden``, ``encoder`` and ``losses`` are computed, and can be sent between pipeline stages.
    The other fields belong to the micro batch, and every stage has its own copy of them. A layer
    returns the fields that it does not use unchanged.

    Attributes:
        hidden: token ids int64 [B, S] before the first layer; hidden states [B, S, H] between
            layers (this rank's slice of S with sequence parallelism); after the last layer, without
            targets, logits [B, S, V / tensor size].
        encoder: encoder output that decoder blocks attend to, [B, T, H], sliced like ``hidden``;
            None in a family without an encoder.
        losses: scalars by name, added by layers; with targets the last layer adds its own.
        position_ids: positions int64 [B, S]; None for 0, 1, 2, ...
        token_types: int64 [B, S], for models with a token type embedding.
        dropout_seed: seed of this micro batch's dropout masks; None leaves torch's generators
            unchanged.
        bias: tensor added to the attention scores of all blocks in a stack, masks included: [1 or
            B, N / tensor size, S, S]. With a cache, values by distance: [N / tensor size,
            positions]. None without relative positions. Every stage computes its own.
        pending: tensor that the next block must add to ``hidden``, see
            :meth:`LayerSequence.hand_on`; otherwise None.
        pooled: representation of each whole sample after the blocks, [B, H], on every rank; without
            targets, the logits that a head computes from it.
        objective: function that the head computes instead of the targets' cross entropy.
        noise: noise added to the token embeddings, drawn by a feature.
        apart: whether a sample's results must not depend on other samples, as in generation.
        ahead: for each multi-token prediction, the initial state of the same micro batch with the
            tokens, positions and targets that the prediction uses; empty without predictions.
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
    objective: Objective | None = None
    noise: Any = None
    apart: bool = False
    ahead: Sequence[Any] = ()

    def changed(self, **fields: Any) -> LayerState:
        """Return a copy of this state with some fields replaced."""
        # Not _replace: with torch 2.11 the tuple that it returns from compiled code is empty.
        return LayerState(**dict(zip(LayerState._fields, self, strict=True)) | fields)

    def with_hidden(self, hidden: Tensor) -> LayerState:
        return self.changed(hidden=hidden, pending=None)

    def divided(self, context: Context) -> LayerState:
        """Return a context-parallel rank's slice of the initial state. Positions still refer to the
        whole sequences. ``batch``, ``masks`` and ``noise`` are not sliced."""
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
        """Hidden states with ``pending`` added."""
        return self.hidden if self.pending is None else self.hidden + self.pending

    def with_loss(self, name: str, loss: Tensor) -> LayerState:
        before = self.losses.get(name)
        total = loss if before is None else before + loss
        return self.changed(losses={**self.losses, name: total})


@dataclass(frozen=True)
class LayerSpec:
    """Recipe for building and running one layer.

    Attributes:
        name: canonical name (``layers.3``), the prefix of the layer's parameter names.
        tied_key: layers with the same key share one module at several positions of the list.
        forward: function that runs the module at this position. If None, the module is called.
        with_next_block: whether the layer must be on the next block's pipeline stage. After a
            block with this set, no stage can begin with the next block.
        once_per_stage: whether a stage runs only the first of its layers with the same module,
            because all later blocks share what it computes.
        cost: compute cost of a block relative to other blocks.
        ahead: index, from 0, of the multi-token prediction that the layer belongs to; None for
            others. A prediction's layers are consecutive, and its output head is the last.
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
"""Function that applies one or several layers to the state."""


class LayerSequence:
    """Consecutive layers as one process runs them. ``steps`` are pairs of a layer's index in the
    whole list and the layer, or of None and a group of layers that are recomputed together.
    ``blocks`` are the transformer blocks among the layers."""

    def __init__(
        self, steps: Sequence[tuple[int | None, Step]], blocks: Sequence[nn.Module] = ()
    ) -> None:
        self.steps, self.blocks = list(steps), list(blocks)

    def __call__(self, state: LayerState) -> LayerState:
        for index, step in self.steps:
            if state.dropout_seed is not None and index is not None:
                # Dropout masks depend on a layer's index, not on earlier layers of this process, so
                # they do not depend on the division into pipeline stages.
                seed_devices(derive_seed(state.dropout_seed, index))
            state = step(state)
        return state

    def part(self, first: int, end: int) -> LayerSequence:
        """Return the layers with indices in [``first``, ``end``), without recomputation."""
        return LayerSequence([step for step in self._flat() if first <= (step[0] or 0) < end])

    def _flat(self) -> Iterator[tuple[int | None, Step]]:
        for index, step in self.steps:
            if isinstance(step, LayerSequence):
                yield from step._flat()
            else:
                yield index, step

    def hand_on(self) -> None:
        """Let each block leave its last addition to the next block, where it is fused with the
        norm. Only runs of consecutive blocks do so: nothing is pending before or after a run, so
        other layers and the inputs saved for recomputation do not change."""
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
        """Call ``observer`` after every layer, with the layer's index and the resulting state."""
        self.wrap(partial(_observed, observer))


class RecomputedLayers(LayerSequence):
    """Layers that are recomputed in the backward pass. Only the input of the first one is saved."""

    def __call__(self, state: LayerState) -> LayerState:
        if not torch.is_grad_enabled():
            return super().__call__(state)
        # Tensors with gradients are passed as arguments, so that hooks apply when they are saved.
        rest = state.changed(hidden=None, encoder=None)
        return checkpoint(self._again, state.hidden, state.encoder, rest, use_reentrant=False)

    def _again(self, hidden: Tensor, encoder: Tensor | None, rest: LayerState) -> LayerState:
        # Masks cached by the first pass would make the recomputation compile to other code.
        masks = None if rest.masks is None else rest.masks.unmade()
        return super().__call__(rest.changed(hidden=hidden, encoder=encoder, masks=masks))


def _from_zero(block: Step, state: LayerState) -> LayerState:
    # With pending zeros, the first block of a run compiles to the same code as the others.
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
    """Return a sequence of consecutive layers with the recomputation that ``parallel`` selects.
    ``first`` is the first layer's index in the whole list."""
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
    # A block may contain other blocks.
    for mlp in (getattr(module, "mlp", None) for block in blocks for module in block.modules()):
        if mlp is not None and hasattr(mlp, "recomputes_activation"):
            mlp.recomputes_activation = "mlp_act" in parallel.recomputed_modules
    return LayerSequence(steps, blocks)


class LayerStack(nn.Module):
    """The whole layer list as one module. Layers are registered as in DeepSpeed's PipelineModule
    (by index, tied ones under ``tied_modules.<key>``), so that parameter names are the same with
    and without pipeline parallelism."""

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
        """Run all layers on an initial state. The result has losses if there are targets, else
        logits. Only losses keep gradients: DeepSpeed 0.19.0 divides every output's gradient by the
        number of micro batches, twice if one output depends on another."""
        state = self.sequence(state)
        if not state.losses:
            return state
        encoder = None if state.encoder is None else state.encoder.detach()
        return state.changed(hidden=state.hidden.detach(), encoder=encoder, bias=None)

    def blocks(self) -> list[nn.Module]:
        return self.sequence.blocks

    def canonical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (canonical name, parameter) once for every parameter, in registration order."""
        return canonical_parameters(self, self.layers)

    def canonical_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Yield (canonical name, buffer) once for every buffer."""
        return canonical_buffers(self, self.layers)

    def canonical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint shapes of parameters and buffers, by canonical name."""
        shards = [(name, shard_of(param)) for name, param in self.canonical_parameters()]
        shards += [(name, buffer.shard) for name, buffer in self.canonical_buffers()]
        return {name: shard.canonical_shape for name, shard in shards}


def recomputed_chunks(
    specs: Sequence[LayerSpec], parallel: ParallelConfig
) -> list[tuple[int, int, bool]]:
    """Divide the list into consecutive ranges (first, end, recomputed), ``end`` exclusive. With
    ``full`` recomputation, method ``uniform`` recomputes all blocks, ``recompute_num_layers`` at a
    time; ``block`` recomputes the first ``recompute_num_layers`` blocks, one at a time."""
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
    """Yield (canonical name, parameter) for a module whose children are the layers of ``specs``,
    registered by index. Parameters that are parts of one whole share its name."""
    prefixes = canonical_prefixes(specs)
    for registered, param in module.named_parameters():
        name = canonical_name(registered, prefixes)
        whole = shard_of(param).whole
        yield (name if whole is None else f"{name.rpartition('.')[0]}.{whole}"), param


def canonical_buffers(
    module: nn.Module, specs: Sequence[LayerSpec]
) -> Iterator[tuple[str, Buffer]]:
    """Yield (canonical name, buffer) for a module, as in :func:`canonical_parameters`."""
    prefixes = canonical_prefixes(specs)
    for registered, part in module.named_modules():
        for attribute, value in vars(part).items():
            if isinstance(value, Buffer):
                yield canonical_name(f"{registered}.{attribute}", prefixes), value


def canonical_prefixes(specs: Sequence[LayerSpec]) -> dict[str, str]:
    """Map each registered prefix (``3``, ``tied_modules.embed``) to the layer's canonical name."""
    prefixes: dict[str, str] = {}
    for place, spec in enumerate(specs):
        key = str(place) if spec.tied_key is None else f"tied_modules.{spec.tied_key}"
        prefixes.setdefault(key, spec.name)
    return prefixes


def canonical_name(registered: str, prefixes: dict[str, str]) -> str:
    """Return a parameter's canonical name: ``layers.2.mlp.up.weight`` for ``3.mlp.up.weight``."""
    parts = registered.split(".")
    length = 2 if parts[0] == "tied_modules" else 1
    return ".".join([prefixes[".".join(parts[:length])], *parts[length:]])


@torch.no_grad()
def initialise(name: str, param: nn.Parameter, seed: int, coordinates: Coordinates = ALONE) -> None:
    """Initialise this rank's shard of a parameter in place. The whole parameter is drawn and then
    sharded, so the values depend only on the canonical name and the seed, not on the layout."""
    shard, init, random = shard_of(param), init_of(param), generator(seed, name)
    plain = param.device.type == "cpu" and param.dtype == torch.float32 and param.is_contiguous()
    if plain and tuple(param.shape) == shard.full_shape == shard.canonical_shape:
        # Same values, filled in place: allocating a second copy would take as long as drawing it.
        init.fill(param, random)
        return
    whole = init.draw(shard.canonical_shape, random)
    param.copy_(shard.cut(whole, coordinates))
