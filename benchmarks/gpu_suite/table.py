"""Tables of the results, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contestants.report import summary
from contestants.setting import Setting

from gpu_suite import ladder
from gpu_suite.compare import BANDS, departures
from gpu_suite.ladder import CEILINGS, GENERATION, GRAPHS, MACHINE, RANKS, SCALES, TESTS
from gpu_suite.results import Found, failure
from gpu_suite.shapes import SHAPES, recomputed_flops, step_flops
from megatron.util.files import write_whole

HEADS = {
    ladder.MAIN: "This project's shapes",
    ladder.LLMQ: "LLMQ's shapes (sequence 1024, 524,288 tokens a step)",
    ladder.SWITCHED: "Operators switched off, one at a time",
    ladder.EXPERTS: "Layers of experts, of which the chosen ones count",
    ladder.LONG: "Long sequences",
    ladder.ABLATIONS: "What each flag gives: none of them, then one",
    ladder.PEERS: "Others at the same batch",
    ladder.LARGE: "Shapes that a card barely holds",
    ladder.LENGTHS: "Longer sequences",
    ladder.SMALL: "Small shapes",
    ladder.FAMILIES: "BERT, T5 and Retro",
}
COLUMNS = (
    "model", "sequence", "", "tokens a step", "micro batch", "ms a step", "over the first",
    "tokens per s", "TFLOP/s, causal", "MFU, causal", "MFU, whole", "HFU, causal",
    "of measured products", "peak GB", "MHz, W", "loss at first step", "at last",
)  # fmt: skip
LEGEND = (
    "TFLOP/s are those of the model, forward and backward, attention counted causally (half of "
    "the scores), which is how LLMQ counts, fp8 too; MFU is of the data sheet's rate in 16 bits, "
    "causal and with the scores counted whole (as Megatron-LM does); HFU counts what a row "
    "recomputes by its flags too; 'of measured products' is "
    "the same TFLOP/s over what square products of the row's dtype reached. A row whose losses "
    f"leave the band of its shape's first row (± {BANDS['narrow'][0]:.0%}, fp8 and states of fewer "
    f"bits ± {BANDS['wide'][0]:.0%}, at every step) has no speed."
)  # fmt: skip
RANK_COLUMNS = "layout, ranks on one card over gloo", "losses", "largest relative difference"
BEGIN, END = "<!-- measured by benchmarks/gpu.py -->", "<!-- end of benchmarks/gpu.py -->"


def markdown(results: Mapping[str, Found], level: int = 1) -> str:
    """The results of one device by the names of their cells.

    Args:
        level: of the heading.
    """
    results = _in_order(results)
    newest = max(results.values(), key=lambda found: found["date"], default=None)
    if newest is None:
        return "Nothing has been measured.\n"
    machine = newest["machine"]
    lines = [f"{'#' * level} {machine['device']}", "", _about(machine, results), ""]
    lines += _tests(found for found in results.values() if found["cell"]["group"] == TESTS)
    for group, head in ((GRAPHS, ("variant", "graphs", "breaks")), (RANKS, RANK_COLUMNS)):
        if group in results:
            lines += _rows(results[group], head)
    if CEILINGS in results:
        lines += _ceilings(results[CEILINGS], level + 1)
    odd = departures(results)
    shown = False
    for group, head in HEADS.items():
        rows = [(name, found) for name, found in results.items() if found["cell"]["group"] == group]
        if rows:
            lines += [f"{'#' * (level + 1)} {head}", "", *_table(rows, odd, results), ""]
            shown = True
    if shown:
        lines += [LEGEND, ""]
    for found in results.values():
        if found["cell"]["group"] == GENERATION:
            lines += _generation(found, level + 1)
    lines += _splits(results, level + 1)
    commands = [(n, found["command"]) for n, found in results.items() if "command" in found]
    if commands:
        lines += [f"{'#' * (level + 1)} Commands", "", "```text"]
        lines += [f"{name}: {command}" for name, command in commands]
        lines += ["```", ""]
    return "\n".join(lines)


def _in_order(results: Mapping[str, Found]) -> dict[str, Found]:
    """In the order of the ladder; what it no longer has comes last."""
    order = [cell.name for scale in SCALES.values() for cell in scale()]
    place = {name: number for number, name in enumerate(order)}
    last = len(order)
    return dict(sorted(results.items(), key=lambda item: place.get(item[0], last)))


def _about(machine: Found, results: Mapping[str, Found]) -> str:
    versions = ("torch", "cuda", "cudnn", "triton", "nccl", "deepspeed", "transformers")
    known = ", ".join(f"{name} {machine[name]}" for name in versions if machine.get(name))
    dates = sorted(found["date"][:10] for found in results.values())
    text = (
        f"{machine['peak_flops'] / 1e12:,.4g} TFLOP/s in bf16 ({machine['peak_is']}), "
        f"{machine['cores']} cores; {known}; Python {machine['python']}. {dates[0]}"
    )
    text += f" to {dates[-1]}. " if dates[-1] != dates[0] else ". "
    found = results.get(MACHINE, {})
    smi = found.get("nvidia_smi") or {}
    if smi:
        text += (
            f"Driver {smi['driver_version']}, {smi['memory.total']}, limit {smi['power.limit']}, "
            f"up to {smi['clocks.max.sm']}. "
        )
    for shape, names in found.get("attention_kernels", {}).items():
        text += f"Attention at {shape}: {', '.join(f'`{name[:80]}`' for name in names[:6])}. "
    return text.strip()


def _tests(cells: Iterable[Found]) -> list[str]:
    lines = []
    for found in cells:
        said = [failure(found), found.get("summary")]
        lines.append(f"- Tests, {found['cell']['variant']}: {': '.join(filter(None, said))}")
        lines += [f"  - {line}" for line in found.get("broken", ())]
    return [*lines, ""] if lines else []


def _rows(found: Found, head: Sequence[str]) -> list[str]:
    why = failure(found)
    lines = [_cells(head), "|---" * len(head) + "|"]
    lines += [_cells([_short(value) for value in row]) for row in found.get("rows", ())]
    return [*([why, ""] if why is not None else []), *lines, ""]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_short, value)) if isinstance(value, list) else str(value)


def _ceilings(found: Found, level: int) -> list[str]:
    lines = [f"{'#' * level} Ceilings", ""]
    why = failure(found)
    if why is not None:
        return [*lines, why, ""]
    square = found["square"]
    lines += [
        f"Copy: {found['copy_bytes_per_second'] / 1e12:.3g} TB/s read and written. Square "
        f"products: {square['bf16'] / 1e12:,.4g} TFLOP/s in bf16, "
        f"{square['fp8'] / 1e12:,.4g} in fp8.",
        "",
        _cells(["model", "product", "M", "N", "K", "TFLOP/s, bf16", "fp8"]),
        "|---" * 7 + "|",
    ]
    for shape, of_shape in found["products"].items():
        for layer, kind, m, n, k, *rates in of_shape["rows"]:
            shown = [f"{rate / 1e12:,.4g}" if rate else "" for rate in rates]
            lines.append(_cells([shape, f"{layer}, {kind}", *map(str, (m, n, k)), *shown]))
    lines += [
        "",
        _cells(["model", "products of a step alone, ms, bf16", "fp8", "MFU, causal, at most"]),
    ]
    lines.append("|---" * 4 + "|")
    for shape, of_shape in found["products"].items():
        alone = of_shape["step_seconds"]
        share = step_flops(SHAPES[shape].setting()) / alone["bf16"] / found["machine"]["peak_flops"]
        shown = [f"{alone[dtype] * 1e3:,.1f}" for dtype in ("bf16", "fp8")]
        lines.append(_cells([shape, *shown, f"{share:.1%}"]))
    lines += ["", _cells(["attention [B, N, K, S, D]", "kernel", "TFLOP/s, forward", "both"])]
    lines.append("|---" * 4 + "|")
    for shape, rates in found["attention"].items():
        title = f"{shape} {rates['shape']}"
        for kernel, rate in rates.items():
            if isinstance(rate, dict):
                shown = [f"{rate[part] / 1e12:,.4g}" for part in ("forward", "both")]
            elif kernel == "shape":
                continue
            else:
                shown = [str(rate), ""]
            lines.append(_cells([title, kernel, *shown]))
    return [*lines, ""]


def _generation(found: Found, level: int) -> list[str]:
    lines = [f"{'#' * level} Generation, GPT-2's shape, {found['cell']['variant']}", ""]
    why = failure(found)
    if why is not None:
        return [*lines, why, ""]
    lines += [
        _cells(["", "at once", "new tokens per s", "first token, s, median"]),
        "|---" * 4 + "|",
    ]
    for row in found["rows"]:
        shown = f"{row['new_per_second']:,.0f}", f"{row['first_seconds']:.2f}"
        lines.append(_cells([row["program"], str(row["concurrency"]), *shown]))
    return [*lines, ""]


def _table(
    rows: Sequence[tuple[str, Found]], odd: Mapping[str, str], results: Mapping[str, Found]
) -> list[str]:
    lines = [_cells(COLUMNS), "|---" * len(COLUMNS) + "|"]
    first: dict[tuple[str, int], float] = {}
    for name, found in rows:
        cell = found["cell"]
        length = cell["seq_length"] or found.get("setting", {}).get("seq_length", "")
        start = [cell["shape"], str(length), cell["variant"]]
        why = failure(found) or odd.get(name)
        if why is not None:
            lines.append(_cells([*start, why, *[""] * (len(COLUMNS) - 4)]))
            continue
        row = numbers(found, results.get(CEILINGS))
        base = first.setdefault((cell["shape"], length), row["seconds"])
        lines.append(_cells([*start, *_shown(found, row, base)]))
    return lines


def numbers(found: Found, ceilings: Found | None) -> dict[str, Any]:
    """Return the numbers of a row: `contestants.report.summary`, ``flops`` (per second, causal),
    and the shares ``hfu``, None where nothing is recomputed, and ``of_measured``, None without the
    ceilings."""
    setting = Setting(**found["setting"])
    peak = found["machine"]["peak_flops"]
    timed = setting.warmup + len(found["rounds"]) * setting.steps  # without traced steps
    losses = found["losses"][:timed]
    row = summary({"rounds": found["rounds"], "losses": losses}, setting, peak)
    assert row is not None
    seconds = row["seconds_per_step"]
    flops = step_flops(setting) / seconds
    again = recomputed_flops(setting, _recompute(found["cell"]["contestant"])) / seconds
    hfu = (flops + again) / peak if again else None
    dtype = "fp8" if "fp8-format" in found["cell"]["contestant"] else "bf16"
    reached = (ceilings or {}).get("square", {}).get(dtype)
    of_measured = flops / reached if reached else None
    return {**row, "seconds": seconds, "flops": flops, "hfu": hfu, "of_measured": of_measured}


def _recompute(contestant: str) -> str | None:
    """Name what its flags recompute. What compiled blocks compute again by themselves is not
    known."""
    if "recompute-granularity=full" in contestant:
        return "uniform"
    return "selective" if "recompute-granularity=selective" in contestant else None


def _shown(found: Found, row: Mapping[str, Any], base: float) -> list[str]:
    setting, gpu = Setting(**found["setting"]), found["gpu"]
    micro = f"{setting.micro_batch} x {setting.seq_length:,}"
    if "halved" in found:
        micro += " (halved: out of memory)"
    losses = [row["first_loss"], row["last_loss"]]
    return [
        f"{setting.tokens_per_step:,}",
        micro,
        f"{row['seconds'] * 1e3:,.1f}",
        f"{row['seconds'] / base:.3f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['flops'] / 1e12:,.4g}",
        f"{row['mfu_causal']:.1%}",
        f"{row['mfu_whole']:.1%}",
        "" if row["hfu"] is None else f"{row['hfu']:.1%}",
        "" if row["of_measured"] is None else f"{row['of_measured']:.1%}",
        f"{row['peak_bytes'] / 1e9:.2f}",
        f"{gpu['clocks.sm']:.0f}, {gpu['power.draw']:.0f}" if gpu else "",
        *("" if loss is None else f"{loss:.4f}" for loss in losses),
    ]


def _splits(results: Mapping[str, Found], level: int) -> list[str]:
    lines = []
    for name, found in results.items():
        table = found.get("trace", {}).get("table")
        if table:
            lines += [f"{'#' * level} Where the time goes: {name}", "", "```text", table, "```", ""]
    return lines


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in cells)} |"


def report(devices: Mapping[str, Mapping[str, Found]]) -> str:
    """Every device's tables, as a section of benchmarks/RESULTS.md."""
    parts = [markdown(results, level=3) for _, results in sorted(devices.items())]
    return "\n".join(["## On GPUs", "", *parts]).rstrip() + "\n"


def refresh(path: Path, section: str) -> None:
    """Replaces the section between the marks in a file, or adds it at the end; nothing else."""
    text = path.read_text() if path.exists() else ""
    marked = f"{BEGIN}\n{section}{END}\n"
    if BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(f"{END}\n")[2]
        text = before + marked + after
    else:
        text = f"{text.rstrip()}\n\n{marked}" if text else marked
    write_whole(path, text.encode())
