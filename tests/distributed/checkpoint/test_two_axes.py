"""A parameter that is cut over two axes at once, as the weights of experts are: initial values,
gradients, norm, clipping, and checkpoints from one layout to another."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from configs import model_config, run_config

from megatron.apps.parity.gradients import average_gradients
from megatron.checkpoint.source import locate_checkpoint, open_checkpoint
from megatron.config import CheckpointConfig, OptimizerConfig
from megatron.engine.loading import load_checkpoint
from megatron.engine.saving import CheckpointWriter
from megatron.engine.state import owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.async_step import AsyncOptimizerStep
from megatron.engine.update.optimizer import build_optimizer, gradient_norm
from megatron.model.layer_list import initialise
from megatron.parallel.linear import KernelStates
from megatron.parallel.mesh import AXES, build_mesh, coordinates_of
from megatron.parallel.random import generator
from megatron.parallel.shard import Cut, Init, Shard, parameter, shard_of

CPU, CLIP = torch.device("cpu"), 1.0
SHARDS = {
    "layers.0.experts.up": Shard((4, 16, 6), (Cut(0, "expert"), Cut(1, parts=(8, 8)))),
    "layers.0.experts.down": Shard((4, 6, 8), (Cut(0, "expert"), Cut(2))),
    "layers.0.proj.weight": Shard((6, 8), (Cut(1),)),
    "layers.0.norm.weight": Shard((6,)),
}
WRITTEN = {"expert": 2, "tensor": 2}
LAYOUTS = [WRITTEN, {"tensor": 4}, {"expert": 4}, {"tensor": 2}, {"expert": 2}, {}]
"""Of four ranks; replicas by ``data`` are what is left."""

NO_KERNELS = KernelStates()
"""Of an engine without layers that multiply in 8 bits."""


def whole_gradient(name: str, replica: int) -> torch.Tensor:
    """What a replica's loss adds to a gradient; small whole numbers, of which sums are exact."""
    drawn = generator(7 + replica, name)
    return torch.randint(-8, 9, SHARDS[name].full_shape, generator=drawn).float()


def engine_of(sizes: dict[str, int], save: str) -> Any:
    """What of an engine is measured, saved and loaded: parameters and an optimizer at stage 0."""
    dist.init_process_group("gloo")
    mesh = build_mesh(sizes)
    names = {parameter(s, Init(0.5), mesh.coordinates): name for name, s in SHARDS.items()}
    optimizer = OptimizerConfig(lr=0.1)
    config = dataclasses.replace(
        run_config(model=model_config(num_layers=1)).with_vocabulary(8),
        optimizer=optimizer,
        checkpoint=CheckpointConfig(save=save),
    )
    built = build_optimizer(names, optimizer)
    engine = object.__new__(TrainEngine)
    vars(engine).update(
        stage=0, mesh=mesh, _names=names, optimizer=built, config=config, device=CPU, data_rank=0,
        engine=SimpleNamespace(optimizer=built), stored_states=None, kept={}, kernels=NO_KERNELS,
        buffers={}, base=None,
        _trained=names, quantised=[], backend=SimpleNamespace(await_weights=lambda: None),
    )  # fmt: skip
    return engine


def state(engine: Any) -> dict[tuple[str, str], np.ndarray]:
    return {
        (own.name, kind): own.get(kind).detach().view(own.param.shape).numpy().copy()
        for own in owned_slices(engine)
        for kind in own.kinds
    }


def trained(sizes: dict[str, int], save: str) -> dict[tuple[str, str], np.ndarray]:
    """Takes a step and saves it; this rank's shares after it."""
    engine = engine_of(sizes, save)
    mesh, names = engine.mesh, engine.names
    own = mesh.group("expert")
    replicas = mesh.dense.size
    for param, name in names.items():
        shard = shard_of(param)
        initialise(name, param, 3, mesh.coordinates)
        whole = Init(0.5).draw(shard.full_shape, generator(3, name))
        assert torch.equal(param, shard.cut(whole, mesh.coordinates)), name
        # A rank has what its own tokens add, and to its experts what those of others do.
        tokens = [mesh.dense.rank]
        if "expert" not in shard.reduced:
            tokens = [mesh.dense.ranks.index(rank) for rank in range(dist.get_world_size())
                      if rank in own.ranks]  # fmt: skip
        added = sum(whole_gradient(name, replica) for replica in tokens)
        param.grad = shard.cut(added, mesh.coordinates).clone()
    average_gradients(names, mesh)
    means = {
        name: sum(whole_gradient(name, n) for n in range(replicas)) / replicas for name in SHARDS
    }
    for param, name in names.items():
        expected = shard_of(param).cut(means[name], mesh.coordinates)
        assert torch.equal(param.grad, expected), name
    exact = float(torch.cat([mean.double().view(-1) for mean in means.values()]).norm())
    assert float(gradient_norm(list(names), mesh)) == pytest.approx(exact, rel=1e-6)
    update = AsyncOptimizerStep(
        engine.optimizer, engine.optimizer, names, mesh, CPU, CLIP, hold=False
    )
    update.prepare()
    assert float(update.norm) == pytest.approx(exact, rel=1e-6) and exact > 10 * CLIP
    assert float(gradient_norm(list(names), mesh)) == pytest.approx(CLIP, rel=1e-5)
    engine.optimizer.step()
    writer = CheckpointWriter(engine, {}, lambda folder: None)
    writer.save(1, {"consumed_samples": 1})
    (result,) = writer.close()
    assert result.error is None, result.error
    return state(engine)


def loaded(sizes: dict[str, int], save: str) -> dict[tuple[str, str], np.ndarray]:
    """This rank's shares of what is loaded at another layout."""
    engine = engine_of(sizes, "")
    found = locate_checkpoint(save)
    assert found is not None
    load_checkpoint(engine, found)
    return state(engine)


def whole(ranks: list[dict[tuple[str, str], np.ndarray]], sizes: dict[str, int]) -> dict:
    """Whole tensors from what all ranks hold, all of whose copies must be the same."""
    sizes = {**sizes, "data": len(ranks) // int(np.prod(list(sizes.values())))}
    joined = {}
    for name, kind in ranks[0]:
        shard, shares = SHARDS[name], [torch.from_numpy(rank[name, kind]) for rank in ranks]
        joined[name, kind] = shard.join(shares, sizes)
        for rank, share in enumerate(shares):
            place = coordinates_of(rank, {axis: sizes.get(axis, 1) for axis in AXES})
            assert torch.equal(shard.cut(joined[name, kind], place), share), (name, kind, rank)
    return joined


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(WRITTEN, id="expert x tensor"),
        pytest.param({"expert": 2}, id="x data", marks=pytest.mark.proof),
    ],
)
def test_any_layout_continues_from_any(pool, tmp_path, written):
    saved = whole(pool.run(4, trained, written, str(tmp_path)), written)
    assert {kind for _, kind in saved} == {"weight", "exp_avg", "exp_avg_sq"}
    reader = open_checkpoint(tmp_path)
    for (name, kind), values in saved.items():
        assert torch.equal(reader.tensor(name, kind), values), (name, kind)
    for sizes in LAYOUTS:
        found = whole(pool.run(4, loaded, sizes, str(tmp_path)), sizes)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[key], saved[key]) for key in saved), sizes
