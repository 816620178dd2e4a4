#!/usr/bin/env bash
# What the scripts of this folder share: models, the launcher, folders. Not run by itself:
#
#     source "$(dirname "$0")/common.sh"
#     pretrain NAME --flag value ... "$@"        trains; everything goes to $RUNS/NAME
#     megatron_lm PROGRAM --flag value ... "$@"  as Megatron-LM's scripts of 2023 do
#     megatron_lm_task PROCESSES TASK --flag value ... "$@"    those that run tasks/main.py
#     oneflow_gpt NAME --flag value ... "$@"     as OneFlow GPT's scripts do
#
# Settings, from the environment:
#
#     DATA_PATH    prefix of the .bin/.idx pair, or "WEIGHT PREFIX WEIGHT PREFIX ..."
#     VOCAB_FILE, MERGE_FILE    a GPT-2 vocabulary (vocab.json, merges.txt); BERT and T5 have
#                  VOCAB_FILE alone (vocab.txt)
#     TOKENIZER    the folder of a Hugging Face tokenizer, which comes before those two
#     RUNS         folder of all runs (default: runs)
#     CHECKPOINT_PATH    Megatron-LM's scripts: folder of the checkpoints
#     TRAIN_DATA, VALID_DATA    of tasks/main.py: paths, separated by spaces
#     PRETRAINED_CHECKPOINT     the BERT that a fine-tuning starts from
#     ONEFLOW_GPT_NODE_IPS, ONEFLOW_GPT_DATASET    OneFlow GPT's: the nodes; as DATA_PATH
#                  (paths are relative to where the script is started, or else to the project)
#     LAUNCHER     deepspeed (default), torchrun or python (one process)
#     GPUS         processes on each node (default: as many as there are GPUs)
#     HOSTFILE     deepspeed: the nodes and their slots; INCLUDE or EXCLUDE choose among them
#     MIN_NODES    with HOSTFILE: leave out nodes that do not answer, as long as so many remain
#     DEEPSPEED_FLAGS    further flags of deepspeed, such as "--launcher openmpi"
#     NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT    torchrun on several nodes; NODES=2:4 is a number
#                  that may change during the run (JOB_ID tells one such run from others)
#     DOCTOR=1     examine the nodes first (tools/doctor.py), and start nothing if something is wrong
#     RESTARTS     how often a run that has failed is started again (default: 0)
#     DRY_RUN=1    print the command, do not run it

