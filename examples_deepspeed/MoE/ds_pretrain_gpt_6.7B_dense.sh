#!/usr/bin/env bash
# A dense GPT of 6.7 billion weights, to compare experts with: fp16, ZeRO 0.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=6.7 BATCH_SIZE=4 MP_SIZE=8 INIT_STD=0.01
PROCESSES=64 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
defaults RAMPUP_BATCH_SIZE="32 32 4882812"
moe_gpt3 "$@"
