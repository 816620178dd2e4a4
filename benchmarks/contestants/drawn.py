"""Weights drawn on the device, and samples drawn in the process, without files.

A weight depends on its canonical name, the seed and the device: a GPU draws by Philox and a CPU by
the Mersenne Twister, so that all contestants on a machine start from the same weights, and those of
a GPU are not those that the trainer draws for a training, which are the same on every machine. In
exchange 7B parameters are there in a second instead of a minute or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from contestants.flags import flags_of
from contestants.setting import SEED, Setting
from megatron.config import ModelConfig
from megatron.engine import backend
from megatron.engine.environment import training_device
from megatron.families import build_model
from megatron.formats.huggingface import architecture_of
from megatron.formats.huggingface.architecture import Architecture
from megatron.parallel.mesh import ALONE, Coordinates
from megatron.parallel.random import derive_seed
from megatron.parallel.shard import init_of, shard_of


def draw(name: str, param: nn.Parameter, seed: int, device: torch.device) -> Tensor:
    """The initial values of a whole parameter, float32 on ``device``; the parameter itself may be
    on the meta device."""
    random = torch.Generator(device).manual_seed(derive_seed(seed, name))
    whole = torch.empty(shard_of(param).canonical_shape, device=device)
    return init_of(param).fill(whole, random)


@contextmanager
def drawn_on_device() -> Iterator[None]:
    """The engine builds its layers on the device, and draws them there."""
    device = training_device()

    @torch.no_grad()
    def initialise(
        name: str, param: nn.Parameter, seed: int, coordinates: Coordinates = ALONE
    ) -> None:
        param.copy_(shard_of(param).cut(draw(name, param, seed, device), coordinates))

    build = backend.PlainBackend._build

    def on_device(self: backend.PlainBackend, settings: Any) -> Any:
        with device:
            return build(self, settings)

    with (
        mock.patch.object(backend, "initialise", initialise),
        mock.patch.object(backend.PlainBackend, "_build", on_device),
    ):
        yield


def huggingface_weights(setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """The same weights under the names of `transformers`."""
    model, architecture = _model(setting)
    with torch.device("meta"):
        params = dict(build_model(model).canonical_parameters())
    found: dict[str, Tensor] = {}
    for each in architecture.parameters(model):
        found |= each.to_hf(draw(each.ours, params[each.ours], SEED, device))
    return found


def huggingface_config(setting: Setting) -> dict[str, Any]:
    """The content of their config.json."""
    model, architecture = _model(setting)
    return architecture.config(model)


def _model(setting: Setting) -> tuple[ModelConfig, Architecture]:
    model = _run(setting).config.model
    return model, architecture_of(model, setting.architecture)


def samples(setting: Setting) -> Sequence[Any]:
    """The trainer's samples for ``--mock-data``, each drawn when it is asked for."""
    from megatron.run.run import run_data

    train = run_data(_run(setting)).datasets.train
    assert train is not None
    return train  # type: ignore[return-value]


def _run(setting: Setting) -> Any:
    from megatron.run.run import parse_run

    return parse_run(None, flags_of(setting, 0), setting.family)
