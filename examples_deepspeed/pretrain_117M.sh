#!/usr/bin/env bash
# OneFlow GPT's script: 117 million weights, one process.
source "$(dirname "$0")/common.sh"

# shellcheck disable=SC2086
oneflow_gpt gpt-117M 1 ${MODEL[gpt2-125m]} --micro-batch-size 8 --global-batch-size 8 "$@"
