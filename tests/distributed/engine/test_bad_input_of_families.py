"""Bad input to BERT and T5 ends with exit status 2, a message that names what is wrong and what to
do, and nothing in the folder of the run."""

import contextlib
import io
import sys

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter

WORDS = [f"word{n}" for n in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 2 --num-workers 0 "
    "--eval-iters 0 --peak-tflops 1 --split 100,0,0"
).split()
BERT = ["pretrain_bert", *RUN, "--seq-length", "32"]
T5 = ["pretrain_t5", *RUN, "--encoder-seq-length", "32", "--decoder-seq-length", "16"]
GPT = ["pretrain_gpt", *RUN, "--seq-length", "32"]


def run_main(program, argv):
    """(exit status, stderr) of a program with these flags; for the pool."""
    from megatron.run.process import errors_for_users
    from megatron.run.run import parse_run
    from megatron.training.build import train

    errors = io.StringIO()
    sys.argv = [f"{program}.py", *argv]
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            with errors_for_users():
                train(parse_run(None, family=program.removeprefix("pretrain_")))
        except SystemExit as exit:
            return exit.code, errors.getvalue()
    return 0, errors.getvalue()


def run(pool, argv):
    program, *words = (str(word) for word in argv)
    return pool.run(1, run_main, program, words)[0]


def refused(pool, argv, *parts, save=None):
    """The message; nothing but a lock may come into being in ``save``."""
    argv = [*argv, "--save", save] if save is not None else argv
    status, errors = run(pool, argv)
    assert status == 2, errors
    assert "Traceback" not in errors
    message = errors.strip().splitlines()[-1]
    for part in parts:
        assert str(part) in message, message
    assert save is None or {path.name for path in save.glob("*")} <= {".lock"}
    return message


def vocabulary(path, *left_out):
    path.write_text("".join(f"{t}\n" for t in [*SPECIAL, *WORDS] if t not in left_out))
    return path


def write(prefix, sentences, documents=30):
    """Documents of so many sentences of eight tokens."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        for _ in range(documents):
            tokens = rng.integers(5, 60, (sentences, 8)).astype(np.uint16)
            writer.add_document(list(tokens))
    return prefix


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A vocabulary, a corpus of sentences, one of whole documents, and one without text."""
    folder = tmp_path_factory.mktemp("made")
    vocabulary(folder / "vocab.txt")
    write(folder / "sentence", 6)
    write(folder / "document", 1)
    write(folder / "empty", 0)
    return folder


def data(made, name="sentence", vocab="vocab.txt"):
    return ["--data-path", made / name, "--vocab-file", made / vocab]


def test_documents_instead_of_sentences(pool, made, tmp_path):
    refused(
        pool,
        [*BERT, *data(made, "document")],
        *(made / "document", "split into sentences", "--split-sentences", "--bert-no-binary-head"),
        save=tmp_path / "save",
    )


@pytest.mark.parametrize("token", ["[CLS]", "[SEP]", "[MASK]", "[PAD]"])
def test_a_vocabulary_without_a_special_token(pool, made, tmp_path, token):
    file = vocabulary(tmp_path / "vocab.txt", token)
    flags = ["--data-path", made / "sentence", "--vocab-file", file]
    parts = (file, f"({token[1:-1].lower()})", "it must list [PAD], [CLS], [SEP] and [MASK]")
    refused(pool, [*BERT, *flags], *parts, save=tmp_path / "save")


def test_too_few_sentinels(pool, made, tmp_path):
    save = tmp_path / "save"
    refused(pool, [*T5, *data(made)], "0 sentinels", "--vocab-extra-ids 2 or more", save=save)
    few = [*T5, *data(made), "--vocab-extra-ids", "1"]
    refused(pool, few, "1 sentinels", "--vocab-extra-ids 2 or more", save=save)


