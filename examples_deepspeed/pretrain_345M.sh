#!/usr/bin/env bash
# OneFlow GPT's script: 345 million weights, one process.
source "$(dirname "$0")/common.sh"

# shellcheck disable=SC2086
oneflow_gpt gpt-345M 1 ${MODEL[gpt2-345m]} --micro-batch-size 8 --global-batch-size 8 "$@"
