"""The recipes: runs them at small size, and writes their pages, pictures and gallery.

    python docs/generate/recipes.py --check NAME ...   trains at small size, compares with the curve
    python docs/generate/recipes.py --run NAME ...     the same, and makes it the curve
    python docs/generate/recipes.py                    writes docs/recipes/ from the curves

Small runs read two files of the folder in MEGATRON_TEST_DATA: ``tinyshakespeare/input.txt`` of
github.com/karpathy/char-rnn, and ``sft/alpaca_en_demo.json`` of github.com/hiyouga/LLaMA-Factory.
Memory and time of the full size are those of ``tools/plan.py`` for the layout of the script.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
for folder in (str(ROOT), str(ROOT / "tests" / "helpers")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from example_scripts import printed, resolved  # noqa: E402

from megatron.apps.parity.layouts import short_name  # noqa: E402
from megatron.apps.pictures.plots import decorate, save_picture  # noqa: E402
from megatron.apps.planning.parameters import kept_bytes, model_parameters  # noqa: E402
from megatron.apps.planning.presets import MODELS, with_presets  # noqa: E402
from megatron.apps.planning.search import Plan, Workload, estimate  # noqa: E402
from megatron.apps.planning.step_time import FLOPS_OF_A_BYTE, Hardware  # noqa: E402
from megatron.apps.reinforcement.flags import ReinforcementConfig  # noqa: E402
from megatron.config.flags import build  # noqa: E402
from megatron.features.adapters.flags import AdapterConfig  # noqa: E402
from megatron.features.context.flags import LongContextConfig  # noqa: E402
from megatron.features.experts.costs import active_parameters  # noqa: E402
from megatron.training.writers import read_metrics  # noqa: E402

FOLDER = ROOT / "examples_deepspeed" / "recipes"
CURVES = FOLDER / "curves.json"
PAGES = ROOT / "docs" / "recipes"
PICTURES = ROOT / "docs" / "pictures"
STEPS = 40
BAND = 0.02
"""Share by which a value may differ from the curve: processors round in different orders. It is
right for rewards, too: the seed draws the texts, and float32 rounds too little to change a draw."""
SHOWN = (1, 10, 20, 30, 40)
GPU = "H100"
READ = build(Hardware, with_presets({}, GPU, None)).flops / FLOPS_OF_A_BYTE
"""Bytes a second that a GPU reads from its memory."""
VOCABULARY = 512
"""Tokens of the vocabularies of small runs."""


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        name: of its script.
        title: of its page.
        gpus: processes at full size.
        vocab_size: tokens of the usual vocabulary of the full size.
        family: of models; those of fine-tuning name a preset of ``tools/plan.py`` as ``base``.
        small_processes: of the small run.
        learns: the source of the full size's values.
        measure: value of a step that makes the curve.
    """

    name: str
    title: str
    gpus: int
    vocab_size: int
    family: str = "gpt"
    base: str | None = None
    small_processes: int = 1
    learns: str = ""
    measure: str = "loss"

    @property
    def script(self) -> Path:
        return FOLDER / f"{self.name}.sh"

    @property
    def settings(self) -> dict[str, str]:
        """Variables without which the script prints no command."""
        return {"BASE": "BASE", "DATA": "DATA", "DATA_PATH": "DATA"}

    def command(self, *flags: str, **settings: str) -> list[str]:
        """Return the flags of the command that the script prints."""
        return printed(self.script, *flags, **self.settings | settings)[1]


