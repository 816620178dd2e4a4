"""From the rounds of the contestants to numbers and tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from contestants.flags import flags_of
from contestants.measure import Result
from contestants.registry import FLOOR, is_ours, is_peer
from contestants.setting import OF_TODAY, Setting
from megatron.config import ModelFlags
from megatron.config.features import taking_part
from megatron.families import family_of
from megatron.features.masked.flops import EncoderDecoderShape
from megatron.model.flops import TransformerShape
from megatron.run.run import parse_run


def shape_of(setting: Setting) -> TransformerShape:
    """The model as its FLOPs are counted."""
    if setting.architecture in OF_TODAY:
        config = parse_run(None, flags_of(setting, 0), setting.family).config
        shape = family_of(setting.family).shape(config.model, config)
        for feature in taking_part():
            shape = feature.shape(shape, config)
        return shape
    decoder, causal = setting.decoder_length, setting.family in ("gpt", "retro")
    predictions, hidden = setting.predictions, setting.hidden_size
    shape = TransformerShape(
        num_layers=setting.layers,
        hidden_size=setting.hidden_size,
        ffn_hidden_size=setting.ffn_hidden_size,
        num_attention_heads=setting.heads,
        num_query_groups=setting.kv_heads,
        kv_channels=setting.kv_channels,
        seq_length=setting.seq_length,
        padded_vocab_size=setting.vocab_size,
        gated=setting.gated,
        sees_later=not causal,
        predictions=predictions,
        other=2.0 * hidden**2 * predictions if predictions else 0.0,
        within=_of_experts(setting),
    )
    if setting.family == "retro":
        return dataclasses.replace(shape, within=_of_retrieval(setting))
    if not decoder:
        return shape
    own = dataclasses.replace(shape, seq_length=decoder, sees_later=False)
    return EncoderDecoderShape(**vars(shape), decoder=own)


def _of_experts(setting: Setting) -> tuple[float, float]:
    """Forward FLOPs of a sample in the routers, and in more experts than one."""
    if not setting.experts:
        return 0.0, 0.0
    more = setting.experts + 3 * (setting.choices - 1) * setting.ffn_hidden_size
    return 2.0 * setting.seq_length * setting.layers * setting.hidden_size * more, 0.0


def _of_retrieval(setting: Setting) -> tuple[float, float]:
    """Forward FLOPs of a sample that a Retro has beyond a GPT."""
    flags = ModelFlags(
        family="retro",
        retro_add_retriever=True,
        num_layers=setting.layers,
        hidden_size=setting.hidden_size,
        ffn_hidden_size=setting.ffn_hidden_size,
        num_attention_heads=setting.heads,
        seq_length=setting.seq_length,
    )
    return family_of("retro").shape(flags.resolve()).within


def step_seconds(result: Result, setting: Setting, clock: str | None = None) -> list[float]:
    """Seconds of a step in each round.

    Args:
        result: of a contestant.
        setting: what it trained.
        clock: ``cpu``, ``wall`` or ``gpu``; the GPU's where there is one, else the CPU's.
    """
    rounds = result["rounds"]
    if clock is None:
        clock = "gpu" if rounds and "gpu_seconds" in rounds[0] else "cpu"
    return [answer[f"{clock}_seconds"] / setting.steps for answer in rounds]


def summary(result: Result, setting: Setting, peak_flops: float) -> dict[str, Any] | None:
    """Summarise a contestant's results; None if it took no part.

    On a CPU the seconds are those of all threads, so tokens per second are tokens per CPU second,
    and the utilisation is of one thread's share of ``peak_flops``.

    Args:
        result: its rounds.
        setting: what it trained.
        peak_flops: what the device (all of a CPU's threads) can do, FLOP/s.
    """
    if not result["rounds"]:
        return None
    seconds = step_seconds(result, setting)
    middle = statistics.median(seconds)
    on_gpu = "gpu_seconds" in result["rounds"][0]
    peak = peak_flops if on_gpu else peak_flops / setting.threads
    samples = setting.micro_batch * setting.micro_batches
    shape = shape_of(setting)
    utilisation = {
        name: shape.flops_per_step(samples, causal=causal) / middle / peak
        for name, causal in (("mfu_causal", True), ("mfu_whole", False))
    }
    losses = [loss for loss in result["losses"] if loss is not None]
    return {
        "seconds_per_step": middle,
        "range": [min(seconds), max(seconds)],
        "wall_seconds_per_step": statistics.median(step_seconds(result, setting, "wall")),
        "tokens_per_second": setting.tokens_per_step / middle,
        **utilisation,
        "peak_bytes": max(answer["peak_bytes"] for answer in result["rounds"]),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
    }


def ratios(results: dict[str, Result], setting: Setting) -> dict[str, dict[str, float]]:
    """Time of each contestant of ours over that of each other one: the median of the rounds'
    ratios, since what disturbs a machine disturbs a whole round."""
    table: dict[str, dict[str, float]] = {}
    for ours, result in results.items():
        if not is_ours(ours):
            continue
        for other, against in results.items():
            if is_ours(other):
                continue
            pairs = zip(step_seconds(result, setting), step_seconds(against, setting), strict=False)
            each = [a / b for a, b in pairs]
            if each:
                table.setdefault(ours, {})[other] = statistics.median(each)
    return table


def disagreements(results: dict[str, Result], tolerance: float) -> list[str]:
    """Lines about contestants whose losses are not those of the others.

    Args:
        results: of all contestants.
        tolerance: largest relative difference to the median of all, at any common step.
    """
    named = {
        name: result["losses"]
        for name, result in results.items()
        if name != FLOOR and result["rounds"]
    }
    if len(named) < 2:
        return []
    lines = []
    length = min(map(len, named.values()))
    middles = [_middle([losses[n] for losses in named.values()]) for n in range(length)]
    for name, losses in named.items():
        for step, (loss, middle) in enumerate(zip(losses, middles, strict=False), 1):
            if not abs(loss - middle) <= tolerance * abs(middle):  # a NaN is in no tolerance
                lines.append(
                    f"{name}: its loss at step {step} is {loss:.4f}, the median {middle:.4f}"
                )
                break
    return lines


def _middle(values: Sequence[float]) -> float:
    """Median of the finite ones, which NaN would bring out of order."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def markdown(found: dict[str, Any]) -> str:
    """The tables of a measurement."""
    setting = Setting(**found["setting"])
    results, machine = found["contestants"], found["machine"]
    clock = "GPU" if machine["cuda"] else "CPU"
    second = "s" if machine["cuda"] else "CPU s"
    lines = [
        _title(setting),
        "",
        f"{machine['device']}, peak {machine['peak_flops'] / 1e12:.3g} TFLOP/s "
        f"({machine['peak_is']}), torch {machine['torch']}, {found['date']}: `{found['command']}`",
        "",
        f"| | numerics | {clock} ms a step | range | wall ms | tokens per {second} | MFU, causal "
        "| MFU, whole | peak MB | loss at first step | at last |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        lines.append(_row(name, result, found["summaries"][name]))
    others = [n for n, result in results.items() if not is_ours(n) and result["rounds"]]
    if found["ratios"] and others:
        lines += ["", f"{clock} time of a step over that of others, median of the rounds' ratios:"]
        lines += ["", f"| | {' | '.join(others)} |", "|---" * (len(others) + 1) + "|"]
        for name, row in found["ratios"].items():
            lines.append(f"| {name} | {' | '.join(f'{row[other]:.3f}' for other in others)} |")
    return "\n".join([*lines, *([""] if found["warnings"] else []), *found["warnings"]]) + "\n"


def _title(setting: Setting) -> str:
    return (
        f"{setting.architecture}, {setting.layers} layers, hidden {setting.hidden_size}, "
        f"{setting.heads} heads, {_experts(setting)}sequence {setting.seq_length}, vocabulary "
        f"{setting.vocab_size:,}, {setting.micro_batches} x {setting.micro_batch} samples a step, "
        f"{setting.dtype}, {setting.threads} thread{'s' if setting.threads > 1 else ''}"
    )


def _experts(setting: Setting) -> str:
    if not setting.experts:
        return ""
    return f"{setting.choices} of {setting.experts} experts of {setting.ffn_hidden_size}, "


def _row(name: str, result: Result, summed: dict[str, Any] | None) -> str:
    if summed is None:
        why = result.get("failed") or f"skipped: {result.get('missing')}"
        return _cells([name, why.replace("|", "/"), *[""] * 9])
    low, high = summed["range"]
    numerics = result["numerics"]
    if "failed" in result:
        numerics += f" (out after {len(result['rounds'])} rounds: {result['failed']})"
    losses = [
        "" if summed[key] is None else f"{summed[key]:.4f}" for key in ("first_loss", "last_loss")
    ]
    return _cells(
        [
            name,
            numerics.replace("|", "/"),
            _milliseconds(summed["seconds_per_step"]),
            f"{_milliseconds(low)}-{_milliseconds(high)}",
            _milliseconds(summed["wall_seconds_per_step"]),
            f"{summed['tokens_per_second']:,.0f}",
            f"{summed['mfu_causal']:.1%}",
            f"{summed['mfu_whole']:.1%}",
            f"{summed['peak_bytes'] / 1e6:,.0f}",
            *losses,
        ]
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f}"


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def compared(found: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """A measurement with its summaries, ratios and warnings."""
    setting, results = Setting(**found["setting"]), found["contestants"]
    peak = found["machine"]["peak_flops"]
    return found | {
        "summaries": {name: summary(result, setting, peak) for name, result in results.items()},
        "ratios": ratios(results, setting),
        "peers": [name for name in results if is_peer(name)],
        "warnings": disagreements(results, tolerance),
    }
