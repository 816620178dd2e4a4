#!/usr/bin/env bash
# OneFlow GPT's script: LAMBADA's accuracy of a GPT with 345 million weights, one process. The path
# of VALID_DATA has to contain "lambada".
source "$(dirname "$0")/common.sh"

FLAGS=()
vocabulary gpt
task_data --valid-data VALID_DATA "${VALID_DATA:-}"
LAUNCHER=${LAUNCHER:-python}
# shellcheck disable=SC2086
megatron_lm_task 1 LAMBADA ${MODEL[gpt2-345m]} --strict-lambada --tokenizer-type GPT2BPETokenizer \
    --load "${CHECKPOINT_PATH:-runs/gpt-345M}" --micro-batch-size 8 --log-interval 10 \
    --no-load-optim --no-load-rng "$@"
