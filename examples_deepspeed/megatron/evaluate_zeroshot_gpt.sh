#!/usr/bin/env bash
# Megatron-LM's script: a task without training, with GPT of 345 million weights, data parallel over
# 8 processes. TASK is LAMBADA (default; the path of VALID_DATA has to contain "lambada"),
# WIKITEXT103 or RAW.
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/megatron.sh"

FLAGS=()
vocabulary gpt
task_data --valid-data VALID_DATA "${VALID_DATA:-}"
[[ ${TASK:=LAMBADA} != LAMBADA ]] || FLAGS+=(--strict-lambada)
# shellcheck disable=SC2086
megatron_lm_task 8 "$TASK" ${MODEL[gpt2-345m]} --tokenizer-type GPT2BPETokenizer \
    --load "${CHECKPOINT_PATH:-checkpoints/gpt2_345m}" --micro-batch-size 8 --log-interval 10 \
    --no-load-optim --no-load-rng "$@"
