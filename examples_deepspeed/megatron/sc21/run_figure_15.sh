#!/usr/bin/env bash
# Figure 15: a GPT of 5.9 billion weights on 64 GPUs, tensor against data parallelism.
# TP is 2 (default), 4, 8, 16 or 32, the data-parallel size 64 / TP; GBS 32 (default), 128 or 512.
folder=$(realpath "$(dirname "$0")")
TP=${TP:-2} GBS=${GBS:-32}

PP=${PP:-1} MBS=${MBS:-1} NLS=${NLS:-32} HS=${HS:-3840} NAH=${NAH:-32} DDP=${DDP:-local}
NNODES=${NNODES:-8}
MEGATRON_EXTRA_PARAMS=${MEGATRON_EXTRA_PARAMS---recompute-granularity full --recompute-method uniform}
JOB_NAME=${JOB_NAME:-results_figure_15_tensor_parallel_size_${TP}_data_parallel_size_$((64 / TP))_batch_size_$GBS}

source "$folder/CONFIG.sh"
source "$folder/SBATCH.sh"
