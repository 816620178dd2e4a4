"""Resolving a configuration: what is derived, what is refused, what is explained."""

import dataclasses
import json
import operator
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.apps.profiling.flags import ProfilingConfig
from megatron.config import (
    FLAG_CLASSES,
    ConfigError,
    FlagParser,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    Setting,
    TrainingConfig,
    explain,
    resolve,
)

OLD = Path(__file__).parents[2] / "golden" / "config_of_0.1.json"
"""Flags, and what a version that saved all of them made of them."""
MINIMAL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3"
)


def resolved(extra="", world_size=1, base=MINIMAL, **from_json):
    """MINIMAL with further flags; a flag that is given again replaces the first."""
    settings = FlagParser(*FLAG_CLASSES).settings(f"{base} {extra}".split())
    settings |= {name: Setting(value, f"ds.json: {name}") for name, value in from_json.items()}
    return resolve(settings, world_size)


def without(flag):
    words = MINIMAL.split()
    at = words.index(flag)
    return " ".join(words[:at] + words[at + 2 :])


PIPELINE = "--num-layers 8 --pipeline-model-parallel-size 2 --global-batch-size 8"
CHUNKS, BLOCKS = (
    "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage",
)  # fmt: skip

ROPE = "--position-embedding-type rope"
LLAMA3 = (
    '{{"rope_type": "llama3", "factor": {}, "original_max_position_embeddings": 8192, '
    '"low_freq_factor": 1.0, "high_freq_factor": 4.0}}'
)

