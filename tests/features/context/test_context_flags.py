"""Flags that divide sequences over ranks: what they mean together, and what is refused."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.engine.deepspeed_file import read_json
from megatron.engine.deepspeed_json import complete, for_engine, merge

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 10 --lr 1e-3"
).split()
TWO_LEVELS = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"
PARSER = FlagParser(*FLAG_CLASSES)


def resolved(flags, processes=8, content=None):
    settings = PARSER.settings([*MODEL, *flags.split()])
    if content is not None:
        settings = merge(settings, content, "ds.json", processes)
    return resolve(settings, processes)


@pytest.mark.parametrize(
    "flags, size, kinds, levels, data",
    [
        ("", 1, (), (), 8),
        ("--context-parallel-size 2", 2, ("p2p",), (), 4),
        ("--context-parallel-size 4 --cp-comm-type all_gather", 4, ("allgather",), (), 2),
        ("--context-parallel-size 2 --tensor-model-parallel-size 2", 2, ("p2p",), (), 2),
        ("--ds-sequence-parallel-size 4", 4, ("a2a",), (), 2),
        ("--ds-sequence-parallel-size 4 --context-parallel-size 4", 4, ("a2a",), (), 2),
        ("--ds-sequence-parallel-size 2 --cp-comm-type allgather", 2, ("allgather",), (), 4),
        ("--context-parallel-size 2 --force-ds-sequence-parallel", 2, ("a2a",), (), 4),
        (f"--context-parallel-size 8 {TWO_LEVELS} 4 2", 8, ("a2a+p2p",), (4, 2), 1),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a p2p p2p", 2,
         ("p2p", "a2a", "p2p", "p2p"), (), 4),
        ("--context-parallel-size 2 --cp-comm-type a2a a2a a2a a2a", 2, ("a2a",), (), 4),
    ],
)  # fmt: skip
def test_means(flags, size, kinds, levels, data):
    parallel = resolved(flags).config.parallel
    found = parallel.context_parallel_size, parallel.cp_comm_type
    assert found == (size, kinds)
    assert parallel.hierarchical_context_parallel_sizes == levels
    assert parallel.data_parallel_size == data


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--context-parallel-size 3", "x --context-parallel-size 3 must divide the number of"),
        ("--context-parallel-size 4 --ds-sequence-parallel-size 2",
         "--context-parallel-size 4 contradicts --ds-sequence-parallel-size 2"),
        ("--context-parallel-size 8 --seq-length 40",
         "--seq-length 40 must be a multiple of 16: .*; the nearest is 32"),
        ("--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel "
         "--seq-length 24", "a multiple of 16: .*in 4 slices of --sequence-parallel"),
        ("--context-parallel-size 2 --cp-comm-type a2a --tensor-model-parallel-size 4 "
         "--num-attention-heads 4 --num-query-groups 4",
         r"a2a: 2 ranks exchange heads, and must divide the 1 query heads .*use p2p or allgather"),
        (f"--context-parallel-size 8 {TWO_LEVELS} 8 1 --num-attention-heads 4",
         r"a2a\+p2p: 8 ranks exchange heads, and must divide the 4 query heads"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p",
         "two numbers with the product 4 .*, such as 2 2"),
        (f"--context-parallel-size 4 {TWO_LEVELS} 4 2",
         "two numbers with the product 4 .*, and is 4 2"),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a",
         "--cp-comm-type p2p a2a has 2 values; give one, or one for each of the 4 blocks"),
        ("--context-parallel-size 2 --cp-comm-type p2p --force-ds-sequence-parallel",
         "--force-ds-sequence-parallel contradicts --cp-comm-type p2p"),
        ("--context-parallel-size 0", "--context-parallel-size 0 must be positive"),
    ],
)  # fmt: skip
def test_refuses(flags, told):
    with pytest.raises(ConfigError, match=told):
        resolved(flags)


@pytest.mark.parametrize(
    "flags", ["--cp-comm-type p2p", "--force-ds-sequence-parallel", f"{TWO_LEVELS} 2 2"]
)
def test_notes_say_what_changes_nothing(flags):
    run = resolved(f"{flags} --context-parallel-size 1")
    assert run.config.parallel == resolved("").config.parallel
    assert run.notes and all("changes nothing" in note for note in run.notes)


def test_key_of_the_json_is_the_flag():
    content = {"sequence_parallel_size": 4, "gradient_accumulation_steps": 4}
    run = resolved("", content=content)
    parallel = run.config.parallel
    assert (parallel.context_parallel_size, parallel.cp_comm_type) == (4, ("a2a",))
    completed = complete(content, run.config)
    assert "sequence_parallel_size" not in completed
    settings = for_engine(completed, run.config, on_cpu=True)
    # Two replicas have samples, four times two a step; for DeepSpeed all eight ranks have.
    assert (completed["train_batch_size"], settings["train_batch_size"]) == (16, 16 * 4)
    assert settings["gradient_accumulation_steps"] == 4
    with pytest.raises(ConfigError, match="--ds-sequence-parallel-size 2 contradicts sequence_par"):
        resolved("--ds-sequence-parallel-size 2", content=content)
    with pytest.raises(ConfigError, match="--context-parallel-size 2 contradicts .*ds.json"):
        resolved("--context-parallel-size 2", content={"sequence_parallel_size": 4})


def test_file_with_the_key_is_read(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"sequence_parallel_size": 2}')
    assert read_json(str(path)) == {"sequence_parallel_size": 2}


def test_lengths_are_divided_twice_by_each_rank_and_by_slices():
    flags = "--context-parallel-size 2 --tensor-model-parallel-size 2"
    assert resolved("").config.parallel.length_divisor == 1
    assert resolved(flags).config.parallel.length_divisor == 4
    assert resolved(f"{flags} --sequence-parallel").config.parallel.length_divisor == 8
