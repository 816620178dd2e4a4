#!/usr/bin/env bash
# W4A8 quantization-aware training of a distilled model of 10 layers,
# which LOAD_PATH names: weights go from 12 to 4 bits in 48 groups, activations to 8 (not "Int8").
source "$(dirname "$0")/../megatron_deepspeed.sh"

waits_for "quantization-aware training (compression_training in the JSON)"
defaults MODEL_SIZE=0.125 NUM_LAYERS=10 LR=6.0e-5 MIN_LR=6.0e-5 BATCH_SIZE=4 \
    TRAIN_TOKENS=5250000000 ACTIVATION_CHECKPOINT=false CL_ENABLED=false LOAD_PATH=trained
PROCESSES=64 LOAD=$LOAD_PATH PREFIX=gpt3-w4a8 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE_compression.json
curriculum_gpt3 --no-load-lr-state --reset-iteration "$@"
