#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Finds the layout with the shortest estimated step time that fits into the GPUs' memory.

    python tools/plan.py --gpus 8 --gpu H100 --model llama-7b --seq-length 8192 --train-tokens 1e12
    python tools/plan.py --gpus 8 --load my-model --train-tokens 20e9
    python tools/plan.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu \
        --seq-length 4096 --vocab-size 32000 --global-batch-size 256 --bf16 --gpus 16

Memory per rank: weights, gradients and optimizer state by ZeRO stage (Rajbhandari et al. 2020,
arXiv:1910.02054) as DeepSpeed 0.19 holds them, and activations, s b h (34 + 5 a s / h) bytes per
block of GPT-2's shape (Korthikanti et al. 2022, arXiv:2205.05198), counted tensor by tensor for
other shapes.
Step time: FLOPs / (utilisation x peak) + exposed bytes / bandwidth + the pipeline's bubble,
(p - 1) / (v m) of the work (Narayanan et al. 2021, arXiv:2104.04473). The assumptions are printed,
and each is a flag. docs/guides/planning.md has the formulas.

With --retro-chunks it prints the sizes of indices of a Retro database instead:

    python tools/plan.py --retro-chunks 1000000000 --retro-vector-width 1024

Exit status: 0 if a layout fits; 1 if none fits; 2 if the command line is wrong.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron.apps.parity.layouts import short_name
from megatron.apps.planning.activations import WHOLE
from megatron.apps.planning.budget import (
    TIE,
    Budget,
    command,
    model_words,
    simplest_first,
    usual_batch,
)
from megatron.apps.planning.parameters import adapter_parameters, kept_bytes, model_parameters
from megatron.apps.planning.presets import GPUS, MODELS, with_presets
from megatron.apps.planning.proposals import proposal_rows
from megatron.apps.planning.published import published_tables
from megatron.apps.planning.search import (
    Plan,
    Workload,
    changed_flags,
    estimate,
    fewest_gpus,
    fitting,
    search,
)
from megatron.apps.planning.step_time import Hardware
from megatron.apps.profiling.tables import aligned
from megatron.apps.retro.config import IndexFlags
from megatron.apps.retro.index.notation import size_table
from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.source import open_checkpoint
from megatron.config import (
    ConfigError,
    FlagParser,
    ModelConfig,
    ModelFlags,
    PrecisionConfig,
    RunConfig,
    Setting,
    Settings,
    resolve,
)
from megatron.config.engine import FastPathsConfig
from megatron.config.features import features
from megatron.config.flags import POSITIVE, ConfigResolver, build, option
from megatron.config.optimizer import STATES
from megatron.config.sections import KeysAndValues, memory_of
from megatron.families import family_of, refuse_unused
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.averages.feature import AveragesConfig
from megatron.features.context.costs import counts_half
from megatron.features.context.flags import LongContextConfig
from megatron.features.experts.costs import active_parameters
from megatron.features.optimizers.flags import OptimizersConfig
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.within import text_content
from megatron.run.run import run_of
from megatron.util.errors import spelled

GIB, GB = 2**30, 10**9


