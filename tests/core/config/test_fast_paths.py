"""Flags of the fast paths: what they give, and what is refused with which words."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3"
)
FP8 = "--bf16 --fp8-format hybrid"


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


def test_ranks_that_share_layers_choose_no_kernel_by_a_benchmark():
    flags = f"{MINIMAL} --torch-compile --torch-compile-mode max-autotune {TP2}"
    notes = resolve(FlagParser(*FLAG_CLASSES).settings(flags.split()), 2).notes
    assert any("no kernel is chosen by a benchmark" in note for note in notes)


TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
GRAPHS = "--torch-compile --torch-compile-mode reduce-overhead"
BUDGET = "--torch-compile --activation-memory-budget 0.5"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
REFUSED = [
    ("--fp8-format hybrid", "needs --bf16"),
    ("--deterministic-mode --torch-compile-mode max-autotune", "give one of the two"),
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
    ("--torch-compile off --torch-compile-mode max-autotune", "with --torch-compile on or auto"),
    ("--torch-compile off --activation-memory-budget 0.5", "with --torch-compile on or auto only"),
    ("--activation-memory-budget 0.5", "0.5, --hidden-dropout 0.1 .default., .*gradients wrong"),
    (f"{BUDGET}", "0.5, --hidden-dropout 0.1 .default., --attention-dropout 0.1 .*gradients wrong"),
    (f"{BUDGET} {NO_DROPOUT} --recompute-granularity full", "budget 0.5, .* full: .* a third time"),
    ("--torch-compile --activation-memory-budget 1.5", r"1.5 must be in \[0, 1\]"),
    (f"{GRAPHS} {PP2}", "overhead, --pipeline-model-par.* 2: .* keeps those of several"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        config(flags, 2 if TP2 in flags or PP2 in flags else 1)


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


def test_flags_of_compiled_blocks_are_accepted_with_auto():
    fast = config(f"--torch-compile-mode max-autotune --activation-memory-budget 1 {NO_DROPOUT}")
    assert fast.fast_paths.torch_compile == "auto"
    assert fast.fast_paths.torch_compile_mode == "max-autotune"
    assert fast.fast_paths.activation_memory_budget == 1


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        ("", "auto"),
        ("--torch-compile", "on"),
        ("--torch-compile --bf16", "on"),
        ("--torch-compile off", "off"),
    ],
)
def test_when_blocks_are_compiled(flags, meant):
    resolved = config(flags)
    assert resolved.fast_paths.torch_compile == meant
    assert RunConfig.from_dict(resolved.to_dict()) == resolved


@pytest.mark.parametrize(("saved", "meant"), [(True, "on"), (False, "off")])
def test_what_earlier_versions_saved_about_compiling_is_read(saved, meant):
    content = config("").to_dict()
    content["fast_paths"]["torch_compile"] = saved
    assert RunConfig.from_dict(content).fast_paths.torch_compile == meant


STATES = "--use-precision-aware-optimizer"


def test_dtypes_of_states():
    assert config("--bf16").precision.states is None
    assert config("--bf16 --exp-avg-dtype fp32").precision.states is None
    assert config(f"--bf16 {STATES}").precision.states == ("fp32", "fp32", "fp32")
    flags = "--main-params-dtype bf16 --exp-avg-dtype int8 --exp-avg-sq-dtype bf16"
    assert config(f"--bf16 {STATES} {flags}").precision.states == ("bf16", "int8", "bf16")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"--bf16 {STATES} --optimizer sgd", "of Adam, not of --optimizer sgd: leave it out"),
        ("--bf16 --exp-avg-dtype bf16", "--exp-avg-dtype bf16 has an effect with --use-precision"),
        (
            f"--bf16 {STATES} --save a --checkpoint-format deepspeed",
            "contradicts --checkpoint-format deepspeed: .* --save-universal",
        ),
        (STATES, "use --bf16 with --zero-stage 1 or 2"),
    ],
)
def test_refused_dtypes_of_states(flags, words):
    with pytest.raises(ConfigError, match=words):
        config(flags)


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("layout", ["--zero-stage 3", PP2])
def test_compiled_without_graphs_in_every_layout(mode, layout):
    flags = f"--torch-compile --torch-compile-mode {mode} {layout}"
    assert config(flags, 2 if layout == PP2 else 1).fast_paths.torch_compile_mode == mode


@pytest.mark.parametrize(
    ("given", "meant"), [("auto", "sdpa"), ("fused", "cudnn"), ("unfused", "eager")]
)
def test_megatrons_names_of_attention_kernels(given, meant):
    assert config(f"--attention-backend {given}").model.attention.attention_backend == meant
