"""Ranks that differ end with one error, which names them, the key and the values; before any
collective, and with nothing but the store at which they meet."""

import dataclasses
import os
import time
import typing
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron.config import FLAG_CLASSES, PART_FLAGS, FlagParser, RunConfig, Setting
from megatron.config.flags import flag_of, value_type
from megatron.config.run import LegacyFlags
from megatron.features.agreement import agreement
from megatron.features.agreement.agreement import Agreement
from megatron.features.agreement.facts import MAY_DIFFER, checkpoint_facts, run_facts
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.latent.flags import LatentConfig
from megatron.features.multi_token.flags import MultiTokenConfig
from megatron.features.optimizers.flags import OptimizersConfig
from megatron.features.recurrent.flags import DeltaConfig, MambaConfig
from megatron.parallel.meeting import DisagreementError
from megatron.run.run import run_of

TIMEOUT = timedelta(seconds=20)
FACTS = {"--lr": "0.001", "the code of megatron/model/mlp.py": "ab12"}
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 99 "
    "--mock-data --train-iters 3 --model-family gpt"
).split()


def refused(ranks, facts):
    """The error of a comparison, or None."""
    try:
        ranks.compare(facts)
    except DisagreementError as error:
        return str(error)
    return None


def own(ranks, *facts_of_ranks):
    return refused(ranks, facts_of_ranks[int(os.environ["RANK"])])


def comparisons(*rounds):
    ranks = Agreement(TIMEOUT)
    found = [own(ranks, *facts) for facts in rounds]
    assert not dist.is_initialized()
    return found


def test_ranks_that_agree_start_and_others_name_the_minority(pool):
    other, third = FACTS | {"--lr": "0.002"}, {"--lr": "0.001"}
    rounds = [
        (FACTS,) * 4,
        (FACTS, FACTS, FACTS, other),
        (other, FACTS, FACTS, FACTS),
        (FACTS, FACTS, other, third),
        (FACTS,) * 4,
    ]
    first, *rest = pool.run(4, comparisons, *rounds)
    assert rest == [first] * 3
    assert first[0] is first[4] is None
    assert "--lr is 0.002 on rank 3 and 0.001 on ranks 0, 1, 2;" in first[1]
    assert "--lr is 0.002 on rank 0 and 0.001 on ranks 1, 2, 3;" in first[2]
    assert "--lr is 0.002 on rank 2 and 0.001 on ranks 0, 1" in first[3]
    assert "mlp.py is missing on rank 3 and ab12 on ranks 0, 1" in first[3]
    assert not any("\n" in message for message in first if message)


def one_gives_up(which):
    ranks, rank = Agreement(TIMEOUT), int(os.environ["RANK"])
    ranks.compare(FACTS)
    if rank == which:
        ranks.give_up("--data-path books: no such file")
        return None, time.monotonic()
    time.sleep(0.2)
    began = time.monotonic()
    return refused(ranks, FACTS), began


@pytest.mark.parametrize("which", [0, 1])
def test_the_others_learn_why_a_rank_ends(pool, which):
    found, times = zip(*pool.run(3, one_gives_up, which), strict=True)
    message = f"rank {which}: --data-path books: no such file"
    assert list(found) == [None if rank == which else message for rank in range(3)]
    # With rank 0 the store ends, which the others have yet to read. One clock for all processes.
    assert which or times[0] > max(times[1:])


def wrong_number(name, values):
    os.environ[name] = values[int(os.environ["RANK"])]
    with mock.patch.object(agreement, "_PATIENCE", timedelta(seconds=0.5)):
        return refused(Agreement(timedelta(seconds=4.8)), FACTS)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("WORLD_SIZE", ("2", "3"), "WORLD_SIZE is 3 on rank 1 and 2 on rank 0"),
        ("WORLD_SIZE", ("3", "2"), "WORLD_SIZE is 2 on rank 1 and 3 on rank 0"),
        ("WORLD_SIZE", ("3", "3"), "waited 0.08 minutes (--distributed-timeout-minutes)"),
        ("RANK", ("0", "0"), "two processes have RANK=0"),
    ],
)
def test_processes_that_do_not_count_alike_are_refused(pool, name, values, message):
    assert all(message in found for found in pool.run(2, wrong_number, name, values))


def one_counts_otherwise():
    os.environ["WORLD_SIZE"] = ("2", "3")[int(os.environ["RANK"])]
    ranks = Agreement(TIMEOUT)
    if ranks._rank == 1:
        ranks.give_up("--global-batch-size 4 is not a multiple of 3")
        return None
    return refused(ranks, FACTS)


def test_a_rank_that_ends_since_it_counts_otherwise_is_told_by_that(pool):
    assert "WORLD_SIZE is 3 on rank 1 and 2 on rank 0" in pool.run(2, one_counts_otherwise)[0]


def started_again():
    """A start on the store of earlier ones, whose ranks have left keys and died anywhere."""
    rank = int(os.environ["RANK"])
    # Each node's agent counts the failures of its own processes.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
    first = Agreement(TIMEOUT)
    found = [refused(first, {"--lr": "0.1"})]
    if rank == 1:
        first._server.add("starts/callers", 1)  # ended before it had asked
        first._server.set(f"starts/caller/{first._server.add('starts/callers', 1)}", "gone")
    again = Agreement(TIMEOUT)
    found.append(refused(again, {"--lr": "0.2"}))
    store = agreement.connect(TIMEOUT)
    place = f"what {rank} says"
    found.append(store.check([place]))
    store.set(place, "something")
    store.wait(["what 0 says", "what 1 says"], TIMEOUT)
    return [*found, first._start._name, again._start._name]


