#!/usr/bin/env bash
# Megatron-LM's script: pretrains a retriever of two BERTs by the inverse cloze task (ICT) on one
# process, from the BERT in PRETRAINED_BERT_PATH. TEXT_DATA_PATH and TITLE_DATA_PATH are prefixes of
# tools/preprocess_data.py --json-keys text title --split-sentences.
source "$(dirname "$0")/megatron.sh"

checkpoint=${CHECKPOINT_PATH:-checkpoints/ict}
retriever 1 pretrain_ict.py --micro-batch-size 32 --seq-length 256 --train-iters 100000 \
    --bert-load "${PRETRAINED_BERT_PATH:-checkpoints/bert_110m}" --load "$checkpoint" \
    --save "$checkpoint" --data-path "${TEXT_DATA_PATH:-data/wikipedia_text_sentence}" \
    --titles-data-path "${TITLE_DATA_PATH:-data/wikipedia_title_sentence}" --log-interval 100 \
    --eval-interval 1000 --eval-iters 10 --retriever-report-topk-accuracies 1 5 10 20 100 \
    --retriever-score-scaling --lr 0.0001 --lr-decay-style linear --weight-decay 1e-2 \
    --clip-grad 1.0 --lr-warmup-fraction 0.01 --save-interval 4000 --exit-interval 8000 \
    --query-in-block-prob 0.1 "$@"