# shellcheck disable=SC2034 # the scripts read MODEL
set -euo pipefail
STARTED_IN=${STARTED_IN:-$PWD}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A path of the caller: of files, or the prefix of files, in the folder where the script was started.
from_caller() { # PATH
    if [[ -n $1 && $1 != /* ]] && [[ -e $STARTED_IN/$1 || -e $STARTED_IN/$1.bin ]]; then
        echo "$STARTED_IN/$1"
    else
        echo "$1"
    fi
}

# Relative paths in settings and flags are those of the caller, whose folder need not be this one.
# Folders that a run writes are in it, too; what is not there is in the project.
if [[ $STARTED_IN != "$PWD" ]]; then
    for name in DATA_PATH DATA_BLEND MEGATRON_DATA TRAIN_DATA VALID_DATA VOCAB_FILE VOCAB_PATH \
        vocab_path MERGE_FILE MERGE_PATH merge_path TOKENIZER HOSTFILE \
        TOKENIZER_PATH BPE_VOCAB_FILE BPE_MERGE_FILE BASE BASE_PATH BASE_DATA_PATH DATA_HOME DATA_DIR \
        PRETRAINED_CHECKPOINT LOAD_PATH CHECKPOINT CHECKPOINT_PATH_TEACHER CONFIG_PATH DATASET_1 \
        TEXT_DATA_PATH TITLE_DATA_PATH; do
        [[ -z ${!name:-} ]] || printf -v "$name" %s "$(from_caller "${!name}")"
    done
    for name in RUNS OUTPUT_BASEPATH OUTPUT_PATH output_home CHECKPOINT_PATH RESULT_PATH TENSORBOARD_DIR \
        TENSORBOARD_PATH; do
        [[ -z ${!name:-} || ${!name} == /* ]] || printf -v "$name" %s "$STARTED_IN/${!name}"
    done
    of_caller=()
    for word in "$@"; do
        case $word in
            --*=*/*) of_caller+=("${word%%=*}=$(from_caller "${word#*=}")") ;;
            */*) of_caller+=("$(from_caller "$word")") ;;
            *) of_caller+=("$word") ;;
        esac
    done
    set -- "${of_caller[@]}"
fi
# shellcheck source=/dev/null
source examples_deepspeed/await.sh

GPT2="--max-position-embeddings 1024 --seq-length 1024"
LLAMA="--use-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"

# Published shapes; MODEL[name] is meant to be split into words.
declare -A MODEL=(
    [gpt2-125m]="$GPT2 --num-layers 12 --hidden-size 768 --num-attention-heads 12"
    [gpt2-345m]="$GPT2 --num-layers 24 --hidden-size 1024 --num-attention-heads 16"
    [gpt2-1.5b]="$GPT2 --num-layers 48 --hidden-size 1600 --num-attention-heads 25"
    [gpt3-175b]="--max-position-embeddings 2048 --seq-length 2048 --num-layers 96
        --hidden-size 12288 --num-attention-heads 96 --init-method-std 0.006"
    [bert-base]="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512
        --max-position-embeddings 512"
    [bert-345m]="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
        --max-position-embeddings 512"
    [t5-220m]="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64
        --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128
        --max-position-embeddings 512"
    [llama-1b]="$LLAMA --num-layers 22 --hidden-size 2048 --ffn-hidden-size 5632
        --num-attention-heads 32 --num-query-groups 4 --seq-length 2048"
    [llama-8b]="$LLAMA --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
        --num-attention-heads 32 --num-query-groups 8 --rotary-base 500000 --seq-length 8192"
    [mixtral-8x7b]="$LLAMA --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
        --num-attention-heads 32 --num-query-groups 8 --rotary-base 1000000 --seq-length 4096
        --num-experts 8 --moe-router-topk 2"
    [qwen3-30b-a3b]="$LLAMA --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
        --num-attention-heads 32 --num-query-groups 4 --kv-channels 128 --qk-layernorm
        --rotary-base 1000000 --norm-epsilon 1e-6 --seq-length 4096
        --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768"
)

fail() {
    echo "${0##*/}: error: $*" >&2
    exit 2
}

tokenizer() {
    if [[ -n ${TOKENIZER:-} ]]; then
        FLAGS+=(--tokenizer-type HFTokenizer --tokenizer-model "$TOKENIZER")
    elif [[ -n ${VOCAB_FILE:-} && -n ${MERGE_FILE:-} ]]; then
        FLAGS+=(--tokenizer-type GPT2BPETokenizer)
        vocabulary gpt
    else
        fail "set TOKENIZER, or VOCAB_FILE and MERGE_FILE"
    fi
}

# The files of the usual tokenizer of a family.
vocabulary() {
    if [[ $1 == gpt ]]; then
        [[ -n ${VOCAB_FILE:-} && -n ${MERGE_FILE:-} ]] || fail "set VOCAB_FILE and MERGE_FILE"
        FLAGS+=(--vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
    else
        [[ -n ${VOCAB_FILE:-} ]] || fail "set VOCAB_FILE to BERT's vocab.txt"
        FLAGS+=(--vocab-file "$VOCAB_FILE")
    fi
}

# The paths in a setting, as the array PATHS; one that exists may have spaces.
paths_in() { # "PATH PATH ..."
    local word
    PATHS=("$(from_caller "$1")")
    [[ ! -e ${PATHS[0]} && ! -e ${PATHS[0]}.bin ]] || return 0
    PATHS=()
    for word in $1; do
        PATHS+=("$(from_caller "$word")")
    done
}

# One flag of tasks/main.py with the paths in a setting.
task_data() { # FLAG NAME PATHS
    [[ -n $3 ]] || fail "set $2 to the file, files or folders of the task"
    paths_in "$3"
    FLAGS+=("$1" "${PATHS[@]}")
}

data() {
    [[ -n ${DATA_PATH:-} ]] || fail "set DATA_PATH to the prefix of the .bin and .idx files"
    paths_in "$DATA_PATH"
    FLAGS+=(--data-path "${PATHS[@]}")
}

launcher() {
    local flags
    case ${LAUNCHER:-deepspeed} in
        deepspeed)
            if [[ -n ${HOSTFILE:-} ]]; then
                LAUNCH=(python tools/start_nodes.py --hostfile "$HOSTFILE")
                [[ -z ${INCLUDE:-} ]] || LAUNCH+=(--include "$INCLUDE")
                [[ -z ${EXCLUDE:-} ]] || LAUNCH+=(--exclude "$EXCLUDE")
                [[ -z ${MIN_NODES:-} ]] || LAUNCH+=(--min-nodes "$MIN_NODES")
                [[ -z ${GPUS:-} ]] || LAUNCH+=(--num-gpus "$GPUS")
                LAUNCH+=(deepspeed)
            else
                LAUNCH=(deepspeed)
                [[ -z ${GPUS:-} ]] || LAUNCH+=(--num_gpus "$GPUS")
            fi
            read -ra flags <<<"${DEEPSPEED_FLAGS:-}"
            LAUNCH+=("${flags[@]}")
            ;;
        torchrun)
            LAUNCH=(torchrun --nproc-per-node "${GPUS:-gpu}" --nnodes "${NODES:-1}")
            local address=${MASTER_ADDR:-127.0.0.1} port=${MASTER_PORT:-29500}
            if [[ ${NODES:-1} == *:* ]]; then
                # A node that comes later waits in vain for the address of a store that torchrun shares
                # with the ranks (torch 2.13). A node that leaves costs the others a restart.
                export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
                LAUNCH+=(--rdzv-backend c10d --rdzv-endpoint "$address:$port")
                local conf=last_call_timeout=5
                [[ -z ${NODE_RANK:-} ]] || conf+=,is_host=$((NODE_RANK == 0))
                LAUNCH+=(--rdzv-id "${JOB_ID:-pretrain}" --rdzv-conf "$conf")
                LAUNCH+=(--max-restarts "${MAX_RESTARTS:-20}")
            else
                LAUNCH+=(--node-rank "${NODE_RANK:-0}" --master-addr "$address")
                LAUNCH+=(--master-port "$port")
            fi
            ;;
        python) LAUNCH=(python) ;;
        *) fail "LAUNCHER $LAUNCHER: deepspeed, torchrun or python" ;;
    esac
}

