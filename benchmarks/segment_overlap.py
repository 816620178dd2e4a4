#!/usr/bin/env python
"""Accuracy of shared words alone in telling a next segment from a random one.

    python benchmarks/segment_overlap.py --data runs/train_text_sentence --vocab-file vocab.txt

Pairs of segments are those that pretrain_bert.py makes with --bert-pair-task next-sentence. A
logistic regression is fitted to half of them, on the words that both segments have, rare ones
counting more, and on the lengths. Printed are its accuracy and loss, in nats, on the other half:
what the second head can reach when attention finds equal words (chance: 0.693). Needs
scikit-learn.
"""

import argparse
from collections import Counter

import numpy as np

from megatron.run.run import parse_run, run_data

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1 --lr 1 "
    "--eval-iters 0 --num-workers 0 --bert-pair-task next-sentence --no-whole-word-masking "
    "--short-seq-prob 0 --split 100,0,0 --tokenizer-type BertWordPieceLowerCase"
).split()


def main() -> int:
    options = parser().parse_args()
    # Here, so that the flags are known where it is not installed.
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    words = ["--data-path", options.data, "--vocab-file", options.vocab_file]
    words += ["--seq-length", str(options.seq_length), "--train-iters", str(options.samples)]
    run = parse_run(None, [*FLAGS, *words], "bert")
    samples = run_data(run).datasets.train
    assert samples is not None
    special = {run.tokenizer.cls, run.tokenizer.sep}
    pairs, labels = [], []
    for number in range(options.samples):
        sample = samples[number]
        tokens, masked = sample.tokens_S, sample.loss_mask_S.astype(bool)
        tokens = np.where(masked, sample.labels_S, tokens)[: int(sample.padding_mask_S.sum())]
        types = sample.types_S[: len(tokens)]
        pairs.append([set(tokens[types == kind].tolist()) - special for kind in (0, 1)])
        labels.append(int(sample.is_random))
    counts = Counter(token for first, second in pairs for token in first | second)
    features = np.array([
        (sum(np.log(len(pairs) / counts[token]) for token in first & second),
         not first & second, len(first), len(second))
        for first, second in pairs
    ])  # fmt: skip
    half = len(pairs) // 2
    model = LogisticRegression(max_iter=1000).fit(features[:half], labels[:half])
    loss = log_loss(labels[half:], model.predict_proba(features[half:])[:, 1])
    accuracy = 100 * model.score(features[half:], labels[half:])
    print(f"{len(pairs) - half} pairs: accuracy {accuracy:.1f} %, loss {loss:.3f}")
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--data", required=True, metavar="PREFIX", help="of split sentences")
    result.add_argument("--vocab-file", required=True)
    result.add_argument("--seq-length", type=int, default=48)
    result.add_argument("--samples", type=int, default=6000)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
