#!/usr/bin/env bash
# What the scripts of Megatron-LM's first release (2019) share. Not run by itself:
#
#     source "$(dirname "$0")/common.sh"
#     pretrain_gpt2 PROCESSES FOLDER --flag value ... "$@"
#
# Settings, from the environment: LAUNCHER, HOSTFILE and DRY_RUN of examples_deepspeed/common.sh,
# and the names of 2019: GPUS_PER_NODE (or GPUS), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT. Of a
# flag that comes twice the last one counts.
source "$(dirname "${BASH_SOURCE[0]}")/../examples_deepspeed/common.sh"

# The 345M model on Wikipedia: PATH of the class wikipedia in data_utils/corpora.py names its file,
# and GPT-2's vocab.json and merges.txt are in the folder cache/.
pretrain_gpt2() {
    local LAUNCH=() GPUS=${GPUS_PER_NODE:-${GPUS:-$1}} NODES=${NNODES:-1}
    local MASTER_PORT=${MASTER_PORT:-6000} LAUNCHER=${LAUNCHER:-torchrun}
    launcher
    run "${LAUNCH[@]}" pretrain_gpt2.py --num-layers 24 --hidden-size 1024 \
        --num-attention-heads 16 --batch-size 8 --seq-length 1024 --max-position-embeddings 1024 \
        --train-iters 320000 --save "checkpoints/$2" --load "checkpoints/$2" --resume-dataloader \
        --train-data wikipedia --lazy-loader --tokenizer-type GPT2BPETokenizer --cache-dir cache \
        --split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine \
        --weight-decay 1e-2 --clip-grad 1.0 --warmup .01 --checkpoint-activations --fp16 "${@:3}"
}
