#!/usr/bin/env bash
# Figure 13: a GPT of 162 billion weights on 64 GPUs, pipeline against tensor parallelism.
# PP is 2 (default), 4, 8, 16 or 32, TP 64 / PP; GBS 32 (default) or 128.
folder=$(realpath "$(dirname "$0")")
PP=${PP:-2} GBS=${GBS:-32}

TP=${TP:-$((64 / PP))} MBS=${MBS:-1} NLS=${NLS:-32} HS=${HS:-20480} NAH=${NAH:-128} DDP=${DDP:-local}
NNODES=${NNODES:-8}
MEGATRON_EXTRA_PARAMS=${MEGATRON_EXTRA_PARAMS---recompute-granularity full --recompute-method uniform}
JOB_NAME=${JOB_NAME:-results_figure_13_pipeline_parallel_size_${PP}_tensor_parallel_size_${TP}_batch_size_$GBS}

source "$folder/CONFIG.sh"
source "$folder/SBATCH.sh"
