"""What is not given is derived, and what contradicts itself is refused. One function a concern."""

from __future__ import annotations

import math

from megatron.config.derive_fast_paths import derive_fast_paths
from megatron.config.derive_model import derive_model
from megatron.config.draft import Draft, divides, not_negative, positive
from megatron.config.flags import ConfigError
from megatron.config.layouts import Layout, complete_schedule, refusal


def derive(draft: Draft, world_size: int) -> None:
    """Completes ``draft`` in place.

    Raises:
        ConfigError: naming flags, values and what would be right.
    """
    for step in (
        derive_model, _layout, _pipeline, _precision, _recompute, _batch, _length, _schedule, _data,
        _checkpoint, derive_fast_paths,
    ):  # fmt: skip
        step(draft, world_size)


def _layout(draft: Draft, world_size: int) -> None:
    tensor, pipeline = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    positive(draft, tensor, pipeline, "distributed_timeout_minutes")
    draft.check(
        not (draft["no_pipeline_parallel"] and draft[pipeline] > 1),
        f"--no-pipeline-parallel contradicts {draft.show(pipeline)}",
    )
    model_parallel = draft[tensor] * draft[pipeline]
    draft.check(
        world_size % model_parallel == 0,
        f"{draft.show(tensor)} x {draft.show(pipeline)} must divide the {world_size} processes",
    )
    draft.put("world_size", world_size, "launcher")
    draft.put("data_parallel_size", world_size // model_parallel, "processes / (tensor x pipeline)")
    for name in ("num_attention_heads", "ffn_hidden_size"):
        divides(draft, tensor, name)
    groups, size = draft["num_query_groups"], draft[tensor]
    draft.check(
        groups % size == 0 or size % groups == 0,
        f"{draft.show('num_query_groups')} and {draft.show(tensor)}: one must be a multiple of the "
        "other, so that every process holds whole key and value heads",
    )
    if draft["sequence_parallel"]:
        divides(draft, tensor, "seq_length")


def _pipeline(draft: Draft, world_size: int) -> None:
    ranks, schedule = draft["pipeline_model_parallel_size"], draft["pipeline_schedule"]
    chunks, blocks = (
        "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
    )  # fmt: skip
    positive(draft, chunks, blocks)
    if draft[blocks] is not None:
        draft.check(
            schedule in (None, "interleaved"),
            f"{draft.show(blocks)} asks for an interleaved pipeline and contradicts "
            f"{draft.show('pipeline_schedule')}",
        )
        rule = refusal(Layout(pipeline=ranks, schedule="interleaved", chunks=2))
        if rule is not None:  # there is no pipeline
            asked = f"{draft.show(blocks)}, {draft.show('pipeline_model_parallel_size')}"
            raise ConfigError(f"{asked}: {rule.explanation(ramp=False)}")
        found = _chunks_of_blocks(draft)
        draft.check(
            draft[chunks] in (None, found),
            f"{draft.show(chunks)} contradicts {draft.show(blocks)}, which makes it {found}",
        )
        draft.fill(chunks, found, "num-layers / pipeline size / blocks per stage")
    schedule, count = complete_schedule(schedule, draft[chunks])
    draft.fill(chunks, count, f"pipeline-schedule {schedule}")
    draft.fill("pipeline_schedule", schedule, f"{count} stage{'s' * (count > 1)} per process")
    _partition(draft, ranks * draft[chunks])


def _chunks_of_blocks(draft: Draft) -> int:
    """Stages per process that --num-layers-per-virtual-pipeline-stage comes to."""
    ranks, layers = draft["pipeline_model_parallel_size"], draft["num_layers"]
    share, rest = divmod(layers, ranks)
    wanted = draft["num_layers_per_virtual_pipeline_stage"]
    if not rest and share % wanted == 0 and share > wanted:
        return share // wanted
    fitting = [n for n in range(1, share) if not rest and share % n == 0]
    raise ConfigError(
        f"{draft.show('num_layers_per_virtual_pipeline_stage')}: each of the {ranks} processes of "
        "the pipeline must hold two or more stages of that many blocks, all "
        f"{draft.show('num_layers')} together; "
        + (
            f"possible: {', '.join(map(str, fitting))}"
            if fitting
            else "no number does that; uneven stages come from "
            "--num-virtual-stages-per-pipeline-rank and --pipeline-partition"
        )
    )


def _partition(draft: Draft, stages: int) -> None:
    """Checks --pipeline-partition, and that every stage gets a block."""
    layers, partition = draft["num_layers"], draft["pipeline_partition"]
    draft.check(
        stages <= layers,
        f"{draft.show('num_layers')}: each of the {stages} stages of the pipeline needs a block",
    )
    if partition in ("blocks", "parameters"):
        return
    numbers = [int(word) if word.isdecimal() else 0 for word in partition.split(",")]
    draft.check(
        all(numbers),
        f"{draft.show('pipeline_partition')} must be blocks, parameters, or the number of blocks "
        "of each stage, as in 3,4,4,3",
    )
    draft.check(
        len(numbers) == stages and sum(numbers) == layers,
        f"{draft.show('pipeline_partition')} lists {len(numbers)} stages of {sum(numbers)} blocks "
        f"together; the pipeline has {stages} stages and the model {layers} blocks",
    )
    each = draft["num_layers_per_virtual_pipeline_stage"]
    draft.check(
        each is None or set(numbers) == {each},
        f"{draft.show('pipeline_partition')} contradicts "
        f"{draft.show('num_layers_per_virtual_pipeline_stage')}; give one of them",
    )


def _precision(draft: Draft, world_size: int) -> None:
    draft.check(not (draft["fp16"] and draft["bf16"]), "--fp16 contradicts --bf16")
    draft.check(
        draft["loss_scale"] is None or draft["fp16"],
        f"{draft.show('loss_scale')} has an effect with --fp16 only",
    )
    positive(draft, "loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    scale = draft["initial_loss_scale"]
    draft.check(
        scale >= 1 and math.log2(scale).is_integer(),
        f"{draft.show('initial_loss_scale')} must be a power of two",
    )
    if draft["bf16"] and draft["zero_stage"] == 0:
        draft.notes.append(
            "bf16 at ZeRO stage 0 runs as autocast: float32 weights, bfloat16 matrix products"
        )
    half = draft["fp16"] or (draft["bf16"] and draft["zero_stage"] > 0)
    if draft["accumulate_allreduce_grads_in_fp32"] and not half:
        draft.notes.append(
            "--accumulate-allreduce-grads-in-fp32 changes nothing: gradients are float32 anyway"
        )


def _recompute(draft: Draft, world_size: int) -> None:
    if draft["checkpoint_activations"]:
        draft.check(
            draft["recompute_granularity"] in (None, "full"),
            f"--checkpoint-activations contradicts {draft.show('recompute_granularity')}",
        )
        draft.put("recompute_granularity", "full", "--checkpoint-activations")
    if draft["recompute_activations"]:
        draft.check(
            draft["recompute_granularity"] in (None, "selective"),
            f"--recompute-activations contradicts {draft.show('recompute_granularity')}",
        )
        draft.put("recompute_granularity", "selective", "--recompute-activations")
    if draft["recompute_granularity"] == "full":
        draft.fill("recompute_method", "uniform", "full recomputation")
    for name in ("recompute_method", "recompute_num_layers"):
        draft.check(
            draft["recompute_granularity"] == "full" or not draft.given(name),
            f"{draft.show(name)} needs --recompute-granularity full",
        )
    positive(draft, "recompute_num_layers")


def _batch(draft: Draft, world_size: int) -> None:
    draft.require("micro_batch_size")
    positive(draft, "micro_batch_size", "global_batch_size", "lr")
    samples = draft["micro_batch_size"] * draft["data_parallel_size"]
    draft.fill("global_batch_size", samples, "micro-batch-size x data-parallel size")
    whole = draft["global_batch_size"]
    if whole % samples:
        lower, upper = whole // samples * samples, -(-whole // samples) * samples
        raise ConfigError(
            f"{draft.show('global_batch_size')} is not a multiple of "
            f"{draft.show('micro_batch_size')} x {draft['data_parallel_size']} data-parallel "
            f"processes = {samples}; the nearest "
            f"{'are ' + str(lower) + ' and' if lower else 'is'} {upper}"
        )


_LENGTHS = {"train_iters": "iters", "train_samples": "samples", "train_tokens": "tokens"}


def _length(draft: Draft, world_size: int) -> None:
    given = [name for name in _LENGTHS if draft[name] is not None]
    positive(draft, *given)
    if not draft["skip_train"]:
        draft.check(
            len(given) > 0, "missing the length of the run: --train-iters, --train-samples or "
            "--train-tokens",
        )  # fmt: skip
    draft.check(
        len(given) < 2,
        " and ".join(draft.show(name) for name in given) + ": give one length of the run only",
    )
    for name in ("log_interval", "eval_interval", "save_interval", "exit_interval"):
        positive(draft, name)
    positive(draft, "exit_duration_in_mins")
    not_negative(draft, "eval_iters", "seed")


def _schedule(draft: Draft, world_size: int) -> None:
    if not draft["skip_train"]:
        draft.require("lr")
    length = next((name for name in _LENGTHS if draft[name] is not None), "train_iters")
    unit = _LENGTHS[length]
    for other in _LENGTHS.values():
        for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
            draft.check(
                other == unit or not draft[name],
                f"{draft.show(name)} goes with --train-{other}, but the run's length is "
                f"{draft.show(length)}; give --{name.replace(other, unit).replace('_', '-')}",
            )
    if draft[length] is not None:
        draft.fill(f"lr_decay_{unit}", draft[length], f"train-{unit}")
    draft.check(
        not (draft["lr_warmup_fraction"] is not None and draft[f"lr_warmup_{unit}"]),
        f"{draft.show('lr_warmup_fraction')} contradicts {draft.show(f'lr_warmup_{unit}')}",
    )
    if draft["lr_warmup_fraction"] is not None and draft[f"lr_decay_{unit}"] is not None:
        draft.check(
            0 <= draft["lr_warmup_fraction"] < 1,
            f"{draft.show('lr_warmup_fraction')} must be in [0, 1)",
        )
        draft.put(
            f"lr_warmup_{unit}",
            int(draft["lr_warmup_fraction"] * draft[f"lr_decay_{unit}"]),
            f"lr-warmup-fraction x lr-decay-{unit}",
        )
    if draft["lr"] is not None:
        draft.check(
            draft["min_lr"] <= draft["lr"],
            f"{draft.show('min_lr')} is above {draft.show('lr')}",
        )
    positive(draft, "adam_eps")
    not_negative(draft, "clip_grad", "weight_decay")
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        draft.check(0 <= draft[name] < 1, f"{draft.show(name)} must be in [0, 1)")
    constant = draft["weight_decay_incr_style"] == "constant"
    for name in ("start_weight_decay", "end_weight_decay"):
        draft.check(
            not constant or draft[name] in (None, draft["weight_decay"]),
            f"{draft.show(name)} differs from {draft.show('weight_decay')}; that needs "
            "--weight-decay-incr-style linear or cosine",
        )
        draft.fill(name, draft["weight_decay"], "weight-decay")


def _data(draft: Draft, world_size: int) -> None:
    parts = ("train", "valid", "test")
    named = [
        draft.flags[name]
        for name in (
            *("data_path", "data_args_path", "per_split_data_args_path"),
            *(f"{part}_data" for part in parts),
            *(f"{part}_data_path" for part in parts),
            *(f"{part}_weighted_split_paths" for part in parts),
            *(f"{part}_weighted_split_paths_path" for part in parts),
        )
        if draft[name]
    ]
    draft.check(
        not (draft["mock_data"] and named),
        f"--mock-data contradicts {', '.join(named)}: give one of them",
    )
    not_negative(draft, "num_workers")
    if draft["metrics_file"] is None and draft["save"] is not None:
        draft.put("metrics_file", f"{draft['save'].rstrip('/')}/metrics.jsonl", "in --save")


def _checkpoint(draft: Draft, world_size: int) -> None:
    positive(draft, "keep_last", "keep_every")
    for name in ("save_interval", "keep_last", "keep_every", "async_save", "save_universal"):
        draft.check(
            not draft[name] or draft["save"] is not None,
            f"{draft.show(name)} needs --save, the folder to save in",
        )
    draft.check(
        draft["keep_every"] is None or draft["keep_last"] is not None,
        f"{draft.show('keep_every')} exempts checkpoints from --keep-last and needs it; without "
        "both, all are kept",
    )
    draft.check(
        not draft["async_save"] or draft["checkpoint_format"] == "safetensors",
        f"{draft.show('async_save')} contradicts {draft.show('checkpoint_format')}: DeepSpeed "
        "writes its folders while training stands still",
    )
    draft.check(
        draft["save_optim"] or draft["checkpoint_format"] == "safetensors",
        f"--no-save-optim contradicts {draft.show('checkpoint_format')}: DeepSpeed's folders keep "
        "weights and moments together",
    )