DERIVED = [
    ("", 1, "model.mlp.ffn_hidden_size", 256),
    ("--swiglu", 1, "model.mlp.ffn_hidden_size", 128),
    ("--swiglu --hidden-size 768", 1, "model.mlp.ffn_hidden_size", 2048),
    ("--swiglu --hidden-size 16", 1, "model.mlp.ffn_hidden_size", 16),
    ("--swiglu --ffn-hidden-size 100", 1, "model.mlp.ffn_hidden_size", 100),
    ("", 1, "model.attention.kv_channels", 16),
    ("--kv-channels 24", 1, "model.attention.kv_channels", 24),
    ("--hidden-size 66 --kv-channels 24", 1, "model.attention.kv_channels", 24),
    ("", 1, "model.attention.num_query_groups", 4),
    ("", 1, "values.group_query_attention", False),
    ("--group-query-attention", 1, "model.attention.num_query_groups", 1),
    ("--num-query-groups 2", 1, "values.group_query_attention", True),
    ("--num-key-value-heads 2", 1, "model.attention.num_query_groups", 2),
    ("", 1, "model.positions.max_position_embeddings", 32),
    ("--max-position-embeddings 64", 1, "model.positions.max_position_embeddings", 64),
    ("--use-rotary-position-embeddings", 1, "model.positions.position_embedding_type", "rope"),
    ("", 1, "model.mlp.activation", "gelu_tanh"),
    ("--no-bias-gelu-fusion", 1, "model.mlp.activation", "gelu_erf"),
    ("--no-bias-gelu-fusion --openai-gelu", 1, "model.mlp.activation", "gelu_tanh"),
    ("--squared-relu", 1, "model.mlp.activation", "squared_relu"),
    ("--swiglu", 1, "model.mlp.activation", "swiglu"),
    ("--swiglu", 1, "values.glu_activation", "swiglu"),
    ("--glu-activation swiglu", 1, "values.swiglu", True),
    ("--glu-activation geglu", 1, "model.mlp.activation", "geglu"),
    ("--glu-activation geglu", 1, "model.mlp.ffn_hidden_size", 128),
    ("--glu-activation geglu", 1, "values.swiglu", False),
    ("--quick-geglu", 1, "values.glu_activation", "quick_geglu"),
    ("--glu-activation quick_geglu", 1, "values.quick_geglu", True),
    ("--swiglu --glu-linear-offset 1", 1, "model.mlp.glu_linear_offset", 1.0),
    ("--softmax-type learnable", 1, "model.attention.softmax_type", "learnable"),
    ("--relu", 1, "model.mlp.activation", "relu"),
    ("--relu", 1, "model.mlp.ffn_hidden_size", 256),
    ("--sliding-window 8 --window-attn-skip-freq 2", 1, "model.windows", (8, None)),
    ("--sliding-window 8", 1, "model.windows", (8, 8)),
    ("--sliding-window 8 --window-attn-skip-freq [0,1]", 1, "model.windows", (None, 8)),
    ("--sliding-window 8 --window-attn-skip-freq [1]+[0]", 1, "values.window_attn_skip_freq", 2),
    ("--attention-chunk-size 8 --window-attn-skip-freq 2", 1, "model.windows", ((8,), None)),
    (f"{ROPE} --no-rope-freq [0,1]", 1, "values.no_rope_freq", 2),
    (f"{ROPE} --no-rope-freq ([1]+[0])", 1, "model.positions.no_rope_freq", "([1]*1+[0]*1)"),
    (f"{ROPE} --use-rope-scaling", 1, "values.rope_scaling", LLAMA3.format("8.0")),
    (
        f"{ROPE} --use-rope-scaling --rope-scaling-factor 4",
        1,
        "values.rope_scaling",
        LLAMA3.format("4.0"),
    ),
    ("", 1, "model.embedding.tied", True),
    ("--untie-embeddings-and-output-weights", 1, "model.embedding.tied", False),
    ("", 4, "training.global_batch_size", 8),
    ("--tensor-model-parallel-size 2", 4, "training.global_batch_size", 4),
    ("--tensor-model-parallel-size 2", 8, "parallel.data_parallel_size", 4),
    ("--pipeline-model-parallel-size 2", 8, "parallel.data_parallel_size", 4),
    ("", 8, "parallel.world_size", 8),
    ("", 1, "parallel.pipeline_schedule", "1f1b"),
    ("", 1, "parallel.num_virtual_stages_per_pipeline_rank", 1),
    ("--pipeline-model-parallel-size 2", 2, "parallel.pipeline_schedule", "1f1b"),
    ("--pipeline-model-parallel-size 2", 2, "parallel.stages", 2),
    (f"{PIPELINE} --pipeline-schedule interleaved", 2, "parallel.stages", 4),
    (f"{PIPELINE} --pipeline-schedule dualpipev", 2, "parallel.stages", 4),
    (f"{PIPELINE} --pipeline-schedule zbh1", 2, "parallel.stages", 2),
    (f"{PIPELINE} --pipeline-schedule dualpipev_zb", 2, "parallel.stages", 4),
    (f"{PIPELINE} --enable-zbh1-pipeline", 2, "parallel.pipeline_schedule", "zbh1"),
    (f"{PIPELINE} {CHUNKS} 4", 2, "parallel.pipeline_schedule", "interleaved"),
    (f"{PIPELINE} {CHUNKS} 2 --pipeline-schedule dualpipev", 2, "parallel.stages", 4),
    (f"{PIPELINE} {BLOCKS} 1", 2, "parallel.pipeline_schedule", "interleaved"),
    (f"{PIPELINE} {BLOCKS} 1", 2, "parallel.num_virtual_stages_per_pipeline_rank", 4),
    (f"{PIPELINE} {BLOCKS} 2 {CHUNKS} 2", 2, "parallel.stages", 4),
    (f"{PIPELINE} --pipeline-partition 5,3", 2, "parallel.pipeline_partition", "5,3"),
    ("--checkpoint-activations", 1, "parallel.recompute_granularity", "full"),
    ("--recompute-activations", 1, "parallel.recompute_granularity", "selective"),
    ("--recompute-granularity full", 1, "parallel.recompute_method", "uniform"),
    ("", 1, "optimizer.lr_decay_iters", 100),
    ("--lr-decay-iters 50", 1, "optimizer.lr_decay_iters", 50),
    ("--lr-warmup-fraction 0.1", 1, "optimizer.lr_warmup_iters", 10),
    ("--lr-warmup-fraction 0.1 --lr-decay-iters 50", 1, "optimizer.lr_warmup_iters", 5),
    ("--weight-decay 0.3", 1, "optimizer.start_weight_decay", 0.3),
    ("--weight-decay 0.3", 1, "optimizer.end_weight_decay", 0.3),
    ("--save runs/x/", 1, "logging.metrics_file", "runs/x/metrics.jsonl"),
    ("--save runs/x --metrics-file m.jsonl", 1, "logging.metrics_file", "m.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize("flags, world_size, where, expected", DERIVED)
def test_derives(flags, world_size, where, expected):
    result = resolved(flags, world_size)
    name = where.removeprefix("values.")
    found = result.values[name] if name != where else operator.attrgetter(where)(result.config)
    assert found == expected


@pytest.mark.parametrize(
    "length, unit, amount",
    [("--train-samples 500", "samples", 50), ("--train-tokens 900", "tokens", 90)],
)
def test_schedule_follows_the_unit_of_the_length(length, unit, amount):
    config = resolved(f"{length} --lr-warmup-fraction 0.1", base=without("--train-iters")).config
    assert getattr(config.optimizer, f"lr_warmup_{unit}") == amount
    assert getattr(config.optimizer, f"lr_decay_{unit}") == 10 * amount


def test_evaluation_alone_needs_no_length_or_rate():
    resolved("--skip-train", base=without("--train-iters").replace("--lr 1e-3", ""))


REFUSED = [
    ("--num-attention-heads 5", 1, ["--num-attention-heads 5", "--hidden-size 64"]),
    ("--num-query-groups 3", 1, ["--num-query-groups 3", "--num-attention-heads 4"]),
    ("--swiglu --squared-relu", 1, ["--swiglu", "--squared-relu"]),
    ("--swiglu --glu-activation geglu", 1, ["--swiglu", "--glu-activation geglu"]),
    ("--swiglu --quick-geglu", 1, ["--quick-geglu contradicts --glu-activation swiglu"]),
    ("--glu-linear-offset 1", 1, ["--glu-linear-offset 1.0 needs --glu-activation or --swiglu"]),
    (
        "--relu --activation-func-clamp-value 7",
        1,
        ["--activation-func-clamp-value 7.0 has an effect with --glu-activation or --swiglu or"],
    ),
    ("--swiglu --activation-func-clamp-value 0", 1, ["--activation-func-clamp-value 0", "posit"]),
    ("--glu-activation geglu --relu", 1, ["--glu-activation geglu", "--relu"]),
    ("--relu --squared-relu", 1, ["--relu", "--squared-relu", "one activation"]),
    ("--shared-parallel-norm", 1, ["--shared-parallel-norm", "--parallel-residual"]),
    ("--no-pre-norm", 1, ["--no-pre-norm needs --post-norm"]),
    (
        "--no-pre-norm --post-norm --fp32-residual-connection --bf16",
        1,
        ["--no-pre-norm contradicts --fp32-residual-connection"],
    ),
    ("--qk-layernorm --qk-layernorm-whole", 1, ["--normalization RMSNorm, not LayerNorm"]),
    ("--qk-layernorm-whole", 1, ["--qk-layernorm-whole", "--qk-layernorm"]),
    (
        "--embedding-multiplier 2 --scale-embeddings",
        1,
        ["--embedding-multiplier 2.0", "contradicts --scale-embeddings"],
    ),
    ("--add-attention-bias", 1, ["--add-attention-bias needs --disable-bias-linear"]),
    (
        "--disable-bias-linear --add-attention-bias --add-qkv-bias",
        1,
        ["--add-attention-bias and --add-qkv-bias", "give one"],
    ),
    ("--sliding-window 0", 1, ["--sliding-window 0", "positive"]),
    ("--window-attn-skip-freq 2", 1, ["--window-attn-skip-freq 2", "--sliding-window"]),
    ("--sliding-window 8 --window-attn-skip-freq 0", 1, ["--window-attn-skip-freq 0"]),
    ("--sliding-window 8 --window-attn-skip-freq [1]*3", 1, ["has 3 values", "of the 2 layers"]),
    ("--sliding-window 8 --window-attn-skip-freq two", 1, ["--window-attn-skip-freq two", "list"]),
    (
        "--sliding-window 8 --attention-chunk-size 8",
        1,
        ["--sliding-window 8", "contradicts --attention-chunk-size 8", "give one"],
    ),
    (f"{ROPE} --no-rope-freq 0", 1, ["--no-rope-freq 0", "positive"]),
    ("--no-rope-freq 2", 1, ["--no-rope-freq 2", "--position-embedding-type rope"]),
    ("--rotary-interleaved", 1, ["--rotary-interleaved", "--position-embedding-type rope"]),
    (f"{ROPE} --qk-l2-norm --qk-layernorm", 1, ["--qk-l2-norm contradicts --qk-layernorm"]),
    (f"{ROPE} --attention-temperature 1", 1, ["--attention-temperature 1.0", "--no-rope-freq"]),
    ("--attention-temperature-floor 9", 1, ["--attention-temperature only"]),
    ("--attn-logit-softcapping 0", 1, ["--attn-logit-softcapping 0.0", "positive"]),
    ("--final-logit-softcapping -1", 1, ["--final-logit-softcapping -1.0", "positive"]),
    ("--query-pre-attn-scalar 0", 1, ["--query-pre-attn-scalar 0.0", "positive"]),
    ("--position-embedding-offset -1", 1, ["--position-embedding-offset -1", "negative"]),
    (
        f"{ROPE} --position-embedding-offset 2",
        1,
        ["--position-embedding-offset 2", "learned_absolute", "it is rope"],
    ),
    ("--use-rope-scaling", 1, ["--use-rope-scaling", "rope; it is learned_absolute"]),
    (f"{ROPE} --use-rope-scaling --rope-scaling-factor 0", 1, ["--rope-scaling-factor 0.0"]),
    (
        f"{ROPE} --rotary-base-local 100",
        1,
        ["--rotary-base-local 100.0", "--sliding-window"],
    ),
    (f"{ROPE} --rope-scaling {{}}", 1, ["rope_type is None", "linear, dynamic, llama3, yarn"]),
    (f"{ROPE} --rope-scaling linear", 1, ["--rope-scaling linear", "not valid JSON"]),
    (
        "--use-rotary-position-embeddings --position-embedding-type learned_absolute",
        1,
        ["--use-rotary-position-embeddings", "--position-embedding-type learned_absolute"],
    ),
    ("--max-position-embeddings 16", 1, ["--seq-length 32", "--max-position-embeddings 16"]),
    ("--rotary-percent 0", 1, ["--rotary-percent 0.0"]),
    (
        "--position-embedding-type rope --rotary-percent 0.45",
        1,
        ["--rotary-percent 0.45", "--kv-channels 16", "7"],
    ),
    ("--attention-dropout 1", 1, ["--attention-dropout 1.0", "[0, 1)"]),
    ("--hidden-dropout -0.1", 1, ["--hidden-dropout -0.1", "[0, 1)"]),
    ("--num-layers 0", 1, ["--num-layers 0", "from 1"]),
    ("--norm-epsilon 0", 1, ["--norm-epsilon 0.0", "positive"]),
    ("--init-method-std -1", 1, ["--init-method-std -1.0", "positive"]),
    (
        "--no-pipeline-parallel --pipeline-model-parallel-size 2",
        2,
        ["--no-pipeline-parallel", "--pipeline-model-parallel-size 2"],
    ),
    (
        "--tensor-model-parallel-size 2",
        3,
        ["--tensor-model-parallel-size 2", "number of processes, 3"],
    ),
    ("--tensor-model-parallel-size 8", 8, ["--tensor-model-parallel-size 8", "--num-attention"]),
    (
        "--tensor-model-parallel-size 4 --ffn-hidden-size 30",
        4,
        ["--tensor-model-parallel-size 4", "--ffn-hidden-size 30"],
    ),
    (
        "--tensor-model-parallel-size 4 --num-attention-heads 12 --kv-channels 8 "
        "--num-query-groups 6",
        4,
        ["--num-query-groups 6", "--tensor-model-parallel-size 4", "a multiple of the other"],
    ),
    (
        "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31",
        2,
        ["--tensor-model-parallel-size 2", "--seq-length 31"],
    ),
    (
        "--num-layers 12 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 4",
        2,
        ["--num-layers-per-virtual-pipeline-stage 4", "--num-layers 12", "possible: 1, 2, 3"],
    ),
    (
        "--num-layers 12 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 6",
        2,
        ["--num-layers-per-virtual-pipeline-stage 6", "two or more stages", "possible: 1, 2, 3"],
    ),
    (
        "--num-layers 13 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        2,
        ["--num-layers 13", "no number does that", "--pipeline-partition"],
    ),
    (
        "--num-layers 8 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 2 --pipeline-schedule 1f1b",
        2,
        ["--num-layers-per-virtual-pipeline-stage 2", "--pipeline-schedule 1f1b"],
    ),
    (
        "--num-layers 8 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 4",
        2,
        [
            "--num-layers-per-virtual-pipeline-stage 2, which makes it 2",
            "--num-virtual-stages-per-pipeline-rank 4",
        ],
    ),
    (
        "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2",
        1,
        [
            "--num-layers-per-virtual-pipeline-stage 2, --pipeline-model-parallel-size 1 (default):"
            " a pipeline needs two or more",
        ],
    ),
    (
        "--num-virtual-stages-per-pipeline-rank 0",
        1,
        ["--num-virtual-stages-per-pipeline-rank 0", "positive"],
    ),
    ("--pipeline-model-parallel-size 4", 4, ["--num-layers 2", "4 stages"]),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        2,
        ["--num-layers 2", "4 stages"],
    ),
    ("--pipeline-partition layers", 1, ["--pipeline-partition layers", "parameters", "3,4,4,3"]),
    (
        "--num-layers 3 --pipeline-model-parallel-size 2 --pipeline-partition 3,0",
        2,
        ["--pipeline-partition 3,0", "blocks of each stage"],
    ),
    (
        "--num-layers 3 --pipeline-model-parallel-size 2 --pipeline-partition 1,1,1",
        2,
        ["--pipeline-partition 1,1,1", "3 stages of 3 blocks", "2 stages and the model 3"],
    ),
    (
        "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-partition 1,2",
        2,
        ["--pipeline-partition 1,2", "3 blocks", "the model 4"],
    ),
    (
        "--num-layers 8 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 2 --pipeline-partition 1,3,2,2",
        2,
        ["--pipeline-partition 1,3,2,2", "--num-layers-per-virtual-pipeline-stage 2"],
    ),
    ("--distributed-timeout-minutes 0", 1, ["--distributed-timeout-minutes 0.0"]),
    ("--fp16 --bf16 --zero-stage 1", 1, ["--fp16", "--bf16"]),
    ("--loss-scale 128", 1, ["--loss-scale 128", "--fp16"]),
    ("--fp16 --zero-stage 1 --initial-loss-scale 3", 1, ["--initial-loss-scale 3.0", "power"]),
    ("--fp16 --zero-stage 1 --initial-loss-scale 0.5", 1, ["--initial-loss-scale 0.5"]),
    ("--hysteresis 0", 1, ["--hysteresis 0"]),
    (
        "--checkpoint-activations --recompute-granularity selective",
        1,
        ["--checkpoint-activations", "--recompute-granularity selective"],
    ),
    (
        "--recompute-activations --recompute-granularity full",
        1,
        ["--recompute-activations", "--recompute-granularity full"],
    ),
    ("--recompute-method block", 1, ["--recompute-method block", "--recompute-granularity full"]),
    (
        "--recompute-activations --recompute-num-layers 2",
        1,
        ["--recompute-num-layers 2", "--recompute-granularity full"],
    ),
    ("--recompute-granularity full --recompute-num-layers 0", 1, ["--recompute-num-layers 0"]),
    (
        "--global-batch-size 10",
        2,
        ["--global-batch-size 10", "--micro-batch-size 2", "2 data-parallel", "8 and 12"],
    ),
    ("--global-batch-size 2", 2, ["--global-batch-size 2", "the nearest is 4"]),
    ("--micro-batch-size 0", 1, ["--micro-batch-size 0"]),
    ("--lr 0", 1, ["--lr 0.0"]),
    ("--train-samples 5", 1, ["--train-iters 100", "--train-samples 5"]),
    ("--train-iters 0", 1, ["--train-iters 0"]),
    ("--eval-interval 0", 1, ["--eval-interval 0"]),
    ("--eval-iters -1", 1, ["--eval-iters -1", "negative"]),
    ("--seed -1", 1, ["--seed -1", "from 0"]),
    ("--exit-duration-in-mins 0", 1, ["--exit-duration-in-mins 0.0"]),
    (
        "--lr-warmup-samples 5",
        1,
        ["--lr-warmup-samples 5", "--train-iters 100", "--lr-warmup-iters"],
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-decay-tokens 99",
        1,
        ["--lr-wsd-decay-iters 5", "in tokens", "--lr-wsd-decay-tokens"],
    ),
    ("--lr-warmup-fraction 0.1 --lr-warmup-tokens 9", 1, ["--lr-warmup-fraction", "tokens 9"]),
    ("--lr-decay-samples 5", 1, ["--lr-decay-samples 5", "--train-iters 100", "--lr-decay-iters"]),
    (
        "--lr-wsd-decay-samples 5",
        1,
        ["--lr-wsd-decay-samples 5", "--train-iters 100", "--lr-wsd-decay-iters"],
    ),
    (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 5",
        1,
        ["--lr-warmup-fraction 0.1", "--lr-warmup-iters 5"],
    ),
    ("--lr-warmup-fraction 1", 1, ["--lr-warmup-fraction 1.0"]),
    ("--min-lr 1", 1, ["--min-lr 1.0", "--lr 0.001"]),
    ("--adam-beta2 1", 1, ["--adam-beta2 1.0"]),
    ("--clip-grad -1", 1, ["--clip-grad -1.0"]),
    (
        "--end-weight-decay 0.2",
        1,
        ["--end-weight-decay 0.2", "--weight-decay 0.01", "--weight-decay-incr-style"],
    ),
    ("--data-path a --mock-data", 1, ["--mock-data", "--data-path"]),
    ("--train-data wiki --mock-data", 1, ["--mock-data", "--train-data"]),
    ("--num-workers -1", 1, ["--num-workers -1"]),
]


@pytest.mark.parametrize("flags, world_size, told", REFUSED, ids=[flags for flags, *_ in REFUSED])
def test_refuses_naming_flags_and_values(flags, world_size, told):
    with pytest.raises(ConfigError) as raised:
        resolved(flags, world_size)
    assert all(text in str(raised.value) for text in told), str(raised.value)


@pytest.mark.parametrize("flag", [word for word in MINIMAL.split() if word.startswith("--")])
def test_names_the_missing_flag(flag):
    with pytest.raises(ConfigError, match=f"missing.*{flag}"):
        resolved(base=without(flag))


def test_a_message_says_where_a_value_came_from():
    with pytest.raises(ConfigError, match=r"--clip-grad -1.0 \(ds.json: clip_grad\)"):
        resolved(clip_grad=-1.0)
    with pytest.raises(ConfigError, match=r"--norm-epsilon 0.0 \(flag --layernorm-epsilon\)"):
        resolved("--layernorm-epsilon 0")


def test_round_trip_through_json():
    config = resolved(
        "--data-path 0.5 a 0.5 b --rampup-batch-size 2 2 100 --save x", world_size=2
    ).config.with_vocabulary(1000)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_from_dict_fills_in_what_is_missing_and_passes_over_what_it_does_not_know():
    config = resolved("--swiglu").config
    saved = config.to_dict()
    del saved["model"]["qk_layernorm"], saved["training"]["seed"], saved["fast_paths"]
    saved["model"]["of_a_later_version"] = saved["later_part"] = {"a": 1}
    assert RunConfig.from_dict(saved) == config


def test_configurations_that_were_saved_with_every_flag_are_read():
    """By versions that kept aliases, and null for what was not given."""
    old = json.loads(OLD.read_text())
    # Blocks were compiled only on request then, which those files say.
    flags = f"{old['flags']} --torch-compile off"
    config = resolved(base=flags, world_size=old["world_size"]).config
    assert RunConfig.from_dict(old["config"]) == config.with_vocabulary(old["vocabulary"])


def test_what_no_run_derived_is_read_as_its_default():
    """Converted checkpoints of those versions: no run had filled it in."""
    old = json.loads(OLD.read_text())["config"]
    old |= {
        "parallel": {"pipeline_schedule": None, "num_virtual_stages_per_pipeline_rank": None},
        "training": {"micro_batch_size": None, "train_iters": None},
        "optimizer": {"lr": None, "start_weight_decay": None},
    }
    config = RunConfig.from_dict(old)
    assert (config.parallel, config.training) == (ParallelConfig(), TrainingConfig())
    assert config.optimizer == OptimizerConfig()


@pytest.mark.parametrize(
    "size, multiple, tensor, padded",
    [
        (50257, 128, 1, 50304),
        (50257, 128, 2, 50432),
        (256, 128, 2, 256),
        (100, 1, 4, 100),
        (1, 8, 1, 8),
    ],
)
def test_vocabulary_is_padded_to_equal_shares(size, multiple, tensor, padded):
    flags = f"--make-vocab-size-divisible-by {multiple} --tensor-model-parallel-size {tensor}"
    model = resolved(flags, world_size=tensor).config.with_vocabulary(size).model
    assert (model.vocabulary.size, model.vocabulary.padded) == (size, padded)


def test_explain_names_the_origin_of_every_value():
    settings = FlagParser(*FLAG_CLASSES).settings(MINIMAL.split())
    settings["zero_stage"] = Setting(2, "ds.json: zero_optimization.stage")
    settings["norm_epsilon"] = Setting(1e-6, "checkpoint global_step10")
    result = resolve(settings, 2)
    result = result.with_vocabulary(100)
    lines = {line.split()[0]: line.split(maxsplit=2) for line in explain(result).splitlines()}
    assert lines["hidden_size"] == ["hidden_size", "64", "flag --hidden-size"]
    assert lines["seed"] == ["seed", "1234", "default"]
    assert lines["zero_stage"] == ["zero_stage", "2", "ds.json: zero_optimization.stage"]
    assert lines["norm_epsilon"] == ["norm_epsilon", "1e-06", "checkpoint global_step10"]
    assert lines["kv_channels"][2] == "derived: hidden-size / num-attention-heads"
    assert lines["padded_vocab_size"] == ["padded_vocab_size", "128", "derived"]
    fields = {f.name for part in FLAG_CLASSES[:-1] for f in dataclasses.fields(part)}
    assert fields <= set(lines)


def test_accepted_flags_say_what_happens_instead():
    notes = resolved("--use-flash-attn --DDP-impl local").notes
    assert [note.split(" is accepted and not used: ")[0] for note in notes] == [
        "--DDP-impl",
        "--use-flash-attn",
    ]
    assert resolved().notes == ()


def test_megatron_deepspeeds_names_of_zbh1():
    flags = f"{PIPELINE} --enable-zbh1-pipeline"
    (note,) = resolved(flags, 2).notes
    assert "in the order of 1f1b, as with --enable-zbh1-exact-semantics" in note
    for exact in (flags, f"{PIPELINE} --pipeline-schedule zbh1"):
        assert resolved(f"{exact} --enable-zbh1-exact-semantics", 2).notes == ()
    with pytest.raises(ConfigError, match="contradicts --pipeline-schedule 1f1b"):
        resolved(f"{flags} --pipeline-schedule 1f1b", 2)
    with pytest.raises(ConfigError, match="has an effect with --enable-zbh1-pipeline only"):
        resolved(f"{PIPELINE} --enable-zbh1-exact-semantics", 2)
    with pytest.raises(ConfigError, match="--pipeline-schedule zbh1.*two or more processes"):
        resolved("--enable-zbh1-pipeline")
    with pytest.raises(ConfigError, match="this schedule has one stage per process"):
        resolved(f"{flags} {CHUNKS} 2", 2)


def test_small_numeric_flags_of_megatron():
    model = resolved("--bf16 --fp32-residual-connection --init-method-xavier-uniform").config.model
    assert model.fp32_residual_connection and model.init_method_xavier_uniform
    with pytest.raises(
        ConfigError, match="--fp32-residual-connection has an effect with --fp16 or"
    ):
        resolved("--fp32-residual-connection")
    notes = resolved("--data-parallel-random-init --onnx-safe True").notes
    assert "all data-parallel ranks start with the weights of --seed" in notes[0]
    assert "training computes the same with it" in notes[1]


def test_bf16_at_stage_0_says_that_it_is_autocast():
    assert "autocast" in resolved("--bf16 --zero-stage 0").notes[0]
    assert resolved("--bf16 --zero-stage 1").notes == ()


@pytest.mark.parametrize("half", ["--fp16", "--bf16"])
def test_half_precision_alone_is_stage_1_and_says_so(half):
    found = resolved(half)
    assert found.config.engine.zero_stage == 1
    assert found.origins["zero_stage"] == f"derived: {half} without a stage"
    assert f"{half} trains at ZeRO stage 1" in found.notes[0]
    assert resolved(f"{half} --zero-stage 2").config.engine.zero_stage == 2
    assert resolved().config.engine.zero_stage == 0


def test_a_deepspeed_json_that_names_no_stage():
    """It means DeepSpeed's default, except in fp16."""
    json_given = "--deepspeed_config ds.json"
    assert resolved(f"--bf16 {json_given}").config.engine.zero_stage == 0
    assert resolved(f"--fp16 {json_given}").config.engine.zero_stage == 1
    assert resolved("--fp16", zero_stage=0).config.engine.zero_stage == 0


def test_accumulation_in_float32_says_where_it_changes_nothing():
    flag = "--accumulate-allreduce-grads-in-fp32"
    assert "changes nothing" in resolved(flag).notes[0]
    assert "changes nothing" in resolved(f"{flag} --bf16 --zero-stage 0").notes[1]
    assert resolved(f"{flag} --bf16 --zero-stage 3").notes == ()


def test_config_imports_the_standard_library_only():
    probe = "import sys, megatron.config; print(*{name.split('.')[0] for name in sys.modules})"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-S", "-c", probe], cwd=root, capture_output=True, text=True, check=True
    )
    foreign = set(done.stdout.split()) - set(sys.stdlib_module_names) - {"megatron", "__main__"}
    assert not foreign


