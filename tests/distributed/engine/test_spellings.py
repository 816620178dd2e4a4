"""Whole commands of other trainers and of older versions train as today's spelling does."""

import json
from pathlib import Path

import numpy as np
import pytest
from training_jobs import train

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.features.tokenizers.train import train_byte_level_bpe

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 6 "
    "--num-workers 0 --eval-iters 0 --peak-tflops 1 --weight-decay 1e-2 --clip-grad 1.0 "
    "--max-position-embeddings 16 --split 949,50,1 --log-interval 100"
)
SIZE = 300
"""Token ids of the vocabulary."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a vocabulary as a download leaves it, text, and the same text as tokens."""
    folder = tmp_path_factory.mktemp("spellings")
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer = train_byte_level_bpe(iter(texts), SIZE, 2)
    tokenizer.save_pretrained(folder / "gpt2")
    assert tokenizer.vocab_size == SIZE
    with open(folder / "text.json", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    with IndexedDatasetWriter(str(folder / "data"), np.dtype("<u2")) as writer:
        for text in texts:
            ids = np.array([*tokenizer.tokenize(text), tokenizer.eod], np.uint16)
            writer.add_document([ids])
    (folder / "corpora.json").write_text(json.dumps({"wikipedia": {"files": ["text.json"]}}))
    return folder


VOCABULARY = "--vocab-file {0}/gpt2/vocab.json --merge-file {0}/gpt2/merges.txt"
SCHEDULE = "--lr-decay-style cosine --min-lr 1e-5"
COMMANDS = {
    "2023": (
        f"--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 {SCHEDULE} --lr-warmup-fraction .5 "
        f"--fp16 --loss-scale 64 --data-path {{0}}/data {VOCABULARY} --data-impl mmap "
        "--DDP-impl local --use-distributed-optimizer --use-flash-attn --recompute-activations",
        f"--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 {SCHEDULE} --lr-warmup-iters 3 "
        f"--fp16 --loss-scale 64 --zero-stage 1 --data-path {{0}}/data {VOCABULARY} "
        "--tokenizer-type GPT2BPETokenizer --recompute-granularity selective",
    ),
    "2021": (
        f"--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 {SCHEDULE} --bf16 "
        f"--data-path {{0}}/data {VOCABULARY} --data-impl mmap "
        "--activations-checkpoint-method block --activations-checkpoint-num-layers 1 "
        "--checkpoint-activations "
        "--deepspeed-activation-checkpointing",
        f"--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 {SCHEDULE} --bf16 --zero-stage 1 "
        f"--data-path {{0}}/data {VOCABULARY} --tokenizer-type GPT2BPETokenizer "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ),
    "2019": (
        "--batch-size 4 --resume-dataloader --train-data wikipedia --lazy-loader "
        "--corpora-file {0}/corpora.json --tokenizer-type GPT2BPETokenizer --cache-dir {0} "
        f"--distributed-backend nccl --lr 1e-2 {SCHEDULE} --warmup .5 --model-parallel-size 1 "
        "--fp16 --loss-scale 64 --fp32-embedding --fp32-layernorm --fp32-tokentypes --deep-init "
        "--checkpoint-activations --checkpoint-num-layers 2",
        f"--micro-batch-size 4 --data-path {{0}}/text.json --tokenizer-type GPT2BPETokenizer "
        f"{VOCABULARY} --lr 1e-2 {SCHEDULE} --lr-warmup-iters 3 --fp16 --loss-scale 64 "
        "--zero-stage 1 --recompute-granularity full --recompute-num-layers 2",
    ),
    "OneFlow": (
        f"--micro-batch-size 2 --num-accumulation-steps 2 --learning-rate 1e-2 {SCHEDULE} "
        f"--dataset {{0}}/data --vocab-size {SIZE} --optimizer adamw --multihead-attention-fusion "
        "--initial-loss-scale 4096 --fp16 --use-rdma --metric-print-format table",
        f"--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 {SCHEDULE} --data-path {{0}}/data "
        f"--tokenizer-type NullTokenizer --vocab-size {SIZE - 1} --optimizer adam "
        "--initial-loss-scale 4096 --fp16 --zero-stage 1",
    ),
}


SAMPLE = ("2019", "2023")
"""Those that `make test` runs; `make proof` runs all."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.proof] * (name not in SAMPLE)) for name in COMMANDS],
)
def test_same_losses_bit_for_bit(pool, files, name):
    old, new = (
        pool.run(2, train, f"{SHAPE} {words.format(files)}".split())[0] for words in COMMANDS[name]
    )
    assert len(old.losses) == 6 and old.losses == new.losses
    assert old.losses[-1] < old.losses[0] - 0.2
    assert old.state.keys() == new.state.keys()
    assert all(np.array_equal(old.state[key], new.state[key]) for key in old.state)


def test_a_run_starts_again_from_its_initial_state(pool, files, tmp_path):
    words = f"{SHAPE} {COMMANDS['OneFlow'][0].format(files)}".split()
    saved = pool.run(2, train, [*words, "--save", str(tmp_path), "--save-init", "--save-last"])[0]
    assert {path.name for path in tmp_path.glob("global_step*")} == {"global_step0", "global_step6"}
    again = pool.run(2, train, [*words, "--load", str(tmp_path / "global_step0")])[0]
    assert len(again.losses) == 6 and again.losses == saved.losses
