#!/usr/bin/env bash
# W4A8 quantization-aware training of a trained model of 12 layers, the teacher of the others,
# which LOAD_PATH names: weights go from 12 to 4 bits in 48 groups, activations to 8 (not "Int8").
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults NUM_LAYERS=12
quantized_gpt3 "$@"