@dataclass(frozen=True)
class PlanConfig:
    """Plan: what to train, and what to show."""

    gpu: str = option("H100", choices=tuple(GPUS))
    """GPU whose memory, peak, bandwidths, power and price are assumed; each is a flag too."""
    model: str | None = option(None, choices=tuple(MODELS))
    """Published model whose flags are assumed; each can be given too."""
    load: str | None = option(None)
    """Checkpoint, or folder of a Hugging Face model (its config.json is enough), whose model is
    planned."""
    train_tokens: int | None = option(None, bounds=POSITIVE)
    """Tokens of the whole training, such as 1e12 or 300B, to print its time, energy and cost."""
    vocab_size: int | None = option(None)
    """Tokens of the vocabulary, which is padded as in training."""
    global_batch_size: int | None = option(None, derived="about 4 million tokens")
    """Samples of one optimizer step over all processes."""
    micro_batch_size: int | None = option(None, derived="powers of two are tried")
    """Samples of a micro batch."""
    load_teacher: str | None = option(None)
    """Checkpoint of the teacher of a run with --kd."""
    optimizer: str = option("adam", choices=tuple(STATES), spellings={"adamw": "adam"})
    """Optimizer whose states are counted."""
    top: int = option(10)
    """Number of layouts to list."""
    like_table: bool = option(False)
    """Print published numbers of models from 1.7B to 1T parameters next to the estimates, and the
    bytes per parameter, and exit. The layouts are the published ones; only machine flags apply."""
    propose: bool = option(False)
    """Print what published rules propose for tokens, learning rate and batch of the model, with
    their sources, and exit. --train-tokens replaces the first."""
    retro_chunks: int | None = option(None, bounds=POSITIVE)
    """Print the sizes of indices of a Retro database of so many chunks, and exit."""
    retro_vector_width: int = option(1024, bounds=POSITIVE)
    """Elements of the vector of a chunk."""
    retro_index_str: str | None = option(None, derived="by the number of chunks")
    """Index in faiss's notation, as tools/retro/preprocess_data.py takes it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    classes = (
        PlanConfig, Hardware, ModelFlags, PrecisionConfig, FastPathsConfig, AdapterConfig,
        LongContextConfig, OptimizersConfig, AveragesConfig,
    )  # fmt: skip
    parser = FlagParser(*classes, description=__doc__)
    settings = parser.settings(argv)
    config = build(PlanConfig, settings)
    try:
        if config.like_table or config.retro_chunks is not None:
            print(_tables(config, settings))
            return 0
        if config.model is not None and config.load is not None:
            raise ConfigError(f"--model {config.model}, --load {config.load}: give one of the two")
        network = _model_at(Path(config.load)) if config.load is not None else None
        settings = with_presets(settings, config.gpu, config.model, network)
        config, hardware = build(PlanConfig, settings), build(Hardware, settings)
        if config.propose:
            print(_proposals(config, settings, hardware))
            return 0
        hardware.check()
        work = workload_of(config, settings, hardware.gpus or 1)
        _check_tokens(config, work)
    except (ConfigError, CheckpointError) as error:
        parser.error(str(error))
    plans = search(work, hardware)
    best = fitting(plans, hardware)
    print("\n".join(assumptions(work, hardware)))
    if not best:
        print("\n" + nothing_fits(work, hardware, plans))
        return 1
    listed = one_each(simplest_first(best))[: config.top]
    print(f"\n{len(best)} of {len(plans)} combinations fit; the best {len(listed)} layouts:\n")
    print(aligned([HEADER, *(row(work, plan, hardware) for plan in listed)]))
    print(LEGEND)
    if plans[0].time.total < listed[0].time.total:
        print(
            f"\n{short_name(listed[0].layout)} stands first as the simplest of those within "
            f"{TIE:.0%}, less than the estimates can tell apart."
        )
    _print_best(listed[0], work, hardware, config)
    return 0


def _tables(config: PlanConfig, settings: Settings) -> str:
    """Published numbers next to their estimates, or the sizes of indices of a Retro database."""
    if config.like_table:
        hardware = build(Hardware, settings)
        hardware = dataclasses.replace(hardware, gpus=hardware.gpus or 8)
        hardware.check()
        return published_tables(hardware)
    ConfigResolver((PlanConfig,), settings)  # bounds
    index = IndexFlags(retro_index_str=config.retro_index_str)
    return size_table(index, config.retro_chunks or 0, config.retro_vector_width)


def _proposals(config: PlanConfig, settings: Settings, hardware: Hardware) -> str:
    if hardware.gpus is not None:
        hardware.check()
    model = workload_of(config, settings, hardware.gpus or 1).model
    lines, table = proposal_rows(model.with_vocabulary(config.vocab_size or 0), config.train_tokens)
    return "\n".join([*lines, "", aligned(table)])


def _check_tokens(config: PlanConfig, work: Workload) -> None:
    """Raises ConfigError if a step takes more tokens than the whole training."""
    step = work.global_batch_size * work.model.seq_length
    if config.train_tokens is not None and config.train_tokens < step:
        raise ConfigError(
            f"--train-tokens {config.train_tokens} is less than one step takes: "
            f"{work.global_batch_size} samples of {work.model.seq_length} tokens; give a "
            "smaller --global-batch-size"
        )


def _print_best(plan: Plan, work: Workload, hardware: Hardware, config: PlanConfig) -> None:
    """Prints what the first layout sends and costs, and its command."""
    if plan.layout.expert > 1:
        print("\n" + imbalance(work, plan, hardware))
    if plan.memory.host or plan.layout.context > 1:
        print("\n" + long_sequences(plan, hardware))
    budget = Budget(plan, work, hardware, config.train_tokens or 0)
    if budget.tokens:
        print("\n" + "\n".join(budget.lines()))
    more = changed_flags(work.fast_paths)
    more += changed_flags(work.adapters) if work.adapters else []
    more += ["--load-teacher", config.load_teacher] if config.load_teacher else []
    if config.model or config.load or budget.tokens:
        has_tokenizer = config.load and any(Path(config.load).glob("tokenizer*.*"))
        folder = config.load if config.load and has_tokenizer else "FOLDER"
        tokenizer = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", folder]
        print(f"\nCommand of the first:\n  {spelled(command(budget, more, tokenizer))}")
    else:
        print(f"\nFlags of the first, for {hardware.gpus} processes:")
        print("  " + shlex.join([*model_words(work.model), *plan.flags, *more]))


def _model_at(folder: Path) -> ModelConfig:
    """The model of a checkpoint, or of a Hugging Face folder, of which config.json is enough.
    Raises CheckpointError without a model."""
    config = folder / "config.json"
    content = read_json(config, lenient=True) if config.is_file() else None
    if isinstance(content, dict) and "model_type" in content:
        content = text_content(content, config)
        return architecture_named(content, config).model(content, config)
    return open_checkpoint(folder).model


def _states(run: RunConfig, vocab_size: int) -> float:
    """Numbers that the optimizer and averages have next to a weight."""
    averages = len(run.section(AveragesConfig).names)
    if run.optimizer.optimizer == "adam":
        return 2.0 + averages
    from megatron.features.optimizers.memory import states_per_parameter

    whole = replace(run, model=run.model.with_vocabulary(vocab_size, 1))
    return states_per_parameter(whole) + averages


def workload_of(config: PlanConfig, settings: Settings, gpus: int) -> Workload:
    """The workload of the flags, completed and checked as the trainer does it.

    Raises:
        ConfigError: a value is missing or contradicts another; the message names the flags.
    """
    if config.vocab_size is None:
        raise ConfigError("--vocab-size is missing, unless --model or --load says it")
    for name in ("vocab_size", "global_batch_size", "micro_batch_size", "top"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be positive")
    # Of the trainer's values only the model and the dtypes matter here.
    stand_ins = {"micro_batch_size": 1, "zero_stage": 1, "train_iters": 1, "lr": 1.0}
    known = {name: s for name, s in settings.items() if name not in PlanConfig.__annotations__}
    known |= {name: Setting(value, "planner") for name, value in stand_ins.items()}
    known["optimizer"] = Setting(config.optimizer, "--optimizer")
    if (config.model or config.load) and "fp16" not in known:
        known.setdefault("bf16", Setting(True, "planner"))
    for feature in features().values():
        known = dict(feature.complete(known, partial(run_of, processes=1)))
    family = known["family"].value if "family" in known else ModelConfig.family
    planned = family_of(family)
    refuse_unused(known, planned)
    run = resolve(planned.complete_settings(known), world_size=1).config
    adapters, saving = run.section(AdapterConfig), run.section(LongContextConfig)
    given = saving != LongContextConfig()
    precision = "fp16" if run.precision.fp16 else "bf16" if run.precision.bf16 else "fp32"
    return Workload(
        run.model,
        config.vocab_size,
        config.global_batch_size or usual_batch(run.model.seq_length, gpus),
        config.micro_batch_size,
        precision,
        run.precision.accumulate_allreduce_grads_in_fp32,
        states=run.precision.states,
        fast_paths=run.fast_paths,
        adapters=adapters if adapters.lora else None,
        teacher=open_checkpoint(config.load_teacher).model if config.load_teacher else None,
        saving=saving if given else None,
        optimizer_states=_states(run, config.vocab_size),
    )


def trained_parameters(work: Workload) -> str:
    """Return the number of trained parameters, where not all are."""
    if work.adapters is None:
        return ""
    count = adapter_parameters(work.padded(1), work.adapters, 1) * work.model.num_layers
    return f"of which adapters of {count / 1e6:,.1f}M are trained, "


def active(model: ModelConfig) -> str:
    """Return the number of parameters that a token uses of a model with experts."""
    total = model_parameters(model)
    used = active_parameters(model, total)
    return f"{used / 1e9:,.2f}B active for a token, " if used < total else ""


def imbalance(work: Workload, plan: Plan, hardware: Hardware) -> str:
    """Return the bytes that expert-parallel ranks send, and the cost of twice the imbalance."""
    worse = dataclasses.replace(hardware, expert_imbalance=2 * hardware.expert_imbalance)
    slower = estimate(work, plan.layout, plan.micro_batch, worse).time.total / plan.time.total - 1
    return (
        f"{short_name(plan.layout)}: a rank sends {plan.sent.expert / GB:.1f} GB of tokens to "
        "experts and back in a step; with --expert-imbalance "
        f"{worse.expert_imbalance:g} the step takes {slower:.0%} longer"
    )


def long_sequences(plan: Plan, hardware: Hardware) -> str:
    """Return the communication and host memory of a plan for long sequences."""
    said = []
    if plan.layout.context > 1:
        said.append(
            f"a rank sends {plan.sent.context / GB:.1f} GB in attention in a step, of which "
            f"{plan.time.context:.2f} s are not hidden"
        )
    if plan.memory.host:
        said.append(
            f"{plan.memory.host / GIB:.1f} GiB of host memory for each GPU (--host-memory "
            f"{hardware.host_memory} of a node), pinned; {plan.time.host:.2f} s of its traffic are "
            "not hidden"
        )
    device = plan.layout.offload_optimizer
    if device is not None:
        section = {"device": device, **({"nvme_path": "DISK"} if device == "nvme" else {})}
        said.append(
            f"OFFLOAD.json is {json.dumps({'zero_optimization': {'offload_optimizer': section}})}; "
            "the time of Adam on the CPU is not counted"
        )
    if plan.memory.disk:
        said.append(
            f"{plan.memory.disk / GIB:.1f} GiB of DISK for each GPU, which a step reads and "
            "writes; its time is not counted"
        )
    return f"{short_name(plan.layout)}: {'; '.join(said)}"


def assumptions(work: Workload, hardware: Hardware) -> list[str]:
    """The lines that say what is planned and what is assumed."""
    model = work.padded(1)
    return [
        f"{model_parameters(model) / 1e9:,.2f}B parameters, {active(model)}"
        f"{trained_parameters(work)}{work.precision}, "
        f"{work.global_batch_size} x {model.seq_length} tokens a step, "
        f"{work.flops() / 1e15:,.1f} PFLOP of the model",
        f"assumed: {hardware.gpus} GPUs, {hardware.gpus_per_node} a node, --gpu-memory "
        f"{hardware.gpu_memory} less --memory-reserve {hardware.memory_reserve}; "
        f"--utilisation {hardware.utilisation:g} of --peak-tflops {hardware.peak_tflops:g}",
        f"assumed: --intra-node-bandwidth {hardware.intra_node_bandwidth:g} and "
        f"--inter-node-bandwidth {hardware.inter_node_bandwidth:g} GB/s a GPU; overlapped: "
        f"--tensor-overlap {hardware.tensor_overlap:g}, "
        f"--pipeline-overlap {hardware.pipeline_overlap:g}, "
        f"--data-overlap {hardware.data_overlap:g} (ZeRO 3)",
        "not counted: the optimizer's own time, data loading, logging, checkpoints, offload, "
        "what compiled blocks keep less of",
        *["causal attention counts half of the pairs, as its kernels do"] * counts_half(work.model),
        *["8-bit products count in memory, not in time"] * bool(work.float8),
        *[f"assumed: --expert-imbalance {hardware.expert_imbalance:g}"] * bool(active(model)),
        *generation(model, work.precision),
    ]


def generation(model: ModelConfig, precision: str) -> list[str]:
    """The line about the memory of generation, of a model that keeps more than keys and values."""
    memories = {memory_of(model, layer) for layer in range(model.num_layers)}
    if all(isinstance(memory, KeysAndValues) for memory in memories):
        return []
    of_token, of_text = kept_bytes(model, 4 if precision == "fp32" else 2)
    states = f" and {of_text:,} of each text" if of_text else ""
    return [
        f"generation on one rank keeps {of_token:,} bytes of each token{states} (--kv-cache-gib)"
    ]


HEADER = [
    "layout", "micro", "m", "weights", "grads", "optim.", "buffers", "activ.", "(whole)", "GiB",
    "step s", "TFLOP/s", "MFU", "HFU", "bubble", "tensor", "pipe", "data GB",
]  # fmt: skip

LEGEND = """
micro: samples of a micro batch; m: micro batches per step. Memory in GiB of the rank that needs
most (grads: at stage 3 with float32 copies in the update; whole: activations without
recomputation). +tiles: of MLPs; +host: activations in host memory; +fpdt: attention in chunks on
the host; +adam: the optimizer on the host. TFLOP/s: of the model, per GPU; MFU: of --peak-tflops;
HFU: with recomputation. bubble: share of the step in which a pipeline rank waits. tensor, pipe,
data: GB that a rank sends in a step."""


def one_each(plans: Sequence[Plan]) -> list[Plan]:
    """Each layout once, with its best micro batch."""
    unique: dict[str, Plan] = {}
    for plan in plans:
        unique.setdefault(name(plan), plan)
    return list(unique.values())


def name(plan: Plan) -> str:
    """A plan's layout, and what saves memory: tiles, activations and the optimizer on the host,
    and FPDT."""
    saving = plan.saving
    words = [
        "tiles" * (saving.mlp_chunks_for_training != 1),
        "host" * saving.in_host_memory,
        "fpdt" * saving.ds_sequence_parallel_fpdt,
        {None: "", "cpu": "adam", "nvme": "disk"}[plan.layout.offload_optimizer],
    ]
    return "+".join(filter(None, (short_name(plan.layout), *words)))


def row(work: Workload, plan: Plan, hardware: Hardware) -> list[str]:
    """A plan's line of the table."""
    kept = dataclasses.replace(plan.layout, recompute=None)
    whole = estimate(work, kept, plan.micro_batch, hardware, WHOLE).memory.activations
    memory, time, sent = plan.memory, plan.time, plan.sent
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.buffers, memory.activations)
    seconds = plan.layout.processes * time.total
    rate = work.flops() / seconds / 1e12
    hardware_rate = work.hardware_flops(plan.layout.recompute) / seconds / 1e12
    return [
        name(plan),
        str(plan.micro_batch),
        str(plan.layout.micro_batches[0]),
        *(f"{part / GIB:.1f}" for part in (*parts, whole, memory.total)),
        f"{time.total:.2f}",
        f"{rate:.0f}",
        f"{rate / hardware.peak_tflops:.1%}",
        f"{hardware_rate / hardware.peak_tflops:.1%}",
        f"{time.bubble_share:.1%}",
        *(f"{part / GB:.1f}" for part in (sent.tensor, sent.pipeline, sent.data)),
    ]