RECIPES = (
    Recipe("gpt2-124m", "GPT-2 124M", 8, 50257, learns="GPT-2's shape; 10 billion tokens"),
    Recipe("llama-1b", "Llama 1B", 8, 32000, learns="TinyLlama's shape; 21 billion tokens"),
    Recipe("llama-8b", "Llama 8B", 16, 128256, learns="Llama 3's shape; 101 billion tokens"),
    Recipe("mixtral", "Mixtral 8x7B", 64, 32000, small_processes=2,
           learns="Mixtral's shape; 101 billion tokens"),
    Recipe("qwen3-30b-a3b", "Qwen3 30B-A3B", 32, 151936, small_processes=2,
           learns="Qwen3's shape; 101 billion tokens"),
    Recipe("bert-base", "BERT base", 8, 30522, "bert",
           learns="steps, batch and rates of Devlin et al. 2018 (arXiv:1810.04805)"),
    Recipe("t5-base", "T5 base", 8, 30522, "t5",
           learns="steps and batch of Raffel et al. 2019 (arXiv:1910.10683)"),
    Recipe("long-context", "Llama 8B, 131,072 tokens", 32, 128256, small_processes=2,
           learns="Llama 3's shape with a larger base of RoPE; 10 billion tokens"),
    Recipe("sft", "Fine-tuning, all weights", 8, 152064, base="qwen2.5-7b",
           learns="Qwen 2.5 7B; usual values"),
    Recipe("lora", "LoRA", 8, 128256, base="llama3-8b", learns="Llama 3 8B; usual values"),
    Recipe("dpo", "DPO with LoRA", 8, 128256, base="llama3-8b", learns="Llama 3 8B; usual values"),
    Recipe("grpo", "GRPO with LoRA", 8, 152064, base="qwen2.5-7b", measure="reward",
           learns="Qwen 2.5 7B; usual values"),
)  # fmt: skip
BY_NAME = {recipe.name: recipe for recipe in RECIPES}


def run_of(recipe: Recipe) -> Any:
    """Return the configuration of the full size, as the trainer resolves it."""
    flags = recipe.command()
    if recipe.base is None:
        return resolved([*flags, "--model-family", recipe.family], recipe.gpus, recipe.family)
    own = {"--model": 1, "--data": 1, "--output": 1}
    words: list[str] = []
    at = 0
    while at < len(flags):
        if flags[at] in own:
            at += 1 + own[flags[at]]
            continue
        words.append(flags[at])
        at += 1
    known = {word for word in words if word.startswith("--")}
    for name, value in MODELS[recipe.base].items():
        if name == "vocab_size" or value is None:
            continue
        word = "--" + name.replace("_", "-")
        if word not in known:
            words += [word] if value is True else [] if value is False else [word, str(value)]
    # The examples say how many steps an epoch has.
    at = words.index("--epochs")
    words[at : at + 2] = ["--train-iters", "1000"]
    return resolved(words, recipe.gpus)


def plan_of(recipe: Recipe, config: Any) -> Plan:
    """Return the estimates of ``tools/plan.py`` for the layout of the script. Of pairs both answers
    are counted, without the pass of the reference model."""
    rows = 2 if recipe.name == "dpo" else 1
    micro_batch = rows * config.training.micro_batch_size
    adapters, saving = config.section(AdapterConfig), config.section(LongContextConfig)
    precision = config.precision
    work = Workload(
        config.model, recipe.vocab_size, rows * config.training.global_batch_size,
        micro_batch, "bf16", precision.accumulate_allreduce_grads_in_fp32,
        states=precision.states, fast_paths=config.fast_paths,
        adapters=adapters if adapters.lora else None,
        saving=saving if saving != LongContextConfig() else None,
    )  # fmt: skip
    hardware = dataclasses.replace(build(Hardware, with_presets({}, GPU, None)), gpus=recipe.gpus)
    return estimate(work, config.layout(), micro_batch, hardware)


def size_of(recipe: Recipe, config: Any) -> str:
    """Return the number of weights, and of those that a token uses where these are fewer."""
    model = config.model.with_vocabulary(recipe.vocab_size, 1)
    total = model_parameters(model)
    used = active_parameters(model, total)
    shown = f"{total / 1e9:.2f} billion" if total >= 1e9 else f"{total / 1e6:.0f} million"
    return f"{shown}, {used / 1e9:.1f} of them for a token" if used < total else shown


def writing_of(recipe: Recipe, config: Any) -> tuple[str, float]:
    """Return the texts of a step in words, and the seconds that a GPU reads weights and keys from
    memory for their tokens, the longest texts counted: less than writing takes."""
    options, training = config.section(ReinforcementConfig), config.training
    texts, length = training.global_batch_size, options.max_completion_length
    at_once = texts / config.layout().data
    assert at_once <= options.rollout_batch_size, "written in several turns"
    model = config.model.with_vocabulary(recipe.vocab_size, 1)
    of_token, of_text = kept_bytes(model, 2)
    before = config.model.seq_length - length
    read = 2 * model_parameters(model) + at_once * (of_text + of_token * (before + length / 2))
    words = f"{texts} after {texts // options.num_generations} prompts, at most {length:,} tokens"
    return words, length * read / READ


