#!/usr/bin/env python
"""Trains the same model here and in transformers on the same batches; compares the losses.

    python benchmarks/same_training.py --data data/corpus_text_sentence --vocab-file vocab.txt
    python benchmarks/same_training.py --data ... --vocab-file ... --steps 300 --plot losses.png

transformers makes the initial weights, which are read here from its folder. Both sides train in
float32 on one thread with torch's AdamW and gradients clipped to norm 1, without dropout. Printed
are the largest relative difference of a step's losses, and that of transformers from itself with
the samples of every batch in the opposite order: rounding alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainings import add_data, data_flags, losses_of, new_parser
from transformers import (
    BertConfig,
    BertForPreTraining,
    MegatronBertConfig,
    MegatronBertForPreTraining,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from megatron.features.masked.batch import NO_LABEL, BertBatch, T5Batch
from megatron.run.run import Run, parse_run, run_data
from megatron.training.plan import TrainingPlan

ROWS = 128
"""The vocabulary is padded to a multiple of it."""
EXTRA_IDS = 20
FLAGS = (
    "--use-checkpoint-args --attention-dropout 0 --hidden-dropout 0 --seq-length 64 "
    "--micro-batch-size 8 --tokenizer-type BertWordPieceLowerCase --split 100,0,0 --lr 1e-3 "
    "--lr-decay-style linear --lr-warmup-fraction 0.1 --weight-decay 0.01 --clip-grad 1 "
    "--eval-iters 0 --num-workers 0 --log-interval 100000 --peak-tflops 1 --zero-stage 0"
).split()


def bert_losses(model: PreTrainedModel, batch: BertBatch) -> Tensor:
    """The sum of both losses in transformers."""
    return model(
        batch.tokens_BS,
        attention_mask=batch.padding_mask_BS,
        token_type_ids=batch.types_BS,
        labels=unlabelled(batch.labels_BS),
        next_sentence_label=batch.is_random_B,
    ).loss


def t5_losses(model: PreTrainedModel, batch: T5Batch) -> Tensor:
    """The loss in transformers."""
    return model(
        batch.encoder_tokens_BE,
        attention_mask=batch.encoder_padding_mask_BE,
        decoder_input_ids=batch.decoder_tokens_BD,
        decoder_attention_mask=batch.decoder_padding_mask_BD,
        labels=unlabelled(batch.labels_BD),
    ).loss


def unlabelled(labels: Tensor) -> Tensor:
    return labels.masked_fill(labels == NO_LABEL, -100)


@dataclass(frozen=True)
class Peer:
    """A model of transformers.

    Attributes:
        family: the same model's here.
        model: its class.
        config: its configuration of a number of tokens.
        losses: what it trains on.
        flags: of training here.
        untied: whether the head has weights of its own.
    """

    family: str
    model: type[PreTrainedModel]
    config: Callable[[int], PretrainedConfig]
    losses: Callable[[PreTrainedModel, Any], Tensor]
    flags: Sequence[str] = ()
    untied: bool = False

    def build(self, rows: int) -> PreTrainedModel:
        """The model, with the same weights every time."""
        torch.manual_seed(1)
        model = self.model(self.config(rows))
        if self.untied:  # transformers 5 ties the head of every T5
            head, width = model.get_output_embeddings(), model.config.hidden_size
            head.weight = nn.Parameter(torch.randn(rows, width) * width**-0.5)
        return model


def bert_config(kind: type[PretrainedConfig], layers: int, width: int) -> Callable[[int], Any]:
    return lambda rows: kind(
        vocab_size=rows,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        pad_token_id=None,  # or it would not train that token where it replaces another one
    )


def t5_config(layers: int, width: int) -> Callable[[int], Any]:
    return lambda rows: T5Config(
        vocab_size=rows,
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )


def peers(layers: int = 2, width: int = 64) -> dict[str, Peer]:
    """The models that are compared, by name."""
    bert, t5 = bert_config(BertConfig, layers, width), t5_config(layers, width)
    megatron = bert_config(MegatronBertConfig, layers, width)
    extra = ["--vocab-extra-ids", str(EXTRA_IDS)]
    return {
        "bert": Peer("bert", BertForPreTraining, bert, bert_losses),
        "megatron-bert": Peer("bert", MegatronBertForPreTraining, megatron, bert_losses),
        "t5": Peer("t5", T5ForConditionalGeneration, t5, t5_losses, extra, True),
    }


@dataclass(frozen=True)
class Curves:
    """Losses by step: here, in transformers, and there again with the samples of each batch in the
    opposite order, which changes nothing but rounding."""

    here: list[float]
    transformers: list[float]
    reordered: list[float]

    @property
    def difference(self) -> float:
        """The largest relative one between here and there."""
        return float(relative(self.here, self.transformers).max())

    @property
    def rounding(self) -> float:
        """The largest relative one that the order of samples makes."""
        return float(relative(self.reordered, self.transformers).max())


def relative(losses: Sequence[float], reference: Sequence[float]) -> np.ndarray[Any, Any]:
    """Relative differences by step."""
    return np.abs(np.subtract(losses, reference)) / np.array(reference)


def compare(peer: Peer, argv: Sequence[str], rows: int) -> Curves:
    """Trains all three.

    Args:
        peer: the model.
        argv: flags of the data and of the length of the training.
        rows: of the token embedding.
    """
    theirs = peer.build(rows)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        flags = [*FLAGS, *peer.flags, "--pretrained-checkpoint", folder, *argv]
        run = parse_run(None, flags, peer.family)
        losses = losses_of(run)
    forward = train_theirs(theirs, peer, run)
    return Curves(losses, forward, train_theirs(peer.build(rows), peer, run, -1))


def train_theirs(model: PreTrainedModel, peer: Peer, run: Run, order: int = 1) -> list[float]:
    """Losses of a plain training loop over the batches of a run; ``order`` -1 reverses each."""
    plan, options = TrainingPlan(run.config), run.config.optimizer
    params = [[p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    groups = [{"params": group} for group in params if group]
    betas = (options.adam_beta1, options.adam_beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=options.adam_eps)
    data, size = run_data(run), plan.micro_batch_size
    samples = data.datasets.train
    assert samples is not None
    model.train()
    losses = []
    for iteration in range(plan.train_iters):
        first = iteration * size
        batch = data.collate([samples[i] for i in range(first, first + size)][::order])
        progress = plan.progress(iteration, first)
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate(progress)
            decays = group["params"][0].ndim > 1
            group["weight_decay"] = plan.weight_decay(progress) if decays else 0.0
        loss = peer.losses(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def plot(curves: dict[str, Curves], path: Path) -> None:
    """Writes a panel for each model: the curves, and below them their difference."""
    from pictures import FIRST, new_figure, save

    figure = new_figure(5)
    panels = figure.subplots(2, len(curves), sharex=True, height_ratios=[3, 2], squeeze=False)
    for (name, each), upper, lower in zip(curves.items(), *panels, strict=True):
        steps = np.arange(1, len(each.here) + 1)
        upper.plot(steps, each.transformers, color="#e0a030", linewidth=4, label="transformers")
        upper.plot(steps, each.here, color=FIRST, linewidth=1.2, label="here")
        upper.set_title(name, loc="left")
        for other, color, label in (
            (each.reordered, "#e0a030", "samples reversed"),
            (each.here, FIRST, "here"),
        ):
            differences = np.maximum(relative(other, each.transformers), 1e-9)
            lower.semilogy(steps, differences, ".", color=color, markersize=2.5, label=label)
        lower.set_xlabel("step")
        for axes in (upper, lower):
            axes.grid(axis="y", alpha=0.3)
    panels[0, 0].set_ylabel("loss, nats")
    panels[1, 0].set_ylabel("difference from\ntransformers")
    panels[1, -1].legend(frameon=False, markerscale=3, fontsize=7, loc="center")
    panels[0, 0].legend(frameon=False)
    save(figure, path)


def main() -> int:
    options = parser().parse_args()
    torch.set_num_threads(1)
    tokens = len(Path(options.vocab_file).read_text().splitlines()) + EXTRA_IDS + 2
    rows = -(-tokens // ROWS) * ROWS
    argv = data_flags(options)
    known, found = peers(options.layers, options.hidden_size), {}
    print("| model | first loss | last | difference | samples reversed |\n|---|---|---|---|---|")
    for name in options.models or known:
        found[name] = curves = compare(known[name], argv, rows)
        first, last = curves.here[0], curves.here[-1]
        shown = f"{first:.4f} | {last:.4f} | {curves.difference:.1e} | {curves.rounding:.1e}"
        print(f"| {name} | {shown} |", flush=True)
    if options.plot:
        plot(found, Path(options.plot))
    if options.json:
        content = {name: vars(curves) for name, curves in found.items()}
        Path(options.json).write_text(json.dumps(content, indent=1))
    return 0


def parser() -> argparse.ArgumentParser:
    result = new_parser(__doc__, steps=100)
    add_data(result)
    result.add_argument("--models", nargs="+", choices=peers())
    result.add_argument("--layers", type=int, default=2)
    result.add_argument("--hidden-size", type=int, default=64)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