# Examines the nodes of a run, and what its flags name there. DOCTOR=only ends here: slurm's script
# does this once for all tasks.
examine() { # PROGRAM --flag value ...
    local doctor=(python tools/doctor.py) flag='' word words
    [[ -z ${HOSTFILE:-} ]] || doctor+=(--hostfile "$HOSTFILE")
    [[ -z ${INCLUDE:-} ]] || doctor+=(--include "$INCLUDE")
    [[ -z ${EXCLUDE:-} ]] || doctor+=(--exclude "$EXCLUDE")
    [[ -z ${MASTER_PORT:-} ]] || doctor+=(--master-port "$MASTER_PORT")
    if [[ ${LAUNCHER:-deepspeed} == deepspeed ]]; then
        read -ra words <<<"${DEEPSPEED_FLAGS:-}"
        for word in "${words[@]}"; do
            case $flag$word in
                --master_port=?*) doctor+=(--master-port "${word#*=}") ;;
                --ssh_port=?*) doctor+=(--ssh-port "${word#*=}") ;;
            esac
            # A value of its own is read as one after "=".
            flag=''
            [[ $word != --master_port && $word != --ssh_port ]] || flag=$word=
        done
        flag=''
    fi
    for word in "${@:2}"; do
        case $word in
            --data-path | --data_path) doctor+=(--data-path) ;;
            --data-path=* | --data_path=*) doctor+=(--data-path "${word#*=}") ;;
            --save=*) doctor+=(--save "${word#*=}") ;;
        esac
        if [[ $word == --* ]]; then
            flag=$word
        elif [[ $flag == --data-path || $flag == --data_path ]]; then
            doctor+=("$word")
        elif [[ $flag == --save ]]; then
            doctor+=(--save "$word")
        fi
    done
    if [[ -n ${DRY_RUN:-} ]]; then
        show "${doctor[@]}"
    else
        "${doctor[@]}" || exit
    fi
    [[ $DOCTOR != only ]] || exit 0
}

