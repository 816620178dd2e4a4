#!/usr/bin/env bash
# What the scripts of Megatron-LM's first release (2019) share. Not run by itself:
#
#     source "$(dirname "$0")/common.sh"
#     pretrain_gpt2 PROCESSES FOLDER --flag value ... "$@"
#     pretrain_bert PROCESSES FOLDER --flag value ... "$@"
#
# Settings, from the environment: LAUNCHER, HOSTFILE and DRY_RUN of examples_deepspeed/common.sh,
# and the names of 2019: GPUS_PER_NODE (or GPUS), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT. Of a
# flag that comes twice the last one counts.
source "$(dirname "${BASH_SOURCE[0]}")/../examples_deepspeed/common.sh"

# A model of 24 layers and 1024 channels. Of `--train-data wikipedia`, PATH of the class wikipedia in
# data_utils/corpora.py names the file.
pretrain_2019() { # PROGRAM PROCESSES FOLDER --flag value ...
    local LAUNCH=() GPUS=${GPUS_PER_NODE:-${GPUS:-$2}} NODES=${NNODES:-1}
    local MASTER_PORT=${MASTER_PORT:-6000} LAUNCHER=${LAUNCHER:-torchrun}
    launcher
    run "${LAUNCH[@]}" "$1" --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
        --save "checkpoints/$3" --load "checkpoints/$3" --resume-dataloader --cache-dir cache \
        --distributed-backend nccl --weight-decay 1e-2 --clip-grad 1.0 --warmup .01 --fp16 "${@:4}"
}

# GPT-2's vocab.json and merges.txt are in the folder cache/.
pretrain_gpt2() {
    pretrain_2019 pretrain_gpt2.py "$1" "$2" --batch-size 8 --seq-length 1024 \
        --max-position-embeddings 1024 --train-iters 320000 --train-data wikipedia --lazy-loader \
        --tokenizer-type GPT2BPETokenizer --split 949,50,1 --lr 0.00015 --lr-decay-style cosine \
        --checkpoint-activations "${@:3}"
}

pretrain_bert() {
    pretrain_2019 pretrain_bert.py "$1" "$2" --batch-size 4 --seq-length 512 \
        --max-preds-per-seq 80 --max-position-embeddings 512 --train-iters 1000000 --lr 0.0001 \
        --lr-decay-style linear --lr-decay-iters 990000 --fp32-embedding "${@:3}"
}

# shellcheck disable=SC2034 # the scripts read these
# Sentences of Wikipedia, one a line.
wikipedia=(--train-data wikipedia --lazy-loader --presplit-sentences --split "949,50,1")
# shellcheck disable=SC2034
# bert-large-uncased-vocab.txt, or vocab.txt, is in the folder cache/.
wordpiece=(--tokenizer-type BertWordPieceTokenizer --tokenizer-model-type bert-large-uncased)
