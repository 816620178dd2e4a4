"""Flags of the fast paths: what they give, and what is refused with which words."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3"
)


def config(extra: str, world_size: int = 1) -> RunConfig:
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {extra}".split())
    return resolve(settings, world_size).config


def test_ranks_that_share_layers_choose_no_kernel_by_a_benchmark():
    flags = f"{MINIMAL} --torch-compile --torch-compile-mode max-autotune {TP2}"
    notes = resolve(FlagParser(*FLAG_CLASSES).settings(flags.split()), 2).notes
    assert any("no kernel is chosen by a benchmark" in note for note in notes)


TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
GRAPHS = "--torch-compile --torch-compile-mode reduce-overhead"
BUDGET = "--torch-compile --activation-memory-budget 0.5"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
REFUSED = [
    ("--deterministic-mode --torch-compile-mode max-autotune", "give one of the two"),
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