def nothing_fits(work: Workload, hardware: Hardware, plans: Sequence[Plan]) -> str:
    """Say how much memory the smallest layout lacks, and what would help."""
    if not plans:
        return (
            f"no layout exists: --global-batch-size {work.global_batch_size} is not a multiple of "
            f"any data-parallel size (times --micro-batch-size) of {hardware.gpus} GPUs"
        )
    plan = min(plans, key=lambda plan: plan.memory.total)
    memory, usable = plan.memory, hardware.usable_memory
    missing = memory.total - usable
    helps = []
    more = fewest_gpus(work, hardware)
    if more:
        helps.append(f"--gpus {more}")
    helps.append(f"GPUs with {missing / GIB:.1f} GiB more memory")
    helps += offload(plans, usable)
    if memory.activations > missing:
        helps.append(f"a shorter --seq-length: activations take {memory.activations / GIB:.1f} GiB")
    kinds = ("weights", "gradients", "optimizer", "buffers", "activations")
    split = ", ".join(f"{kind} {getattr(memory, kind) / GIB:.1f}" for kind in kinds)
    return "\n".join(
        [
            f"nothing fits: the smallest of {len(plans)} layouts, {short_name(plan.layout)} with "
            f"micro batches of {plan.micro_batch}, needs {memory.total / GIB:.1f} GiB ({split}), "
            f"{missing / GIB:.1f} GiB more than a GPU has available. What would help:",
            *(f"  {help}" for help in helps),
        ]
    )


def offload(plans: Sequence[Plan], usable: int) -> list[str]:
    """The effect of moving the optimizer to main memory; nothing where no plan uses ZeRO."""
    held = {
        plan: plan.memory.total - plan.memory.optimizer
        for plan in plans
        if plan.layout.zero > 0 and plan.layout.offload_optimizer is None
    }
    if not held:
        return []
    plan = min(held, key=lambda plan: held[plan])
    missing = held[plan] - usable
    left = "fits" if missing <= 0 else f"lacks {missing / GIB:.1f} GiB"
    return [
        f"offloading the optimizer (offload_optimizer in the DeepSpeed JSON; slower, not timed "
        f"here): {short_name(plan.layout)} then needs {held[plan] / GIB:.1f} GiB and {left}"
    ]


if __name__ == "__main__":
    sys.exit(main())
