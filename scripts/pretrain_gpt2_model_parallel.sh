#!/usr/bin/env bash
# The same with every layer's matrices cut over two GPUs.
source "$(dirname "$0")/common.sh"

pretrain_gpt2 8 gpt2_345m_mp2 --model-parallel-size 2 "$@"
