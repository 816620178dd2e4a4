"""Preparation before the contestants start: their tokens and weights, and the machine's peak."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from torch import Tensor

from contestants.flags import flags_of
from contestants.inputs import parts
from contestants.setting import SEED, Setting
from megatron.checkpoint.files import write_json
from megatron.checkpoint.source import Source
from megatron.data.build import Datasets
from megatron.families import build_model
from megatron.features.measured_peak.products import measure_matmul_peak
from megatron.features.measured_peak.rates import peak_flops
from megatron.formats.huggingface import architecture_of
from megatron.formats.huggingface.export import write_model
from megatron.model.layer_list import initialise
from megatron.parallel.shard import shard_of
from megatron.run.run import Run, parse_run, run_data

SHARD_BYTES = 2**32
MOST_SAMPLES = 4096


def prepare(setting: Setting, steps: int, given_peak: float | None) -> dict[str, Any]:
    """Writes tokens and weights into the setting's folder; describes the machine.

    Args:
        setting: what is trained.
        steps: most steps that a contestant will make.
        given_peak: what the device can do, FLOP/s; looked up or measured without it.
    """
    torch.set_num_threads(setting.threads)
    plain = dataclasses.replace(setting, task="pretrain")
    run = parse_run(None, flags_of(plain, 0), setting.family)
    samples = min(MOST_SAMPLES, steps * setting.micro_batch * setting.micro_batches)
    write_samples(setting, run_data(run)[0], samples)
    write_weights(setting, run)
    if setting.task == "dpo":
        write_pairs(setting, samples)
    return machine() | peak(setting, given_peak)


def write_pairs(setting: Setting, count: int) -> None:
    """Pairs of answers to prompts, all of one length, and a tokenizer with a token for each of
    their words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{n}" for n in range(setting.vocab_size - 1)]
    vocabulary = {word: n for n, word in enumerate([*words, "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", unk_token="w0"
    )
    fast.save_pretrained(setting.weights)
    chance = random.Random(SEED)
    # The last token of a row is no input, so a row is one longer; it ends with </s>.
    lengths = (setting.seq_length + 1 - setting.answer_length, setting.answer_length - 1)

    def text(length: int) -> str:
        return " ".join(chance.choices(words, k=length))

    lines = []
    for _ in range(count):
        prompt, chosen, rejected = text(lengths[0]), text(lengths[1]), text(lengths[1])
        pair = {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}
        lines.append(json.dumps(pair))
    setting.pairs.write_text("\n".join(lines) + "\n")


def write_samples(setting: Setting, datasets: Datasets, count: int) -> None:
    """The trainer's first samples, in its order."""
    assert datasets.train is not None
    rows = [parts(setting.family, datasets.train[n]) for n in range(count)]
    columns = (np.stack(column).astype(np.int32) for column in zip(*rows, strict=True))
    np.savez(setting.samples, *columns)


def write_weights(setting: Setting, run: Run) -> None:
    """The trainer's initial weights as a model of Hugging Face; its configuration alone where they
    are not shared."""
    setting.weights.mkdir()
    if setting.shared_weights:
        dtype = "bfloat16" if setting.dtype == "bf16" else "float32"
        write_model(InitialWeights(run), setting.weights, dtype, SHARD_BYTES, setting.architecture)
        return
    model = run.config.model
    config = architecture_of(model, setting.architecture).config(model)
    write_json(setting.weights / "config.json", config)


class InitialWeights(Source):
    """The weights with which a run starts, as a checkpoint."""

    title = "initial weights"

    def __init__(self, run: Run) -> None:
        super().__init__(Path("initial weights"))
        self.model, self.seed = run.config.model, run.config.training.seed
        self.params = dict(build_model(self.model).canonical_parameters())

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        """Nowhere: it is not in a file."""
        return None

    def names(self) -> Sequence[str]:
        """See `Source.names`."""
        return list(self.params)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Source.shape`."""
        return tuple(shard_of(self.params[name]).canonical_shape)

    def kinds(self, name: str) -> Sequence[str]:
        """Weights only."""
        return ["weight"]

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """See `Source.tensor`."""
        param = self.params[name]
        initialise(name, param, self.seed)
        return shard_of(param).join([param.detach()])


def peak(setting: Setting, given: float | None) -> dict[str, Any]:
    """``peak_flops`` of the device, and where that is from: the data sheet of a known GPU; else
    square matrix products in the setting's dtype, on as many threads as a contestant has.
    """
    if given is not None:
        return {"peak_flops": given, "peak_is": "--peak-tflops"}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
    sheet = peak_flops(device) if setting.dtype == "bf16" else None
    if sheet is not None:
        return {"peak_flops": sheet, "peak_is": "data sheet"}
    reached = max(measure_matmul_peak(dtype, device, 1.0) for _ in range(3))
    return {"peak_flops": reached, "peak_is": "measured on square products"}


def main(text: str, steps: str, given_peak: str) -> None:
    """As a process of its own: prints the machine as the last line."""
    found = prepare(Setting.from_json(text), int(steps), float(given_peak) or None)
    print(json.dumps(found))
