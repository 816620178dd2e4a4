#!/usr/bin/env bash
# Megatron-LM's script of 2023: BERT with 345 million weights, 8 processes: 2 tensor-parallel ranks,
# a pipeline of 2 stages, data parallel over 2.
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/megatron.sh"

megatron_lm_bert 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --train-iters 1000000 --micro-batch-size 2 --global-batch-size 16 "$@"