def curves() -> dict[str, list[float]]:
    """Return the losses, or rewards, of all steps of each small run."""
    return json.loads(CURVES.read_text()) if CURVES.exists() else {}


def outside(losses: Sequence[float], expected: Sequence[float]) -> list[str]:
    """Return a line for each step whose loss is outside the band."""
    return [
        f"step {step}: {loss:.4f} instead of {curve:.4f}"
        for step, (loss, curve) in enumerate(zip(losses, expected, strict=False), 1)
        if not abs(loss - curve) <= BAND * curve
    ]


class SmallData:
    """Small corpora, vocabularies and a model for the small runs, made of public data in a folder
    when they are first needed."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder

    def settings(self, recipe: Recipe) -> dict[str, str]:
        """Return what the script of a recipe reads."""
        if recipe.base is not None:
            data = self._pairs() if recipe.name == "dpo" else self._examples()
            return {"BASE": str(self._model()), "DATA": str(data)}
        kind = "gpt" if recipe.family == "gpt" else "bert"
        corpus, tokenizer = self.folder / kind, self.folder / f"{kind}-tokenizer"
        if not corpus.exists():
            self._make(kind, corpus, tokenizer)
        if kind == "gpt":
            files = {"VOCAB_FILE": "vocab.json", "MERGE_FILE": "merges.txt"}
        else:
            files = {"VOCAB_FILE": "vocab.txt"}
        paths = {name: str(tokenizer / file) for name, file in files.items()}
        suffix = "document" if kind == "gpt" else "sentence"
        return {"DATA_PATH": str(corpus / f"text_{suffix}")} | paths

    def _make(self, kind: str, corpus: Path, tokenizer: Path) -> None:
        from tools import preprocess_data, train_tokenizer

        speeches = (self.source / "tinyshakespeare" / "input.txt").read_text().split("\n\n")
        texts = ["\n\n".join(speeches[at : at + 20]) for at in range(0, len(speeches), 20)]
        text = self.folder / f"{kind}.jsonl"
        text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
        corpus.mkdir()
        name = "GPT2BPETokenizer" if kind == "gpt" else "BertWordPieceLowerCase"
        words = ["--tokenizer-type", name, "--input", str(text)]
        size = ["--vocab-size", str(VOCABULARY), "--output", str(tokenizer)]
        train_tokenizer.main([*words, *size])
        files = ["--vocab-file", str(tokenizer / ("vocab.json" if kind == "gpt" else "vocab.txt"))]
        if kind == "gpt":
            files += ["--merge-file", str(tokenizer / "merges.txt"), "--append-eod"]
        else:
            files += ["--split-sentences"]
        # Its result has the name of the key of the texts.
        out = ["--output-prefix", str(corpus / "corpus"), "--workers", "1"]
        preprocess_data.main([*words, *files, *out])
        for path in corpus.iterdir():
            path.rename(path.with_name(path.name.removeprefix("corpus_")))

    def _records(self) -> list[dict[str, str]]:
        return json.loads((self.source / "sft" / "alpaca_en_demo.json").read_text())[:80]

    def _examples(self) -> Path:
        path = self.folder / "examples.json"
        path.write_text(json.dumps(self._records()))
        return path

    def _pairs(self) -> Path:
        """Answers to the instruction are better than those to the next one."""
        records = self._records()
        rows = [
            {"instruction": row["instruction"], "input": row.get("input", ""),
             "chosen": row["output"], "rejected": other["output"]}
            for row, other in zip(records, records[1:], strict=False)
        ]  # fmt: skip
        path = self.folder / "pairs.json"
        path.write_text(json.dumps(rows))
        return path

    def _model(self) -> Path:
        """A Llama with random weights of a seed."""
        folder = self.folder / "base"
        if not folder.exists():
            import torch
            from transformers import LlamaConfig, LlamaForCausalLM

            from megatron.features.tokenizers.train import train_byte_level_bpe

            texts = [row["output"] for row in self._records()]
            tokenizer = train_byte_level_bpe(texts, vocab_size=VOCABULARY, min_frequency=2)
            end = tokenizer.eod
            torch.manual_seed(1)
            config = LlamaConfig(
                vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=176,
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=256, initializer_range=0.08,
                bos_token_id=end, eos_token_id=end,
            )  # fmt: skip
            LlamaForCausalLM(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder


def train_small(
    recipe: Recipe, data: SmallData, *flags: str, keep: Path | None = None
) -> list[float]:
    """Train a recipe at small size by its own script, and return the losses of its steps. ``keep``
    is a folder for the run."""
    with tempfile.TemporaryDirectory() as folder:
        runs = str(keep or folder)
        several = recipe.small_processes > 1
        port = str(random.randrange(20000, 40000))
        own = {"SMALL": "1", "RUNS": runs, "LAUNCHER": "torchrun" if several else "python"}
        own |= {"GPUS": str(recipe.small_processes), "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        own |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["bash", str(recipe.script), *flags]
        environment = os.environ | own | data.settings(recipe)
        run = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
        if run.returncode:
            raise RuntimeError(f"{recipe.name}:\n{(run.stdout + run.stderr)[-4000:]}")
        (metrics,) = Path(runs).rglob("metrics.jsonl")
        rows = (row for row in read_metrics(metrics) if row["kind"] == "train")
        return [round(row[recipe.measure], 4) for row in rows]


def picture(recipe: Recipe, losses: Sequence[float]) -> Path:
    """Draw a curve with its band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    low, high = ([loss * (1 + sign * BAND) for loss in losses] for sign in (-1, 1))
    axes.fill_between(steps, low, high, color="#7aa6d8", alpha=0.35, linewidth=0)
    axes.plot(steps, losses, color="#2b62a3", linewidth=1.6)
    axes.set(xlabel="step", ylabel=recipe.measure)
    axes.set_title(f"{recipe.title}, small", loc="left", fontweight="bold")
    axes.set_xlim(1, len(losses))
    decorate(axes)
    path = PICTURES / f"recipe-{recipe.name}.png"
    save_picture(figure, path)
    return path


