"""Stage 3 fetches a block's parameters at once, and leaves its compiled graph whole."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from deepspeed.runtime.zero.partition_parameters import Init
from training_jobs import TINY

from megatron.engine import deepspeed_patches
from megatron.engine.environment import distributed
from megatron.engine.state import owned_slices
from megatron.parity.runs import RunRecord, watched_trainer
from megatron.training.run import parse_run

BLOCKS = 4
FLAGS = [*TINY, "--num-layers", str(BLOCKS), "--train-iters", "3", "--lr-decay-style", "constant"]
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
).split()


def flags(tmp_path, *more: str, **zero: Any) -> list[str]:
    """Flags of a run in which no parameter stays gathered, however small."""
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **zero}
    path.write_text(json.dumps({"zero_optimization": zero}))
    return [*FLAGS, "--deepspeed_config", str(path), *more]


@contextlib.contextmanager
def fetches() -> Iterator[list[int]]:
    """The number of parameters in each gathering of several."""
    found: list[int] = []
    original = Init._convert_to_deepspeed_param

    def converted(self: Init, param: Any, *args: Any) -> None:
        original(self, param, *args)
        gather = param.all_gather_coalesced

        def noted(params: Any, *args: Any, **options: Any) -> Any:
            params = list(params)
            found.append(len(params))
            return gather(params, *args, **options)

        param.all_gather_coalesced = noted

    with mock.patch.object(Init, "_convert_to_deepspeed_param", converted):
        yield found


def train(argv: list[str], whole: bool, frozen: str = "") -> dict[str, Any]:
    """Trains; for the pool. ``whole``: with blocks fetched at once; ``frozen``: what does not
    train, by a part of its name."""
    others = functools.partial(_made_but, deepspeed_patches.made)
    replaced = mock.patch.object(deepspeed_patches, "made", others)
    run, record = parse_run(None, argv), RunRecord()
    with contextlib.ExitStack() as stack:
        if not whole:
            stack.enter_context(replaced)
        found = stack.enter_context(fetches())
        mesh = stack.enter_context(distributed(run.config.parallel))
        trainer = watched_trainer(run, mesh, record.add)
        trainer.fit()
        state = {}
        for own in owned_slices(trainer.engine):
            for kind, values in {"weight": own.weight, **own.moments}.items():
                state[f"{own.name}/{kind}/{own.slice.start}"] = values.detach().numpy().copy()
        return {"record": record, "state": state, "fetches": Counter(found)}


def _made_but(made: Any, replacement: deepspeed_patches.Replacement) -> bool:
    return replacement is not deepspeed_patches.WHOLE_BLOCKS and made(replacement)


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a["record"].losses == b["record"].losses
        assert a["record"].norms == b["record"].norms
        assert a["state"].keys() == b["state"].keys()
        for name, values in b["state"].items():
            np.testing.assert_array_equal(a["state"][name], values, err_msg=name)


@pytest.mark.parametrize("more", [["--bf16"], LLAMA], ids=["gpt2-bf16", "llama-fp32"])
def test_same_bits_with_fewer_fetches(pool, tmp_path, more):
    argv = flags(tmp_path, *more)
    found, expected = (pool.run(2, train, argv, whole) for whole in (True, False))
    check_same(found, expected)
    print(found[0]["fetches"], expected[0]["fetches"])
    assert sum(found[0]["fetches"].values()) < sum(expected[0]["fetches"].values()) / 3
