#!/usr/bin/env bash
# Reads prompts until "stop", and continues each with the model of CHECKPOINT_PATH.
source "$(dirname "$0")/../examples_deepspeed/common.sh"

run python tools/generate.py --load "${CHECKPOINT_PATH:-checkpoints/gpt2_345m}" \
    --temperature 0.9 --max-new-tokens 256 "$@"
