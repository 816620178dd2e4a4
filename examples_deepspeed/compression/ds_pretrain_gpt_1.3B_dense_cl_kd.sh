#!/usr/bin/env bash
# A student of 21 layers of the 1.3B GPT, taught by the whole one, with samples that grow.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 GLOBAL_BATCH_SIZE=4096 BATCH_SIZE=16 MP_SIZE=2 LR=8.0e-4 MIN_LR=2.0e-5
PROCESSES=128 START=80
distilled_gpt3 21 "$@"
