#!/usr/bin/env bash
# Continues a run, also on another number of processes or at another ZeRO stage. Model and
# tokenizer come from the checkpoint; batch, length and schedule are given again:
#
#     DATA_PATH=data/corpus_text_document examples_deepspeed/resume.sh runs/gpt2-125m \
#         --deepspeed_config deepspeed_configs/ds_zero3.json --bf16 --micro-batch-size 4 \
#         --global-batch-size 512 --train-iters 30000 --lr 6e-4
#
# (A pretraining script that is started again resumes by itself.)
source "$(dirname "$0")/common.sh"

(($#)) || fail "the folder of checkpoints is missing: resume.sh runs/NAME [FLAG ...]"
folder=$1
shift
FLAGS=()
data
start pretrain_gpt.py "${FLAGS[@]}" --use-checkpoint-args --load "$folder" --save "$folder" --save-interval 1000 \
    --tensorboard-dir "$folder/tensorboard" --log-interval 10 --eval-iters 20 "$@"
