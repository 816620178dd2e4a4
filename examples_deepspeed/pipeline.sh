#!/usr/bin/env bash
# GPT-2 with 345 million weights, its 24 blocks cut over two processes that hold three stages of four
# blocks each and take turns on them (interleaved); ZeRO 1 over the replicas of those pairs.
# On CPU: LAUNCHER=torchrun GPUS=2.
source "$(dirname "$0")/common.sh"

# shellcheck disable=SC2086
pretrain gpt2-345m-pp2 ${MODEL[gpt2-345m]} --pipeline-model-parallel-size 2 \
    --num-layers-per-virtual-pipeline-stage 4 \
    --deepspeed_config deepspeed_configs/ds_pipeline.json --bf16 \
    --micro-batch-size 8 --global-batch-size 512 --train-iters 20000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 700 \
    --weight-decay 0.1 --adam-beta2 0.95 "$@"
