#!/usr/bin/env bash
# The same with every layer's matrices cut over two GPUs.
source "$(dirname "$0")/common.sh"

pretrain_bert 8 bert_345m_mp2 --model-parallel-size 2 "${wikipedia[@]}" "${wordpiece[@]}" "$@"