def facts(recipe: Recipe) -> dict[str, str]:
    """Return the rows of a page's table, by their names."""
    config = run_of(recipe)
    plan, training = plan_of(recipe, config), config.training
    texts, writing = writing_of(recipe, config) if recipe.measure == "reward" else ("", 0.0)
    seconds = plan.time.total + writing
    tokens = training.global_batch_size * config.model.seq_length
    nodes = recipe.gpus // 8
    rows = {
        "weights": size_of(recipe, config),
        "hardware": f"{nodes} node{'s' * (nodes > 1)} of 8 {GPU} with 80 GiB",
        "layout": f"`{short_name(plan.layout)}`",
        "memory of a GPU": f"{plan.memory.total / 2**30:.1f} GiB",
        "step": f"{tokens:,} tokens, {plan.time.total:.2f} s",
        "texts": f"{texts}: at least another {writing:.1f} s" * bool(texts),
        "speed": "at most " * bool(texts)
        + f"{tokens / seconds / recipe.gpus:,.0f} tokens per second and GPU",
    }
    if recipe.base is None:
        steps = training.train_iters
        whole = f"{steps:,} steps, {tokens * steps / 1e9:,.0f} billion tokens"
        rows["whole training"] = f"{whole}, {_time(steps * seconds / 3600)}"
    rows["values"] = recipe.learns
    return {key: value for key, value in rows.items() if value}


def _time(hours: float) -> str:
    return f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours"


