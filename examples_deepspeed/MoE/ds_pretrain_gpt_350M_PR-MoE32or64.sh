#!/usr/bin/env bash
# A GPT of 350 million weights with a pyramid of 32 and 64 experts, each added to a dense MLP.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=0.35 LR=3.0e-4 MIN_LR=1.0e-6 BATCH_SIZE=4 EP_SIZE="32 32 32 32 32 32 32 32 32 32 64 64" \
    INIT_STD=0.014 LR_DECAY_TOKENS=300000000000 SAVE_INTERVAL=10000 NO_PP=true
PROCESSES=64 LENGTH=--train-iters TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
moe_gpt3 --mlp-type residual "$@"
