#!/usr/bin/env bash
# Megatron-LM's script: fine-tunes a retriever on Natural Questions, data parallel over 8 processes,
# from a BERT (BERT_LOAD_PATH), or else a retriever (PRETRAINED_CHECKPOINT). The questions are DPR's JSON
# files, which you have to supply: TRAIN_DATA, VALID_DATA.
source "$(dirname "$0")/megatron.sh"

checkpoint=${CHECKPOINT_PATH:-checkpoints/retriever_nq} LAUNCHER=${LAUNCHER:-torchrun}
begin=(--pretrained-checkpoint "${PRETRAINED_CHECKPOINT:-checkpoints/ict}")
[[ -z ${BERT_LOAD_PATH:-} ]] || begin=(--bert-load "$BERT_LOAD_PATH")
retriever 8 tasks/main.py --task RET-FINETUNE-NQ --train-with-neg --train-hard-neg 1 \
    "${begin[@]}" \
    --train-data "${TRAIN_DATA:-nq-train.json}" --valid-data "${VALID_DATA:-nq-dev.json}" \
    --save "$checkpoint" --load "$checkpoint" \
    --save-interval 5000 --log-interval 10 \
    --eval-interval 25000 --eval-iters 100 --indexer-log-interval 1000 --faiss-use-gpu \
    --retriever-report-topk-accuracies 1 5 10 20 100 --seq-length 512 --retriever-score-scaling \
    --epochs 80 --micro-batch-size 8 --eval-micro-batch-size 16 --indexer-batch-size 128 --lr 2e-5 \
    --lr-warmup-fraction 0.01 --weight-decay 1e-1 "$@"
