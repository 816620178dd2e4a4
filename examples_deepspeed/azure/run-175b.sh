#!/usr/bin/env bash
# GPT-3 of 175 billion weights at ZeRO 3, samples of 1024 tokens.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults NLAYERS=96 HIDDEN=12288 HEADS=96 MICRO_BATCH=4 ITERATIONS=1000
azure_gpt 1 "$@"
