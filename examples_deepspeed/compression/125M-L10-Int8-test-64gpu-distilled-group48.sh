#!/usr/bin/env bash
# W4A8 quantization-aware training of a distilled model of 10 layers,
# which LOAD_PATH names: weights go from 12 to 4 bits in 48 groups, activations to 8 (not "Int8").
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults NUM_LAYERS=10
quantized_gpt3 "$@"
