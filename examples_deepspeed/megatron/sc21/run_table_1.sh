#!/usr/bin/env bash
# Table 1: weak scaling from 1.7 billion weights on 32 GPUs to a trillion on 3072. MODEL_SIZE is 1.7B
# (default), 3.6B, 7.5B, 18B, 39B, 76B, 145B, 310B, 530B or 1T.
folder=$(realpath "$(dirname "$0")")
MODEL_SIZE=${MODEL_SIZE:-1.7B}

virtual="--num-layers-per-virtual-pipeline-stage"
case $MODEL_SIZE in #  TP PP MBS GBS layers width heads nodes DDP
    1.7B) size=(1 1 16 512 24 2304 24 4 torch "") ;;
    3.6B) size=(2 1 16 512 30 3072 32 8 torch "") ;;
    7.5B) size=(4 1 16 512 36 4096 32 16 torch "") ;;
    18B) size=(8 1 8 1024 40 6144 48 32 torch "") ;;
    39B) size=(8 2 4 1536 48 8192 64 64 local "") ;;
    76B) size=(8 4 2 1792 60 10240 80 128 local "$virtual 5") ;;
    145B) size=(8 8 2 2304 80 12288 96 192 local "$virtual 5") ;;
    310B) size=(8 16 1 2160 96 16384 128 240 local "$virtual 3") ;;
    530B) size=(8 35 1 2520 105 20480 128 315 local "$virtual 1") ;;
    1T) size=(8 64 1 3072 128 25600 160 384 local "") ;;
    *)
        echo "${0##*/}: error: MODEL_SIZE $MODEL_SIZE: one of the sizes in this file" >&2
        exit 2
        ;;
esac
TP=${TP:-${size[0]}} PP=${PP:-${size[1]}} MBS=${MBS:-${size[2]}} GBS=${GBS:-${size[3]}}
NLS=${NLS:-${size[4]}} HS=${HS:-${size[5]}} NAH=${NAH:-${size[6]}} NNODES=${NNODES:-${size[7]}}
DDP=${DDP:-${size[8]}}
MEGATRON_EXTRA_PARAMS=${MEGATRON_EXTRA_PARAMS---recompute-granularity full --recompute-method uniform ${size[9]}}
JOB_NAME=${JOB_NAME:-results_table_1_model_size_$MODEL_SIZE}

source "$folder/CONFIG.sh"
source "$folder/SBATCH.sh"
