#!/usr/bin/env bash
# A GPT of 1.3 billion weights with 128 experts in every second layer.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 LR=1.2e-4 MIN_LR=1.0e-6 BATCH_SIZE=8 EP_SIZE=128 \
    INIT_STD=0.014 LR_DECAY_TOKENS=300000000000 SAVE_INTERVAL=10000 NO_PP=true
PROCESSES=64 LENGTH=--train-iters TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
moe_gpt3 "$@"
