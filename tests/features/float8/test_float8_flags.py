"""Flags of 8-bit products: what they give, and what is refused with which words."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3"
)
FP8, TP2 = "--bf16 --fp8-format hybrid", "--tensor-model-parallel-size 2"


def config(extra: str, world_size: int = 1) -> RunConfig:
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {extra}".split())
    return resolve(settings, world_size).config


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [
        ("", range(0)),
        (FP8, range(4)),
        (f"{FP8} --first-last-layers-bf16", range(1, 3)),
        (f"{FP8} --first-last-layers-bf16 --num-layers-at-start-in-bf16 2", range(2, 3)),
        (f"{FP8} --first-last-layers-bf16 --num-layers-at-end-in-bf16 0", range(1, 4)),
    ],
)
def test_blocks_in_8_bits(flags, blocks):
    assert config(flags).fast_paths.float8_blocks(4) == blocks


REFUSED = [
    ("--fp8-format hybrid", "needs --bf16"),
    ("--fp8-format e4m3 --fp16 --zero-stage 1", "needs --bf16"),
    (f"{FP8} --fp8-recipe mxfp8", "one of tensorwise, rowwise, delayed, blockwise; .* Blackwell"),
    (f"{FP8} --fp8-recipe custom", "one of tensorwise, rowwise, delayed, blockwise$"),
    (
        f"{FP8} --fp8-recipe blockwise",
        "^--fp8-format hybrid --fp8-recipe blockwise needs .* 128",
    ),
    (f"{FP8} --fp8-amax-history-len 0", "history-len 0"),
    (f"{FP8} --fp8-margin -1", r"--fp8-margin -1 must be in \[0, 16\]: E4M3 has 18 powers"),
    (f"{FP8} --fp8-recipe delayed --fp8-margin 17", "--fp8-margin 17 must be in"),
    ("--first-last-layers-bf16", "with --fp8-format only"),
    (f"{FP8} --num-layers-at-end-in-bf16 1", "with --first-last-layers-bf16 only"),
    (f"{FP8} --first-last-layers-bf16 --num-layers-at-start-in-bf16 3", "leave none of"),
    (f"{FP8} --hidden-size 72 --kv-channels 16", "--hidden-size 72 is 72"),
    (f"{FP8} --ffn-hidden-size 100", "multiples of 16: --ffn-hidden-size 100 is 100"),
    (f"{FP8} --kv-channels 6", "--num-attention-heads 4 x --kv-channels 6 is 24"),
    (f"{FP8} {TP2} --ffn-hidden-size 48", "--ffn-hidden-size 48 / --tensor-model-par.* 2 is 24"),
    (f"{FP8} --micro-batch-size 3 --seq-length 24", "--micro-batch-size 3 x --seq-length 24 is 72"),
    (
        f"{FP8} --context-parallel-size 4 --micro-batch-size 1 --seq-length 32",
        "--micro-batch-size 1 x --seq-length 32 / --context-parallel-size 4 is 8",
    ),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        config(flags, 2 if TP2 in flags else 4 if "--context" in flags else 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fp8-amax-history-len 1024", "1024: not used without --fp8-format"),
        (
            "--fp8-recipe delayed --fp8-margin 1",
            "--fp8-recipe delayed, --fp8-margin 1: not used w",
        ),
        (f"{FP8} --fp8-margin 1", "--fp8-margin 1: not used with --fp8-recipe tensorwise"),
        (f"{FP8} --fp8-recipe rowwise", None),
        (f"{FP8} --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-margin 16", None),
    ],
)
def test_flags_of_8_bits_that_are_not_used(flags, words):
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} --bf16 {flags}".split())
    notes = [note for note in resolve(settings, 1).notes if "fp8" in note]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]