def page(recipe: Recipe, losses: Sequence[float]) -> str:
    """Return the page of a recipe."""
    name = f"examples_deepspeed/recipes/{recipe.name}.sh"
    comment = [line[2:] for line in recipe.script.read_text().splitlines()[1:] if line[:2] == "# "]
    table = "\n".join(f"| {key} | {value} |" for key, value in facts(recipe).items())
    if recipe.base is not None:
        settings = "BASE=MODEL DATA=examples.json"
        small = "the first 80 of Alpaca's examples, with a Llama of random weights"
    else:
        files = "VOCAB_FILE=vocab.json MERGE_FILE=merges.txt"
        if recipe.family != "gpt":
            files = "VOCAB_FILE=vocab.txt"
        settings = f"DATA_PATH=text_document {files}"
        small = f"tiny Shakespeare with a vocabulary of {VOCABULARY}"
    if recipe.name == "dpo":
        small += "; the rejected answer is that to the next instruction"
    note = (
        "measurements. They assume that a GPU reaches 60 % of its peak, which it does not with\n"
        "small models."
    )
    if recipe.measure == "reward":
        small += "; the reward is the share of the letters a to m in a text; all is float32"
        note += f"""
Each token of a text waits for weights and keys from GPU memory, at {READ / 1e12:.1f} TB a second.
The pass of the reference model and the rewards are not counted."""
    ranks = f", on {recipe.small_processes} processes," if recipe.small_processes > 1 else ""
    expected = " | ".join(f"{losses[step - 1]:.3f}" for step in SHOWN if step <= len(losses))
    steps = " | ".join(str(step) for step in SHOWN if step <= len(losses))
    rule = "|".join(["---"] * (steps.count("|") + 2))
    first = " ".join(part for part in comment if not part.startswith("shellcheck"))
    return f"""<!-- Written by docs/generate/recipes.py. -->
# {recipe.title}

{first}

| | |
|---|---|
{table}

Memory and time are estimates of [`tools/plan.py`](../guides/planning.md) for this layout, not
{note}

<!-- needs: gpu -->
```sh
{settings} {name}
```

Flags after the script override its own ([settings](../../examples_deepspeed/README.md)).

## The curve at small size

With `SMALL=1` the script trains the same recipe with 2 layers of width 64{ranks} on a CPU. The
curve was trained on {small}. This command makes the data, trains, and compares the values:

<!-- needs: files -->
```sh
MEGATRON_TEST_DATA=FOLDER python docs/generate/recipes.py --check {recipe.name}
```

![{recipe.measure.capitalize()} over steps](../pictures/recipe-{recipe.name}.png)

| step | {steps} |
|{rule}|
| {recipe.measure} | {expected} |

`curves.json` in the scripts' folder has all steps. Every value must agree within {BAND:.0%}.
FOLDER contains `tinyshakespeare/input.txt` (github.com/karpathy/char-rnn) and
`sft/alpaca_en_demo.json` (github.com/hiyouga/LLaMA-Factory).
"""


def gallery(known: dict[str, list[float]]) -> str:
    """Return the page of all recipes."""
    rows = []
    for recipe in RECIPES:
        row, losses = facts(recipe), known[recipe.name]
        rows.append(
            f"| [{recipe.title}]({recipe.name}.md) | {row['weights']} | {row['hardware']} "
            f"| {row['memory of a GPU']} | {row.get('whole training', row['speed'])} "
            f"| {losses[0]:.2f} to {losses[-1]:.2f} |"
        )
    pictures = "\n".join(
        f"[![{recipe.title}](../pictures/recipe-{recipe.name}.png)]({recipe.name}.md)\n"
        for recipe in RECIPES
    )
    table = "\n".join(rows)
    return f"""<!-- Written by docs/generate/recipes.py. -->
# Recipes

Start from the script of a published model. Each recipe is one script of
[`examples_deepspeed/recipes/`](../../examples_deepspeed/README.md) with the values of its full
size, and a small run (`SMALL=1`) whose losses or rewards are known. If yours are the same, software
and machine compute correctly, before you spend GPU hours. Memory and time are estimates. The
[gallery](gallery.md) shows configuration and log of the small runs.

| recipe | weights | hardware | memory per GPU | whole training | small run: loss or reward |
|---|---|---|---|---|---|
{table}

<div class="pictures" markdown="1">

{pictures}
</div>
"""


def write_pages(known: dict[str, list[float]]) -> None:
    """Write all pages and pictures."""
    PAGES.mkdir(exist_ok=True)
    for recipe in RECIPES:
        picture(recipe, known[recipe.name])
        (PAGES / f"{recipe.name}.md").write_text(page(recipe, known[recipe.name]))
    (PAGES / "index.md").write_text(gallery(known))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag in ("--run", "--check"):
        parser.add_argument(flag, nargs="+", choices=BY_NAME, default=[], metavar="NAME")
    options = parser.parse_args()
    known, wrong = curves(), 0
    with tempfile.TemporaryDirectory() as folder:
        data = SmallData(Path(os.environ.get("MEGATRON_TEST_DATA", ".")), Path(folder))
        for name in options.run:
            known[name] = train_small(BY_NAME[name], data)
            print(name, known[name], flush=True)
            lines = (f' "{key}": {json.dumps(known[key])}' for key in BY_NAME if key in known)
            CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        for name in options.check:
            apart = outside(train_small(BY_NAME[name], data), known[name])
            print(f"{name}: {'; '.join(apart) or f'within {BAND:.0%} of its curve'}", flush=True)
            wrong += bool(apart)
    if not options.run and not options.check:
        write_pages(known)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
