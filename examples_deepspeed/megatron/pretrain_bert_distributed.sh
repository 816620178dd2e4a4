#!/usr/bin/env bash
# Megatron-LM's script of 2023: BERT with 345 million weights, data parallel over 8 processes.
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/megatron.sh"

megatron_lm_bert 8 --train-iters 1000000 --micro-batch-size 4 --global-batch-size 32 "$@"