# start PROGRAM --flag value ...
start() {
    local LAUNCH=()
    [[ -z ${DOCTOR:-} ]] || examine "$@"
    launcher
    run "${LAUNCH[@]}" "$@"
}

# Prints a command in one write, as several nodes may have one log.
show() {
    local line
    printf -v line '%q ' "$@"
    echo "$line"
}

run() {
    if [[ -n ${DRY_RUN:-} ]]; then
        show "$@"
    elif ((${RESTARTS:-0})); then
        restarting "$@"
    else
        exec "$@"
    fi
}

# Runs a command, and again when it has failed, RESTARTS times at most. Status 2 is a mistake in the
# command, which a restart does not mend; nor is it started again once a signal has asked it to stop,
# which is passed on.
restarting() {
    local left=$RESTARTS status child='' stopped=''
    trap 'stopped=1; [[ -z $child ]] || kill -TERM "$child" || true' TERM INT HUP
    trap 'stopped=1; [[ -z $child ]] || kill -USR1 "$child" || true' USR1
    while [[ -z $stopped ]]; do
        "$@" &
        child=$!
        status=0
        await "$child" || status=$?
        if ((status == 0 || status == 2 || left == 0)) || [[ -n $stopped ]]; then
            break
        fi
        left=$((left - 1))
        echo "${0##*/}: status $status; starting again, $left restarts are left" >&2
        sleep "${RESTART_PAUSE:-5}"
    done
    exit "${status:-0}"
}

# Starts, or resumes from what is there. Of a flag that comes twice the last one counts.
pretrain() {
    pretrain_of gpt "$@"
}

pretrain_of() { # FAMILY NAME --flag value ...
    local folder=${RUNS:-runs}/$2 FLAGS=()
    data
    if [[ $1 == gpt ]]; then
        tokenizer
    else
        vocabulary "$1"
    fi
    start "pretrain_$1.py" "${FLAGS[@]}" --save "$folder" --load "$folder" --save-interval 1000 \
        --tensorboard-dir "$folder/tensorboard" --log-interval 10 --eval-interval 1000 \
        --eval-iters 20 "${@:3}"
}

