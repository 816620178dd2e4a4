#!/usr/bin/env bash
# BERT on one GPU with a SentencePiece vocabulary. A missing tokenizer.model is trained on the run's
# text; its pieces are in tokenizer.vocab.
source "$(dirname "$0")/common.sh"

LAUNCHER=${LAUNCHER:-python} pretrain_bert 1 bert_345m "${wikipedia[@]}" --vocab-size 30522 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model-type bpe \
    --tokenizer-path tokenizer.model "$@"
