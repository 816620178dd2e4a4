#!/usr/bin/env bash
# A GPT of 1.3 billion weights with a pyramid of 64 and 128 experts, each added to a dense MLP.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 LR=1.2e-4 MIN_LR=1.0e-6 BATCH_SIZE=8 EP_SIZE="64 64 64 64 64 64 64 64 64 64 128 128" \
    INIT_STD=0.014 LR_DECAY_TOKENS=300000000000 SAVE_INTERVAL=10000 NO_PP=true ZERO_STAGE=2
PROCESSES=64 LENGTH=--train-iters TEMPLATE=$HERE/ds_config_gpt_Zero2_TEMPLATE.json
moe_gpt3 --mlp-type residual "$@"
