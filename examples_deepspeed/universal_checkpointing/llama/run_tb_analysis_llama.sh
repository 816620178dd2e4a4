#!/usr/bin/env bash
# Megatron-DeepSpeed's comparison of the Llama's runs: run_tb_analysis_llama.sh [FOLDER]
# (z1_uni_ckpt/tensorboard/llama). Writes what ../megatron_gpt/run_tb_analysis_gpt.sh does, into the
# current folder.
folder=$(dirname "$(realpath "$0")")
set -- "${1:-z1_uni_ckpt/tensorboard/llama}"
source "$folder/../megatron_gpt/run_tb_analysis_gpt.sh"
