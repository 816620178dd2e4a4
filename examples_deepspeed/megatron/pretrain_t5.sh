#!/usr/bin/env bash
# Megatron-LM's script of 2023: T5 with 220 million weights, one process.
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/megatron.sh"

megatron_lm_t5 1 --micro-batch-size 16 --global-batch-size 16 "$@"