# Megatron-LM's scripts name no type of tokenizer and start torchrun.
megatron_lm() {
    local FLAGS=() LAUNCHER=${LAUNCHER:-torchrun} program=$1 family=${1#pretrain_}
    [[ -n ${CHECKPOINT_PATH:-} ]] || fail "set CHECKPOINT_PATH to the folder of the checkpoints"
    data
    vocabulary "${family%.py}"
    start "$program" "${FLAGS[@]}" --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
        --tensorboard-dir "$CHECKPOINT_PATH/tensorboard" --fp16 "${@:2}"
}

# What those of GPT, BERT and T5 share; of GPUS processes (the second argument is how many they have).
megatron_lm_2023() {
    local GPUS=${GPUS:-$2}
    megatron_lm "$1" --data-impl mmap --split 949,50,1 --lr-warmup-fraction .01 \
        --weight-decay 1e-2 --clip-grad 1.0 --log-interval 100 --save-interval 10000 \
        --eval-interval 1000 --eval-iters 10 "${@:3}"
}

megatron_lm_gpt() {
    # shellcheck disable=SC2086
    megatron_lm_2023 pretrain_gpt.py "$1" ${MODEL[gpt2-345m]} --train-iters 500000 --lr 0.00015 \
        --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 "${@:2}"
}

megatron_lm_bert() {
    # shellcheck disable=SC2086
    megatron_lm_2023 pretrain_bert.py "$1" ${MODEL[bert-345m]} --lr 0.0001 --min-lr 0.00001 \
        --lr-decay-style linear --lr-decay-iters 990000 "${@:2}"
}

megatron_lm_t5() {
    # shellcheck disable=SC2086
    megatron_lm_2023 pretrain_t5.py "$1" ${MODEL[t5-220m]} --train-iters 1000000 --lr 0.0001 \
        --min-lr 0.00001 --lr-decay-style linear --lr-decay-iters 1000000 --vocab-extra-ids 100 \
        "${@:2}"
}

megatron_lm_task() {
    local GPUS=${GPUS:-$1} LAUNCHER=${LAUNCHER:-torchrun}
    start tasks/main.py --task "$2" "${FLAGS[@]}" --fp16 "${@:3}"
}

# Fine-tunes a BERT of 345 million weights.
megatron_lm_finetune() { # PROCESSES TASK FOLDER --flag value ...
    local FLAGS=()
    vocabulary bert
    task_data --train-data TRAIN_DATA "${TRAIN_DATA:-}"
    task_data --valid-data VALID_DATA "${VALID_DATA:-}"
    # shellcheck disable=SC2086
    megatron_lm_task "$1" "$2" ${MODEL[bert-345m]} --tokenizer-type BertWordPieceLowerCase \
        --pretrained-checkpoint "${PRETRAINED_CHECKPOINT:-checkpoints/bert_345m}" \
        --save "${CHECKPOINT_PATH:-checkpoints/$3}" --lr-decay-style linear --weight-decay 1.0e-1 \
        --log-interval 10 --eval-interval 100 --eval-iters 50 "${@:4}"
}

# Generates texts; the model is the checkpoint's, and so is the tokenizer unless VOCAB_FILE is set.
generate_samples() { # --flag value ...
    local FLAGS=() LAUNCHER=${LAUNCHER:-python}
    [[ -z ${VOCAB_FILE:-}${TOKENIZER:-} ]] || tokenizer
    start examples_deepspeed/detxoify_lm/generate_samples_gpt.py "${FLAGS[@]}" "$@"
}

# OneFlow GPT's scripts: one command starts all processes of a node, and no tokenizer is needed.
oneflow_gpt() {
    local folder=${RUNS:-runs}/$1 LAUNCHER=python
    local nodes=${NODES:-1} dataset=${DATA_PATH:-${ONEFLOW_GPT_DATASET:-}}
    [[ -n $dataset ]] || fail "set DATA_PATH to the prefix of the .bin and .idx files"
    dataset=$(from_caller "$dataset")
    set -- --num-gpus-per-node "${GPUS:-$2}" --num-nodes "$nodes" "${@:3}"
    if ((nodes > 1)); then
        [[ -n ${ONEFLOW_GPT_NODE_IPS:-} ]] || fail "set ONEFLOW_GPT_NODE_IPS to $nodes addresses"
        set -- --node-ips "$ONEFLOW_GPT_NODE_IPS" "$@"
    fi
    start pretrain_gpt.py --dataset "$dataset" --split 949,50,1 --vocab-size 50257 --save "$folder" \
        --load "$folder" --train-iters 500000 --optimizer adamw --learning-rate 0.00015 \
        --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 \
        --lr-warmup-fraction 0.01 --weight-decay 1e-2 --clip-grad 1.0 --log-interval 100 \
        --save-interval 10000 --checkpoint-activations --multihead-attention-fusion --fp16 "$@"
}
