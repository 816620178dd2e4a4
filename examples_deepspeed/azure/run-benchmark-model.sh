#!/usr/bin/env bash
# One layer of the 175B model on two nodes for 50 steps, to measure speed.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults NLAYERS=1 HIDDEN=12288 HEADS=96 MICRO_BATCH=4 ITERATIONS=50
azure_gpt 2 "$@"