@pytest.mark.parametrize(
    "extra",
    [
        "--swiglu", "--glu-activation geglu", f"{ROPE} --use-rope-scaling --rope-scaling-factor 4",
        "--use-rotary-position-embeddings --sliding-window 8 --rotary-base-local 100",
        "--parallel-residual --shared-parallel-norm", "--position-embedding-offset 2",
        "--disable-bias-linear --add-attention-bias",
    ],
)  # fmt: skip
def test_a_complete_model_stays_as_it_is(extra):
    """As it comes out of a checkpoint."""
    model = resolved(extra).config.model
    given = {
        name: Setting(value, "checkpoint")
        for name, value in dataclasses.asdict(model.flags()).items()
        if not name.endswith("vocab_size")
    }
    settings = FlagParser(*FLAG_CLASSES).settings(MINIMAL.split())
    assert resolve(settings | given, 1).config.model == model


@pytest.mark.parametrize(
    "flags, kind",
    [
        ("--no-position-embedding", "none"),
        ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
        ("--no-position-embedding --position-embedding-type alibi", "alibi"),
        ("", "learned_absolute"),
    ],
)
def test_no_position_embedding_is_none_where_no_other_is_given(flags, kind):
    assert resolved(flags).config.model.positions.position_embedding_type == kind


def test_no_position_embedding_contradicts_a_learned_one():
    with pytest.raises(ConfigError, match="--no-position-embedding contradicts --position-embed"):
        resolved("--no-position-embedding --position-embedding-type learned_absolute")


