"""Loading of the base model and adapters of a run with ``--lora``, and the record of the base."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source, locate_checkpoint
from megatron.config.features import features
from megatron.engine.loading import load_weights, together
from megatron.engine.train_engine import TrainEngine
from megatron.features.adapters.checkpoint import (
    AdaptedSource,
    BaseRecord,
    RowLengths,
    adapter_name,
    digests_of,
)
from megatron.features.adapters.flags import AdapterConfig, LoadedAdapterFlags
from megatron.model.layer_list import LayerStack
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel


def load_adapted(
    engine: TrainEngine, source: Source, fresh: Collection[str], continues: bool
) -> Source:
    """Load the base model and the adapters of a run with ``--lora``, and record the base for its
    checkpoints. A resumed run loads both from a checkpoint of adapters, whose own source is
    returned to continue from. A new run uses ``source`` as its base, with randomly initialised
    adapters or those of ``--load-adapter``, and gets ``source`` back. Collective: every rank must
    call this."""
    names = set(engine.names.values())
    adapters = {name for name in names if adapter_name(name)}
    if continues:
        adapted = together(engine, lambda: continued_adapters(engine, source))
        base, own = adapted.base, adapted.additions
        trained = names & set(own.names())
        together(engine, lambda: load_weights(engine, base, trained))
        together(engine, lambda: load_weights(engine, own, names - trained))
        engine.base = BaseRecord.read(own.folder, place=base.folder)
        return own
    added = {name for name in names - set(source.names()) if is_only_trained(name)}
    together(engine, lambda: load_weights(engine, source, {*fresh, *adapters, *added}))
    if engine.config.section(AdapterConfig).use_dora:
        lengths = RowLengths(source, [name for name in adapters if name.endswith("magnitude")])
        together(engine, lambda: load_weights(engine, lengths, names - set(lengths.names())))
    missing = [name for name, weight in engine.quantised if not weight.filled]
    if missing:
        raise CheckpointError(f"{source.folder} has no {', '.join(missing[:5])}")
    engine.base = together(engine, lambda: record_base(engine, source))
    chosen = LoadedAdapterFlags.of(engine.config.checkpoint).load_adapter
    if chosen is not None:
        adapted = together(engine, lambda: chosen_adapters(engine, chosen, source))
        others = names - set(adapted.additions.names())
        together(engine, lambda: load_weights(engine, adapted.additions, others))
    return source


def record_base(engine: TrainEngine, source: Source) -> BaseRecord:
    """Return the record of a run's base for its checkpoints. Collective: every rank must call this,
    and computes some of the digests."""
    world = engine.mesh.world
    names = list(source.names())
    digests = world.gathered(digests_of(source, names[world.rank :: world.size]))
    merged = {name: value for share in digests for name, value in share.items()}
    ordered = {name: merged[name] for name in names}
    return BaseRecord(str(source.folder.resolve()), source.title, ordered)


def continued_adapters(engine: TrainEngine, source: Source) -> AdaptedSource:
    """Return the checkpoint of adapters to resume from. Raises CheckpointError if it contains a
    whole model, no training state, or different adapters."""
    if isinstance(source, AdaptedSource) and not source.state:
        raise CheckpointError(
            f"--load {source.folder} has {source.title} without the state of a run, and cannot be "
            "continued: name it by --load-adapter, to begin with them, and the base by "
            "--pretrained-checkpoint"
        )
    if not isinstance(source, AdaptedSource):
        raise CheckpointError(
            f"--load {source.folder} was not saved with --lora, and cannot be continued with it: "
            "name it by --pretrained-checkpoint, as the base, or give --finetune"
        )
    require_same(engine, source)
    return source


def chosen_adapters(engine: TrainEngine, folder: str, base: Source) -> AdaptedSource:
    """Return the adapters of ``--load-adapter``, on the run's base. Raises CheckpointError if the
    folder has no adapters, or if their names, shapes or scale differ from the run's."""
    checkpoint = locate_checkpoint(folder)
    if checkpoint is None or not checkpoint.form.on_base:
        raise CheckpointError(
            f"--load-adapter {folder}: neither a folder of peft (adapter_config.json) nor a "
            "checkpoint of a run with --lora"
        )
    source = checkpoint._replace(base=str(base.folder)).open()
    assert isinstance(source, AdaptedSource)
    require_same(engine, source)
    require_same_scale(engine, source)
    trained = trained_shapes(engine)
    frozen = [n for n in source.whole if n not in trained and not is_only_trained(n)]
    if frozen:
        raise CheckpointError(
            f"--load-adapter {folder} has whole parameters ({', '.join(frozen[:3])}), which are "
            "frozen in this run: merge it with tools/convert_checkpoint.py to-hf, and name the "
            "result by --pretrained-checkpoint"
        )
    return source


def is_only_trained(name: str) -> bool:
    """Return whether a parameter is used only in training, so that loaded models may lack it."""
    return name.startswith(tuple(p for each in features().values() for p in each.only_trained))


def require_same_scale(engine: TrainEngine, source: AdaptedSource) -> None:
    """Raise CheckpointError if the scaling factor of an adapter differs from the run's, because
    that would change the adapter's effect."""
    wanted = engine.config.section(AdapterConfig).scale
    for weight, parts in source.adapted.items():
        for part in parts:
            scale = source.scale_of(weight, part)
            if not math.isclose(scale, wanted, rel_tol=1e-6):
                raise CheckpointError(
                    f"{source.folder} has other adapters than this run: its addition to {weight} "
                    f"is multiplied by {scale:g}, this run's by {wanted:g}. Its flags are "
                    f"{shown(source.adapters)}"
                )


def trained_shapes(engine: TrainEngine) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all trained parameters on all ranks, by canonical name."""
    with torch.device("meta"):
        whole = LayerStack(engine.spec.layers(TensorParallel()), engine.config.parallel)
    return {
        name: shard_of(param).canonical_shape
        for name, param in whole.canonical_parameters()
        if param.requires_grad
    }


def require_same(engine: TrainEngine, source: AdaptedSource) -> None:
    """Raise CheckpointError if names or shapes of adapters differ from the run's. The error shows
    the flags that fit."""
    wanted = {name: shape for name, shape in trained_shapes(engine).items() if adapter_name(name)}
    stored = source.additions
    shapes = {name: stored.shape(name) for name in stored.names() if adapter_name(name)}
    different = [name for name in wanted | shapes if wanted.get(name) != shapes.get(name)]
    if not different:
        return
    name = different[0]
    raise CheckpointError(
        f"{source.folder} has other adapters than this run: {name} is "
        f"{shapes.get(name, 'missing')} there and {wanted.get(name, 'missing')} here. Its flags "
        f"are {shown(source.adapters)}"
    )


def shown(adapters: AdapterConfig) -> str:
    """Return the flags that describe adapters as a string."""
    words = ["--lora", f"--lora-rank {adapters.lora_rank}"]
    words.append(f"--lora-alpha {adapters.alpha:g}")
    words.append(f"--lora-targets {' '.join(adapters.lora_targets)}")
    words += [
        f"--{name.replace('_', '-')}"
        for name in ("use_rslora", "use_dora")
        if getattr(adapters, name)
    ]
    return " ".join(words)