@pytest.mark.parametrize(
    ("command", "flag"),
    [(BERT, "seq-length"), (T5, "encoder-seq-length"), (T5, "decoder-seq-length")],
)
def test_longer_than_the_position_table(pool, made, tmp_path, command, flag):
    longer = [*command, *data(made), "--vocab-extra-ids", "9", f"--{flag}", "40"]
    shown = "seq-length 40" if flag == "encoder-seq-length" else f"--{flag} 40"
    refused(pool, longer, shown, "--max-position-embeddings 32", save=tmp_path / "save")


FLAGS_OF_OTHERS = [
    (GPT, "--bert-no-binary-head", "family gpt"),
    (GPT, "--num-tokentypes 2", "family gpt"),
    (GPT, "--lm-head-activation relu", "family gpt"),
    (GPT, "--mask-prob 0.2", "data are not masked"),
    (GPT, "--max-ngrams 2", "data are not masked"),
    (GPT, "--decoder-seq-length 16", "an encoder and a decoder"),
    (GPT, "--decoder-num-layers 2", "an encoder and a decoder"),
    (GPT, "--pipeline-model-parallel-split-rank 1", "no decoder"),
    (BERT, "--decoder-seq-length 16", "an encoder and a decoder"),
    (BERT, "--mean-noise-span-length 2", "family bert"),
    (BERT, "--reset-attention-mask", "family bert"),
    (BERT, "--fim-data", "family bert"),
    (T5, "--max-preds-per-seq 5", "family t5"),
    (T5, "--bert-no-binary-head", "family t5"),
    (T5, "--no-whole-word-masking", "family t5"),
    (T5, "--lm-head-activation relu", "family t5"),
    (T5, "--eod-mask-loss", "family t5"),
]


@pytest.mark.parametrize(
    ("command", "flag", "reason"),
    FLAGS_OF_OTHERS,
    ids=[f"{c[0]} {f}" for c, f, _ in FLAGS_OF_OTHERS],
)
def test_flags_of_another_family(pool, made, tmp_path, command, flag, reason):
    argv = [*command, *flag.split(), *data(made), "--vocab-extra-ids", "9"]
    if command is GPT:
        argv += ["--tokenizer-type", "BertWordPieceLowerCase"]
    refused(pool, argv, flag.split()[0], reason, save=tmp_path / "save")


def test_records_are_complete(pool, made):
    """They are not packed, and have two segments whether the model tells them apart or not."""
    records = [*BERT, *data(made), "--use-tfrecords", "--bert-no-binary-head"]
    refused(pool, [*records, "--bert-packing"], "--bert-packing", "TFRecord")
    refused(pool, [*records, "--num-tokentypes", "1"], "--num-tokentypes 1", "TFRecord")


def test_data_that_cannot_be_used(pool, made, tmp_path):
    save = tmp_path / "save"
    for command in (BERT, [*T5, "--vocab-extra-ids", "9"]):
        refused(pool, [*command, *data(made, "absent")], "--data-path", "absent", save=save)
        refused(pool, [*command, *data(made, "empty")], made / "empty", "no tokens", save=save)
    cut = write(tmp_path / "cut", 4)
    file = cut.with_suffix(".bin")
    file.write_bytes(file.read_bytes()[:-2])
    flags = ["--data-path", cut, "--vocab-file", made / "vocab.txt"]
    refused(pool, [*BERT, *flags], "cut.bin", save=save)


def test_checkpoints_of_another_family(pool, made, tmp_path):
    """In both directions; what they would write is not begun."""
    wordpiece = ["--tokenizer-type", "BertWordPieceLowerCase"]
    commands = {
        "gpt": [*GPT, *data(made), *wordpiece],
        "bert": [*BERT, *data(made)],
        "t5": [*T5, *data(made), "--vocab-extra-ids", "9"],
    }
    for name, argv in commands.items():
        status, errors = run(pool, [*argv, "--save", tmp_path / name])
        assert status == 0, errors
    for name, argv in commands.items():
        for other in sorted(set(commands) - {name}):
            load = [*argv, "--load", tmp_path / other]
            words = (f"family '{other}'", f"trains '{name}'", tmp_path / other)
            refused(pool, load, *words, save=tmp_path / "save")
