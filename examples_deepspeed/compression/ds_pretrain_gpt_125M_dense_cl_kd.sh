#!/usr/bin/env bash
# A student of 10 layers of the 125M GPT, taught by the whole one, with samples that grow.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=0.125 GLOBAL_BATCH_SIZE=2048 BATCH_SIZE=8 LR=2.4e-3 MIN_LR=6.0e-5
PROCESSES=64
distilled_gpt3 10 "$@"