def test_profile_of_megatron_deepspeed_and_megatron():
    given = resolved("--profile pt-full --profile_steps 2,3").config.section(ProfilingConfig)
    assert (given.profile, given.profile_step_start, given.profile_step_end) == ("pt-full", 1, 3)
    assert resolved("--profile --seed 1").config.section(ProfilingConfig).profile == "auto"
    assert resolved().config.section(ProfilingConfig).profile is None
    for steps in ("2", "0,3", "a,b", "2,3,4"):
        with pytest.raises(ConfigError, match=f"--profile_steps {steps} must be the first and"):
            resolved(f"--profile pt --profile_steps {steps}")
    with pytest.raises(ConfigError, match="--profile_steps 2,3 contradicts --profile-step-end 4"):
        resolved("--profile --profile_steps 2,3 --profile-step-end 4")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hybrid_layer_pattern", [None], "hybrid_layer_pattern is .None,., not of type str"),
        ("attention_backend", {}, "attention_backend is {}, not of type str"),
        ("normalization", "other", "normalization is 'other'; it must be one of LayerNorm, "),
        ("num_layers", True, "num_layers is True, not of type int"),
        ("moe_router_load_balancing_type", ["none", 1], "not of type str"),
        ("moe_router_load_balancing_type", ["none", "x"], "must be one of aux_loss, "),
    ],
)
def test_saved_values_of_a_wrong_type_or_choice_are_refused(name, value, message):
    content = resolved(world_size=1).config.to_dict()
    assert RunConfig.from_dict(content) == resolved(world_size=1).config
    content["model"][name] = value
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict(content)


def test_no_saved_value_may_be_an_object_or_a_list_of_lists():
    """Shapes are cached by model, so that a value that is not hashable would fail much later."""
    content = resolved(world_size=1).config.to_dict()
    for part, values in content.items():
        for name in values:
            for wrong in ({}, [[1]]):
                with pytest.raises((ConfigError, TypeError, AttributeError)):
                    RunConfig.from_dict({**content, part: {**values, name: wrong}})