def test_a_start_sees_nothing_of_earlier_ones_in_the_same_store(pool):
    first, second = pool.run(2, started_again)
    assert first == second and first[:3] == [None, None, False]
    assert first[3] != first[4]


def folder_of_weights(path, values):
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"lm_head.weight": torch.full((8,), values)}, path / "model.safetensors")
    return path


def test_teachers_references_and_adapters_are_compared(tmp_path):
    settings = FlagParser(*FLAG_CLASSES).settings(FLAGS)
    config, paths = run_of(dict(settings), 2).config, {"a": tmp_path / "a", "b": tmp_path / "b"}
    facts = {}
    for name, path in paths.items():
        path.mkdir()
        path = folder_of_weights(path / "model", {"a": 1.0, "b": 2.0}[name])
        parts = (
            ("checkpoint", {"load_adapter": str(path)}),
            ("distillation", {"load_teacher": str(path)}),
        )
        for part, fields in parts:
            parts = {name: config.part(name) for name in PART_FLAGS}
            parts[part] = dataclasses.replace(parts[part], **fields)
            found = checkpoint_facts([None], RunConfig.of(parts))
            (flag,) = found.keys() - {"the checkpoint to load", f"the content of {path}"}
            facts[name, flag] = found[flag], found[f"the content of {path}"]
    flags = {flag for _, flag in facts}
    assert flags == {f"the checkpoint of --load-{name}" for name in ("adapter", "teacher")}
    assert all(facts["a", flag][1] != facts["b", flag][1] for flag in flags)


def changed(field, hint, value):
    """Another value of a field than the one that it has."""
    if isinstance(value, tuple) or isinstance(field.default, tuple):
        return (*(value or ()), value_type(hint)("7"))
    choices = [choice for choice in field.metadata["choices"] or () if choice != value]
    kind = value_type(hint)
    if choices:
        return choices[0]
    if kind is bool:
        return not value
    if kind in (int, float):
        return (value or 0) + (1 if kind is int else 0.125)
    return f"{value or 'a'}-b"


def each_field(names):
    """What rank 0 is told when rank 1 is started with another value of a field, by field."""
    settings = FlagParser(*FLAG_CLASSES).settings(FLAGS)
    base, rank, found = run_of(dict(settings), 2), int(os.environ["RANK"]), {}
    ranks = Agreement(TIMEOUT)
    usual = run_facts(base.config, base.content)
    for cls in FLAG_CLASSES:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name not in names:
                continue
            if rank == 0:
                found[field.name] = flag_of(field), refused(ranks, usual)
                continue
            usually = base.resolved.values.get(field.name, field.default)
            value = changed(field, hints[field.name], usually)
            given = settings | {field.name: Setting(value, f"flag {flag_of(field)}")}
            try:
                run = run_of(given, 2)
            except Exception as error:  # what kind it may be, other tests say
                ranks.give_up(str(error))
                ranks._compared += 1
                continue
            refused(ranks, run_facts(run.config, run.content))
    return found


EVERY = [
    field.name
    for cls in FLAG_CLASSES
    if cls is not LegacyFlags
    for field in dataclasses.fields(cls)
    if not field.metadata.get("internal") and not field.metadata.get("note")
]
WITHOUT_EFFECT = {
    **dict.fromkeys(("node_ips", "ctrl_port"), "of the launcher, which has connected them"),
    "no_pipeline_parallel": "one stage is none",
    "add_qkv_bias": "there is one already",
    "rope_scaling_factor": "without RoPE",
    "eval_batch_size": "the value is the one of the micro batch",
    "epochs": "the length is given in steps",
    **dict.fromkeys(
        ("cp_comm_type", "hierarchical_context_parallel_sizes", "force_ds_sequence_parallel"),
        "sequences are whole",
    ),
    "enable_expert_tensor_parallelism": "the model has no experts",
    "lr_warmup_fraction": "an eighth of three steps is none",
    **{
        field.name: "the model has no experts"
        for field in dataclasses.fields(ExpertsConfig)
        if field.name != "num_experts"
    },
    **{
        field.name: "the model has no such layers"
        for part in (DeltaConfig, LatentConfig, MambaConfig, MultiTokenConfig)
        for field in dataclasses.fields(part)
        if field.name not in ("multi_latent_attention", "mtp_num_layers")
    },
    **{
        field.name: "the optimizer is AdamW"
        for field in dataclasses.fields(OptimizersConfig)
        if field.name not in ("cautious_weight_decay", "weight_decay_follows_lr")
    },
}
"""Flags that change nothing in this run, with the reason."""
OF_THE_SAME_MEANING = {
    "use_rotary_position_embeddings": "--position-embedding-type",
    "no_position_embedding": "--position-embedding-type",
    "recompute_activations": "--recompute-granularity",
    "checkpoint_activations": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-granularity",
    "ds_sequence_parallel_size": "--context-parallel-size",
}
"""Other names of a flag, under which the error shows it."""


@pytest.mark.parametrize(
    "names", [EVERY[5::25], pytest.param(EVERY, marks=pytest.mark.proof)], ids=["some", "all"]
)
def test_a_rank_with_another_flag_is_refused(pool, names):
    found = pool.run(2, each_field, names, timeout=600)[0]
    silent = {name for name, (_, message) in found.items() if message is None}
    assert silent <= MAY_DIFFER | WITHOUT_EFFECT.keys()
    for name, (flag, message) in found.items():
        shown = OF_THE_SAME_MEANING.get(name, flag)
        assert name in silent or shown in message or "rank 1: " in message, (name, message)
