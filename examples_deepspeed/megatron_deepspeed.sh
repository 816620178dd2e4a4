#!/usr/bin/env bash
# What the scripts under Megatron-DeepSpeed's names share. Not run by itself:
#
#     source "$(dirname "$0")/../megatron_deepspeed.sh"
#     defaults NAME=VALUE ...               values that the environment or a flag can replace
#     pretrain_gpt3 --flag value ... "$@"   trains a GPT of GPT-3's table
#     train PROGRAM --flag value ... "$@"   any other program, with folders, JSON and log
#
# A value comes from a flag after the script, then the environment (SEQ_LEN=64 or seq_len=64), then
# the script. Settings of ../common.sh hold too. Those of all scripts here:
#
#     DATA_PATH    (or DATA_BLEND) prefix of the .bin/.idx pair, or "WEIGHT PREFIX WEIGHT PREFIX ..."
#     DATA_HOME    folder of the script's data where DATA_PATH is not set (default: dataset)
#     VOCAB_FILE, MERGE_FILE    (or VOCAB_PATH, MERGE_PATH) the vocabulary; default: the usual names
#                  in BASE_DATA_PATH (dataset)
#     NUM_GPUS     processes in all; more than NUM_GPUS_PERNODE (8) need HOSTFILE
#     OUTPUT_BASEPATH    folder of log/, checkpoint/ and tensorboard/ (default: output next to the script)
#     JOB_NAME     the run's name in these three (default: made of the settings)

HERE=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
HERE=${HERE#"$PWD"/}

# GPT-3's sizes by billions of weights: layers, width, heads, global batch size, learning rate, its
# minimum (a tenth), and the standard deviation of new weights.
declare -A GPT3=(
    [0.125]="12 768 12 256 6.0e-4 6.0e-5 0.02"
    [0.35]="24 1024 16 256 3.0e-4 3.0e-5 0.018"
    [0.76]="24 1536 16 256 2.5e-4 2.5e-5 0.015"
    [1.3]="24 2048 16 512 2.0e-4 2.0e-5 0.013"
    [2.7]="32 2560 32 512 1.6e-4 1.6e-5 0.011"
    [6.7]="32 4096 32 1024 1.2e-4 1.2e-5 0.009"
    [13]="40 5120 40 1024 1.0e-4 1.0e-5 0.008"
    [30]="64 6144 64 1024 1.0e-4 1.0e-5 0.008"
    [175]="96 12288 96 1536 0.6e-4 0.6e-5 0.005"
)

# The flag after the script that also sets a variable, so that what follows from it agrees.
declare -A FLAG_OF=(
    [NUM_LAYERS]=--num-layers [HIDDEN_SIZE]=--hidden-size [NUM_ATTN_HEADS]=--num-attention-heads
    [SEQ_LEN]=--seq-length [GLOBAL_BATCH_SIZE]=--global-batch-size [BATCH_SIZE]=--micro-batch-size
    [LR]=--lr [MIN_LR]=--min-lr [TRAIN_TOKENS]=--train-tokens [TRAIN_SAMPLES]=--train-samples
    [TRAIN_ITERS]=--train-iters [MP_SIZE]=--tensor-model-parallel-size
    [PP_SIZE]=--pipeline-model-parallel-size [ZERO_STAGE]=--zero-stage [SEED]=--seed
    [LR_DECAY_TOKENS]=--lr-decay-tokens [WARMUP_TOKENS]=--lr-warmup-tokens
    [NUM_ITER]=--train-iters [NUM_TOKEN]=--train-tokens [SEQ]=--seq-length
    [GLOBAL_BATCH]=--global-batch-size [MICRO_BATCH]=--micro-batch-size
)

# The flags of the command line and the first value of each.
declare -A GIVEN=()
read_flags() {
    local word flag=''
    for word in "$@"; do
        if [[ $word == --?* ]]; then
            flag=${word%%=*}
            GIVEN[$flag]=''
            [[ $word != *=* ]] || GIVEN[$flag]=${word#*=}
        elif [[ -n $flag && -z ${GIVEN[$flag]} ]]; then
            GIVEN[$flag]=$word
        fi
    done
}
read_flags "$@"

given() { # --flag
    [[ -n ${GIVEN[$1]+x} ]]
}

defaults() { # NAME=VALUE ...
    local pair name lower flag
    for pair in "$@"; do
        name=${pair%%=*}
        lower=${name,,} flag=${FLAG_OF[$name]:-}
        if [[ -n $flag && -n ${GIVEN[$flag]:-} ]]; then
            printf -v "$name" %s "${GIVEN[$flag]}"
        elif [[ -z ${!name:-} ]]; then
            printf -v "$name" %s "${!lower:-${pair#*=}}"
        fi
    done
}

# A choice of the script that no environment replaces.
DATA=pile_text_document LENGTH=--train-samples SAMPLES=3 TEMPLATE='' TEMPLATE_VALUES=() PREFIX=gpt SUFFIX='' LOAD=''
PROCESSES=8 WARMUP=375000000 START=72 COUNTED=''

# Adds a flag unless one of these was given, which decides the same.
either() { # "--flag --flag ..." --flag value ...
    local flag
    for flag in $1; do
        ! given "$flag" || return 0
    done
    FLAGS+=("${@:2}")
}

# Adds flags where the variable is true.
where() { # VALUE --flag ...
    [[ $1 != true && $1 != 1 ]] || FLAGS+=("${@:2}")
}

# How many processes a run has: NUM_GPUS, GPUS of each node, the slots of HOSTFILE, or the script's.
processes() { # NUMBER
    local slots
    [[ -z $COUNTED ]] || return 0
    COUNTED=1
    defaults NUM_GPUS_PERNODE="${NUM_GPUS_PER_WORKER:-8}"
    defaults NUM_GPUS="${GPUS:+$((GPUS * ${NUM_NODE:-1}))}"
    if [[ -z $NUM_GPUS && -f ${HOSTFILE:-} ]]; then
        slots=$(sed -n 's/^[^#]*slots=\([0-9]*\).*/+\1/p' "$HOSTFILE")
        NUM_GPUS=$((${slots:-0}))
    fi
    defaults NUM_GPUS="$1"
    defaults NUM_NODE=$(((NUM_GPUS + NUM_GPUS_PERNODE - 1) / NUM_GPUS_PERNODE))
    GPUS=${GPUS:-$((NUM_GPUS / NUM_NODE))}
    if ((NUM_NODE > 1)) && [[ ${LAUNCHER:-deepspeed} == deepspeed && -z ${HOSTFILE:-} ]]; then
        [[ -n ${DRY_RUN:-} ]] || fail "NUM_GPUS $NUM_GPUS are $NUM_NODE nodes of $GPUS: set HOSTFILE," \
            "or NUM_GPUS to the processes of this machine"
        DEEPSPEED_FLAGS="--num_nodes $NUM_NODE${DEEPSPEED_FLAGS:+ $DEEPSPEED_FLAGS}"
    fi
    NODES=${NODES:-$NUM_NODE}
}

# Names the data and the vocabulary, and ends with the variable to set if a file is missing.
mds_data() { # FAMILY NAME
    local word
    defaults DATA_HOME="${BASE_DATA_PATH:-dataset}" BASE_DATA_PATH=dataset
    defaults DATA_PATH="${DATA_BLEND:-$DATA_HOME/$2}"
    if [[ $1 == bert ]]; then
        defaults VOCAB_FILE="${VOCAB_PATH:-${vocab_path:-$BASE_DATA_PATH/bert-large-uncased-vocab.txt}}"
    else
        defaults VOCAB_FILE="${VOCAB_PATH:-${vocab_path:-$BASE_DATA_PATH/gpt2-vocab.json}}"
        defaults MERGE_FILE="${MERGE_PATH:-${merge_path:-$BASE_DATA_PATH/gpt2-merges.txt}}"
    fi
    if ! given --data-path && ! given --mock-data; then
        paths_in "$DATA_PATH"
        for word in "${PATHS[@]}"; do
            [[ -n ${DRY_RUN:-} || $word =~ ^[0-9.e-]+$ || -f $word.bin ]] || fail "$word.bin does not" \
                "exist: set DATA_PATH to the prefix of a .bin and .idx file that" \
                "tools/preprocess_data.py has written (the Pile and BookCorpus are no longer distributed)"
        done
        data
    fi
    if [[ -n ${TOKENIZER:-} ]]; then
        tokenizer
    elif ! given --vocab-file && ! given --tokenizer-type && ! given --tokenizer-model; then
        for word in VOCAB_FILE MERGE_FILE; do
            [[ -n ${DRY_RUN:-} || -z ${!word:-} || -f ${!word} ]] || fail "${!word} does not exist: set" \
                "$word to the file of the vocabulary, or TOKENIZER to a folder of Hugging Face"
        done
        vocabulary "$1"
    fi
}

# The folders of a run, of which JOB_NAME is one.
folders() {
    defaults OUTPUT_BASEPATH="${output_home:-$HERE/output}"
    defaults CHECKPOINT_PATH="$OUTPUT_BASEPATH/checkpoint/$JOB_NAME"
    STARTED=${HOSTNAME:-localhost}_$(date +%Y.%m.%d_%H.%M.%S)
    defaults TENSORBOARD_DIR="${TENSORBOARD_PATH:-$OUTPUT_BASEPATH/tensorboard/${JOB_NAME}_$STARTED}"
}

# DeepSpeed's flags with a JSON of the script's folder. Its "auto" are the flags'; "NAME" with its
# quotes is replaced by a value or a list, in a file next to the run's checkpoints.
deepspeed_flags() { # TEMPLATE NAME=VALUE ...
    local text pair value json=$1
    if (($# > 1)); then
        text=$(<"$1")
        for pair in "${@:2}"; do
            value=${pair#*=}
            [[ $value =~ ^(-?[0-9.]+|true|false|\[.*\])$ ]] || value="\"$value\""
            text=${text//"\"${pair%%=*}\""/"$value"}
        done
        mkdir -p "$CHECKPOINT_PATH"
        json=$CHECKPOINT_PATH/ds_config.json
        # Nodes that share the folder write the same text.
        printf '%s\n' "$text" >"$json.$$"
        mv "$json.$$" "$json"
    fi
    FLAGS+=(--deepspeed --deepspeed_config "$json" --zero-stage "$ZERO_STAGE")
    where "$ACTIVATION_CHECKPOINT" --deepspeed-activation-checkpointing
}

# Starts a program with FLAGS and those that follow; what it prints also goes to the run's log.
train() { # PROGRAM --flag value ...
    if [[ -z ${DRY_RUN:-} ]]; then
        mkdir -p "$OUTPUT_BASEPATH/log"
        # An interrupt is the run's, which saves; its last lines belong to the log.
        exec > >(tee -i "$OUTPUT_BASEPATH/log/${JOB_NAME}_$STARTED.log") 2>&1
    fi
    start "$1" "${FLAGS[@]}" "${@:2}"
}

# Flags that every pretraining script has; LR_* and TRAIN_* are the script's.
pretraining_flags() {
    FLAGS+=(--override-opt_param-scheduler --adam-beta1 0.9 --tensor-model-parallel-size "$MP_SIZE"
        --pipeline-model-parallel-size "$PP_SIZE" --micro-batch-size "$BATCH_SIZE"
        --global-batch-size "$GLOBAL_BATCH_SIZE" --num-layers "$NUM_LAYERS"
        --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$NUM_ATTN_HEADS"
        --seq-length "$SEQ_LEN" --max-position-embeddings "$SEQ_LEN" --lr "$LR" --min-lr "$MIN_LR"
        --lr-decay-style "$LR_DECAY_STYLE" --split "$SPLIT" --log-interval "$LOG_INTERVAL"
        --eval-interval "$EVAL_INTERVAL" --eval-iters "$EVAL_ITERS"
        --save-interval "$SAVE_INTERVAL" --weight-decay "$WEIGHT_DECAY" --clip-grad 1.0
        --num-workers "$NUM_WORKERS_OF_DATA" --seed "$SEED" --save "$CHECKPOINT_PATH" --tensorboard-queue-size 1 --log-timers-to-tensorboard
        --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
        --tensorboard-dir "$TENSORBOARD_DIR")
    # A run that starts from another model continues from its own checkpoints.
    if [[ -n $LOAD && ! -e $CHECKPOINT_PATH/latest ]]; then
        FLAGS+=(--load "$LOAD" --no-load-lr-state --reset-iteration)
    else
        FLAGS+=(--load "$CHECKPOINT_PATH")
    fi
    either "--fp16 --bf16" --fp16
    where "$NO_PP" --no-pipeline-parallel
    where "$ACTIVATION_CHECKPOINT" --checkpoint-activations
    where "$LOG_OPTIMIZER_STATE" --log-optimizer-states-to-tensorboard
}

gpt3_shape() {
    local shape
    read -ra shape <<<"${GPT3[$MODEL_SIZE]:-}"
    ((${#shape[@]})) || fail "MODEL_SIZE $MODEL_SIZE is not one of ${!GPT3[*]}"
    defaults NUM_LAYERS="${shape[0]}" HIDDEN_SIZE="${shape[1]}" NUM_ATTN_HEADS="${shape[2]}" \
        GLOBAL_BATCH_SIZE="${shape[3]}" LR="${shape[4]}" MIN_LR="${shape[5]}" INIT_STD="${shape[6]}"
}

# A run of tokens: TRAIN_TOKENS end it, the other length sizes the data set.
pretrain_gpt3() { # --flag value ...
    local FLAGS=() curriculum='' ramp=()
    gpt3_shape
    defaults SEQ_LEN=2048 MP_SIZE=1 PP_SIZE=1 NO_PP=false ZERO_STAGE=0 EXIT_DURATION=30000000 \
        TRAIN_TOKENS_IN_BILLION=300 LOG_INTERVAL=10 EVAL_ITERS=10 EVAL_INTERVAL=100 SEED=1234 \
        ACTIVATION_CHECKPOINT=true LOG_OPTIMIZER_STATE=false CL_ENABLED=false CL_START_SEQLEN=80 \
        CL_TOKENS=60 LR_DECAY_STYLE=cosine SPLIT=98,2,0 WEIGHT_DECAY=0.1 NUM_WORKERS_OF_DATA="${num_workers:-0}"
    defaults TRAIN_TOKENS=$((TRAIN_TOKENS_IN_BILLION * 1000000000)) CL_AVG_SEQLEN=$(((CL_START_SEQLEN + SEQ_LEN) / 2))
    defaults TRAIN_SAMPLES=$((TRAIN_TOKENS * SAMPLES / SEQ_LEN)) LR_DECAY_TOKENS="$TRAIN_TOKENS" \
        TRAIN_ITERS=$((TRAIN_TOKENS * SAMPLES / SEQ_LEN / GLOBAL_BATCH_SIZE)) \
        CL_STEP=$((CL_TOKENS * 1000000000 / (GLOBAL_BATCH_SIZE * CL_AVG_SEQLEN)))
    # A warm-up that a shortened decay cannot hold is a hundredth of it, as in the longest runs.
    ((WARMUP < LR_DECAY_TOKENS)) || WARMUP=$((LR_DECAY_TOKENS / 100))
    defaults WARMUP_TOKENS="${lr_warmup_tokens:-$WARMUP}"
    processes "$PROCESSES"
    defaults BATCH_SIZE=$((GLOBAL_BATCH_SIZE * PP_SIZE * MP_SIZE / NUM_GPUS))
    [[ $CL_ENABLED != true ]] || curriculum=-cl-startseqlen-$CL_START_SEQLEN-step-$CL_STEP
    defaults JOB_NAME="$PREFIX-${MODEL_SIZE}B-lr-$LR-minlr-$MIN_LR-bs-$GLOBAL_BATCH_SIZE-gpus-$NUM_GPUS-zero-$ZERO_STAGE-mp-$MP_SIZE-pp-$PP_SIZE$curriculum$SUFFIX"
    folders
    mds_data gpt "$DATA"
    case $TEMPLATE in
        '') ;;
        */MoE/* | */compression/* | *_slw_*)
            deepspeed_flags "$TEMPLATE" CONFIG_CL_ENABLED="$CL_ENABLED" CONFIG_CL_MIN="$CL_START_SEQLEN" \
                CONFIG_CL_MAX="$SEQ_LEN" CONFIG_CL_DURATION="$CL_STEP"
            ;;
        *) deepspeed_flags "$TEMPLATE" "${TEMPLATE_VALUES[@]}" ;;
    esac
    pretraining_flags
    FLAGS+=(--adam-beta2 0.95 --init-method-std "$INIT_STD" --hysteresis 2
        --exit-duration-in-mins "$EXIT_DURATION" --train-tokens "$TRAIN_TOKENS")
    if [[ $LENGTH == --train-samples ]]; then
        either "--train-iters --train-samples" --train-samples "$TRAIN_SAMPLES"
    else
        either "--train-iters --train-samples" --train-iters "$TRAIN_ITERS"
    fi
    read -ra ramp <<<"${RAMPUP_BATCH_SIZE:-none}"
    [[ ${ramp[*]} == none ]] ||
        either "--train-iters --rampup-batch-size" --rampup-batch-size "${ramp[@]}"
    either "--lr-decay-iters --lr-decay-samples --lr-decay-tokens" --lr-decay-tokens "$LR_DECAY_TOKENS"
    either "--lr-warmup-iters --lr-warmup-samples --lr-warmup-tokens --lr-warmup-fraction" \
        --lr-warmup-tokens "$WARMUP_TOKENS"
    train pretrain_gpt.py "$@"
}

# Most ranks that can share the experts of every layer.
common_divisor() { # NUMBER NUMBER ...
    local divisor=$1 number rest
    for number in "${@:2}"; do
        while ((number)); do
            rest=$((divisor % number)) divisor=$number number=$rest
        done
    done
    echo "$divisor"
}

# With a mixture of experts, or with one expert, which is a dense model.
moe_gpt3() { # --flag value ...
    local experts expert=()
    defaults EP_SIZE=1 MLC=0.01 MOE_TRAIN_CAP_FACTOR=1.0 MOE_EVAL_CAP_FACTOR=1.0 MOE_MIN_CAP=4 \
        MOE_DROP_TOKEN=true LR_DECAY_TOKENS=260000000000 SAVE_INTERVAL=1000
    defaults PP_SIZE=1
    processes "$PROCESSES"
    read -ra experts <<<"$EP_SIZE"
    defaults EP_PARALLEL_SIZE="$(common_divisor $((NUM_GPUS / PP_SIZE)) "${experts[@]}")"
    if [[ $EP_SIZE != 1 ]]; then
        SUFFIX=-ep-${EP_SIZE// /+}-mlc-$MLC-cap-$MOE_TRAIN_CAP_FACTOR-drop-$MOE_DROP_TOKEN$SUFFIX
        expert+=(--create-moe-param-group)
    fi
    [[ $MOE_DROP_TOKEN != false ]] || expert+=(--disable-moe-token-dropping)
    pretrain_gpt3 --moe-expert-parallel-size "$EP_PARALLEL_SIZE" --num-experts "${experts[@]}" \
        --moe-loss-coeff "$MLC" --moe-train-capacity-factor "$MOE_TRAIN_CAP_FACTOR" \
        --moe-eval-capacity-factor "$MOE_EVAL_CAP_FACTOR" --moe-min-capacity "$MOE_MIN_CAP" \
        "${expert[@]}" "$@"
}

# With a batch of thousands, which short samples at the start make stable.
curriculum_gpt3() { # --flag value ...
    defaults SEQ_LEN=2048
    defaults NO_PP=true LOG_OPTIMIZER_STATE=true CL_ENABLED=true \
        CL_START_SEQLEN=$((SEQ_LEN < START ? 8 : START)) LR_DECAY_TOKENS=260000000000 \
        SAVE_INTERVAL=1000
    pretrain_gpt3 "$@"
}

# A student of 21 layers with experts, taught by a model of EP_SIZE_TEACHER experts in
# CHECKPOINT_PATH_TEACHER.
student_gpt3() { # --flag value ...
    local experts
    FLAG_OF[NUM_LAYERS]=--num-layers-teacher FLAG_OF[STUDENT_LAYERS]=--num-layers
    defaults MIN_LR=1.0e-6 INIT_STD=0.014 LR_DECAY_TOKENS=300000000000 SAVE_INTERVAL=10000 NO_PP=true \
        STUDENT_LAYERS=21 KD_BETA_CE=1 CHECKPOINT_PATH_TEACHER=teacher
    read -ra experts <<<"$EP_SIZE_TEACHER"
    gpt3_shape
    LENGTH=--train-iters SUFFIX=-mos
    moe_gpt3 --mlp-type residual --num-layers "$STUDENT_LAYERS" --mos --kd-beta-ce "$KD_BETA_CE" \
        --num-layers-teacher "$NUM_LAYERS" --num-experts-teacher "${experts[@]}" \
        --hidden-size-teacher "$HIDDEN_SIZE" --num-attention-heads-teacher "$NUM_ATTN_HEADS" \
        --load-teacher "$CHECKPOINT_PATH_TEACHER" "$@"
}

# Quantization-aware training of the model in LOAD_PATH.
quantized_gpt3() { # --flag value ...
    defaults MODEL_SIZE=0.125 LR=6.0e-5 MIN_LR=6.0e-5 BATCH_SIZE=4 TRAIN_TOKENS=5250000000 \
        ACTIVATION_CHECKPOINT=false CL_ENABLED=false LOAD_PATH=trained
    [[ -n ${DRY_RUN:-} || -d $LOAD_PATH ]] || given --load ||
        fail "$LOAD_PATH does not exist: set LOAD_PATH to the checkpoints of a trained model"
    PROCESSES=64 LOAD=$LOAD_PATH PREFIX=gpt3-w4a8 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE_compression.json
    curriculum_gpt3 "$@"
}

# Samples of N_K thousands of tokens, which MP_SIZE tensor-parallel ranks share.
long_gpt3() { # --flag value ...
    local share=()
    defaults N_K=2 ZERO_STAGE=0 GLOBAL_BATCH_SIZE=2 BATCH_SIZE=1 NO_PP=true ENABLE_SEQUENCE_PARALLEL=1
    defaults SEQ_LEN=$((1024 * N_K))
    [[ $ENABLE_SEQUENCE_PARALLEL != 1 || $MP_SIZE == 1 ]] || share=(--sequence-parallel)
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    PROCESSES=$MP_SIZE DATA=BookCorpusDataset_text_document TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
    rebase_gpt3 --use-flash-attn-triton "${share[@]}" "$@"
}

# Taught by a model of NUM_LAYERS layers in CHECKPOINT_PATH_TEACHER.
distilled_gpt3() { # LAYERS --flag value ...
    local teacher=${CHECKPOINT_PATH_TEACHER:-}
    FLAG_OF[NUM_LAYERS]=--num-layers-teacher FLAG_OF[STUDENT_LAYERS]=--num-layers
    defaults STUDENT_LAYERS="$1" KD_BETA_CE=1 SAVE_INTERVAL=10000
    PREFIX=gpt3-kd TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
    gpt3_shape
    [[ -n $teacher${DRY_RUN:-} ]] || given --load-teacher ||
        fail "set CHECKPOINT_PATH_TEACHER to the checkpoints of the teacher"
    curriculum_gpt3 --num-layers "$STUDENT_LAYERS" --kd --kd-beta-ce "$KD_BETA_CE" \
        --num-layers-teacher "$NUM_LAYERS" --hidden-size-teacher "$HIDDEN_SIZE" \
        --num-attention-heads-teacher "$NUM_ATTN_HEADS" --load-teacher "${teacher:-teacher}" "${@:2}"
}

# The settings of 2023: a longer warm-up, a decay as long as the run, which ends at 1e-6.
rebase_gpt3() { # --flag value ...
    defaults MIN_LR=1.0e-6 LR_WARMUP_TOKENS_IN_MILLION=3000 ZERO_STAGE=1 SAVE_INTERVAL=100 \
        SPLIT=949,50,1 LOG_OPTIMIZER_STATE=true
    WARMUP=$((LR_WARMUP_TOKENS_IN_MILLION * 1000000)) SAMPLES=2
    pretrain_gpt3 --no-async-tensor-model-parallel-allreduce "$@"
}

# Rotary positions in a quarter of each head; samples grow during the first third of the warm-up.
rotary_growing_gpt3() { # --flag value ...
    defaults MIN_LR=1.0e-6 SEQ_LEN=2048 LR_WARMUP_TOKENS_IN_MILLION=3000
    defaults CL_START_SEQLEN=$((SEQ_LEN < 64 ? 8 : 64))
    gpt3_shape
    CL_ENABLED=true
    defaults CL_STEP=$((LR_WARMUP_TOKENS_IN_MILLION * 1000000 / 3 / GLOBAL_BATCH_SIZE / SEQ_LEN))
    PROCESSES=64 TEMPLATE=$HERE/ds_config_gpt_slw_TEMPLATE.json
    rebase_gpt3 --use-rotary-position-embeddings --rotary-percent 0.25 "$@"
}

pretrain_pile_bert() { # --flag value ...
    local FLAGS=()
    defaults SEQ_LEN=512 GLOBAL_BATCH_SIZE=1024 LR=1e-4 MIN_LR=1e-5 MP_SIZE=1 PP_SIZE=1 NO_PP=true \
        ZERO_STAGE=0 TRAIN_ITERS_IN_MILLION=2 LOG_INTERVAL=100 EVAL_ITERS=10 EVAL_INTERVAL=1000 \
        SEED=1234 ACTIVATION_CHECKPOINT=false LOG_OPTIMIZER_STATE=true LR_DECAY_STYLE=linear \
        SPLIT=949,50,1 WEIGHT_DECAY=1e-2 NUM_WORKERS_OF_DATA="${num_workers:-4}"
    defaults TRAIN_ITERS=$((TRAIN_ITERS_IN_MILLION * 1000000))
    defaults LR_WARMUP_ITERS=$((TRAIN_ITERS < 2000000 ? TRAIN_ITERS / 200 : 10000)) \
        LR_DECAY_ITERS="$TRAIN_ITERS" SAVE_INTERVAL=$(((TRAIN_ITERS + 99) / 100))
    processes "$PROCESSES"
    defaults BATCH_SIZE=$((GLOBAL_BATCH_SIZE * PP_SIZE * MP_SIZE / NUM_GPUS))
    defaults JOB_NAME="bert-pile-${MODEL_SIZE}B-iters-$TRAIN_ITERS-lr-$LR-min-$MIN_LR-wmup-$LR_WARMUP_ITERS-gbs-$GLOBAL_BATCH_SIZE-mbs-$BATCH_SIZE-gpu-$NUM_GPUS-zero-$ZERO_STAGE-mp-$MP_SIZE-pp-$PP_SIZE"
    folders
    mds_data bert pile_bert_train_text_sentence
    deepspeed_flags "$TEMPLATE"
    pretraining_flags
    FLAGS+=(--adam-beta2 0.999)
    either "--train-iters --train-samples" --train-iters "$TRAIN_ITERS"
    either "--lr-decay-iters --lr-decay-samples --train-samples" --lr-decay-iters "$LR_DECAY_ITERS"
    either "--lr-warmup-iters --lr-warmup-samples --lr-warmup-fraction --train-samples" \
        --lr-warmup-iters "$LR_WARMUP_ITERS"
    train pretrain_bert.py "$@"
}

# Evaluates a checkpoint, which has the model's sizes, with the language model evaluation harness.
evaluate_harness() { # TASKS --flag value ...
    local FLAGS=() sizes
    defaults CHECKPOINT_PATH=checkpoint RESULT_PATH=results.json TASKS="$1" TP_SIZE=1 PP_SIZE=1 \
        NO_PP=true EP_PARALLEL_SIZE=1 NUM_NODE=1 NUM_GPU_PER_NODE=1
    defaults NUM_GPUS_PERNODE="$NUM_GPU_PER_NODE"
    processes $((NUM_NODE * NUM_GPU_PER_NODE))
    [[ -n ${DRY_RUN:-} || -d $CHECKPOINT_PATH ]] || given --load ||
        fail "$CHECKPOINT_PATH does not exist: set CHECKPOINT_PATH to the checkpoints of a run"
    [[ -z ${VOCAB_FILE:-${VOCAB_PATH:-}} ]] || VOCAB_FILE=${VOCAB_FILE:-$VOCAB_PATH}
    [[ -z ${MERGE_FILE:-${MERGE_PATH:-}} ]] || MERGE_FILE=${MERGE_FILE:-$MERGE_PATH}
    [[ -z ${VOCAB_FILE:-}${TOKENIZER:-} ]] || tokenizer
    # The sizes are the checkpoint's.
    for sizes in num-layers hidden-size num-attention-heads seq-length max-position-embeddings; do
        FLAGS+=("--$sizes" -1)
    done
    [[ -z ${CONFIG_PATH:-} ]] || FLAGS+=(--deepspeed --deepspeed_config "$CONFIG_PATH")
    where "$NO_PP" --no-pipeline-parallel
    start tasks/eval_harness/evaluate.py "${FLAGS[@]}" --load "$CHECKPOINT_PATH" \
        --tensor-model-parallel-size "$TP_SIZE" --pipeline-model-parallel-size "$PP_SIZE" \
        --moe-expert-parallel-size "$EP_PARALLEL_SIZE" --micro-batch-size 12 --no-load-optim \
        --no-load-rng --inference --disable-moe-token-dropping --adaptive_seq_len --eval_fp32 \
        --task_list "$TASKS" --results_path "$RESULT_PATH" "${@:2}"
}

# Fine-tunes a BERT of 336 million weights on a task of GLUE or RACE.
finetune_bert() { # TASK [SEED] --flag value ...
    local FLAGS=() task=$1 epochs batch micro rate warmup
    shift
    [[ -z ${1:-} || $1 == --* ]] || { defaults SEED="$1" && shift; }
    case $task in
        MNLI) epochs=10 batch=128 micro=16 rate=1.0e-5 warmup=0.065 ;;
        QQP) epochs=12 batch=128 micro=16 rate=5.0e-5 warmup=0.065 ;;
        RACE) epochs=3 batch=32 micro=4 rate=2.0e-5 warmup=0.06 ;;
        *) epochs=3 batch=32 micro=8 rate=2.0e-5 warmup=0.1 ;;
    esac
    defaults SEED=1234 EPOCHS=$epochs LR_WARMUP_FRACTION=$warmup GLOBAL_BATCH_SIZE=$batch BATCH_SIZE=$micro LR=$rate ZERO_STAGE=0 \
        LOG_INTERVAL=10 ACTIVATION_CHECKPOINT=true PRETRAINED_CHECKPOINT=checkpoints/bert_336M \
        DATA_HOME="${BASE_DATA_PATH:-dataset}"
    case $task in
        MNLI) defaults TRAIN_DATA="$DATA_HOME/MNLI/train.tsv" \
            VALID_DATA="$DATA_HOME/MNLI/dev_matched.tsv $DATA_HOME/MNLI/dev_mismatched.tsv" ;;
        RACE) defaults TRAIN_DATA="$DATA_HOME/RACE/train/middle" \
            VALID_DATA="$DATA_HOME/RACE/dev/middle" ;;
        *) defaults TRAIN_DATA="$DATA_HOME/$task/train.tsv" VALID_DATA="$DATA_HOME/$task/dev.tsv" ;;
    esac
    processes "${PROCESSES_OF_TASK:-8}"
    # shellcheck disable=SC2153
    defaults JOB_NAME="$task-bsz$GLOBAL_BATCH_SIZE-lr$LR-epochs$EPOCHS-seed$SEED"
    folders
    defaults VOCAB_FILE="${VOCAB_PATH:-${vocab_path:-dataset/bert-large-uncased-vocab.txt}}"
    vocabulary bert
    task_files TRAIN_DATA --train-data
    task_files VALID_DATA --valid-data
    deepspeed_flags "$HERE/ds_config_bert_TEMPLATE.json"
    where "$ACTIVATION_CHECKPOINT" --checkpoint-activations
    either "--fp16 --bf16" --fp16
    train tasks/main.py --finetune --task "$task" --seed "$SEED" \
        --tokenizer-type BertWordPieceLowerCase --epochs "$EPOCHS" \
        --pretrained-checkpoint "$PRETRAINED_CHECKPOINT" --tensor-model-parallel-size 1 \
        --pipeline-model-parallel-size 1 --no-pipeline-parallel --num-layers 24 \
        --hidden-size 1024 --num-attention-heads 16 --global-batch-size "$GLOBAL_BATCH_SIZE" \
        --micro-batch-size "$BATCH_SIZE" --lr "$LR" --lr-decay-style linear \
        --lr-warmup-fraction "$LR_WARMUP_FRACTION" --seq-length 512 --max-position-embeddings 512 \
        --save-interval 500000 --save "$CHECKPOINT_PATH" --log-interval "$LOG_INTERVAL" \
        --eval-interval 100 --eval-iters 50 --weight-decay 1.0e-1 "$@"
}

# The files or folders of a task that a variable names; they have to exist.
task_files() { # NAME --flag
    local path
    for path in ${!1}; do
        [[ -n ${DRY_RUN:-} || -e $path ]] || given "$2" || fail "$path does not exist: set $1 to the" \
            "files of the task (RACE: folders of .txt files with a JSON object in each line)"
    done
    given "$2" || task_data "$2" "$1" "${!1}"
}

# The runs of 2021, which save nothing unless --save is given.
example_gpt() { # TEMPLATE [NAME=VALUE ...] --flag value ...
    local FLAGS=() template=("$1")
    shift
    while [[ ${1:-} == [A-Z]*=* ]]; do
        template+=("$1")
        shift
    done
    defaults TP=1 PP=1 LOG_INTERVAL=1 ITERATIONS=1000 ACTIVATION_CHECKPOINT=true \
        BASE_DATA_PATH="${BASE_PATH:-dataset}"
    processes 8
    defaults JOB_NAME="ds_z${ZERO_STAGE}_nl${NLAYERS}_hs${HIDDEN}_gb${GLOBAL_BATCH}_mb${MICRO_BATCH}_seq$SEQ"
    defaults TENSORBOARD_DIR="${OUTPUT_DIR:-}"
    folders
    mds_data gpt BookCorpusDataset_text_document
    deepspeed_flags "${template[@]}"
    either "--fp16 --bf16" --fp16
    either "--train-iters --train-samples" --train-iters "$ITERATIONS"
    where "$ACTIVATION_CHECKPOINT" --checkpoint-activations
    export NCCL_DEBUG=${NCCL_DEBUG:-warn}
    train pretrain_gpt.py --no-pipeline-parallel --tensor-model-parallel-size "$TP" \
        --pipeline-model-parallel-size "$PP" --num-layers "$NLAYERS" --hidden-size "$HIDDEN" \
        --num-attention-heads "$HEADS" --seq-length "$SEQ" \
        --max-position-embeddings "${POSITIONS:-$SEQ}" --micro-batch-size "$MICRO_BATCH" \
        --global-batch-size "$GLOBAL_BATCH" --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine \
        --log-interval "$LOG_INTERVAL" --eval-iters 40 --eval-interval 1000 --save-interval 1000 \
        --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 \
        --init-method-std 0.006 --tensorboard-dir "$TENSORBOARD_DIR" --exit-interval 5000 "$@"
}

# On nodes of GPN processes, of which HF is the hostfile; one node where the processes are counted.
azure_gpt() { # NODES --flag value ...
    local optimizer=()
    HOSTFILE=${HOSTFILE:-${HF:-}}
    [[ -n $HOSTFILE || -z ${NUM_GPUS:-}${GPUS:-} ]] || defaults NODES=1
    defaults NODES="$1" SEQ=1024 SP=15 OFFLOAD_DEVICE=none ZERO_STAGE=3
    defaults NUM_GPUS=$((${GPN:-${GPUS:-8}} * NODES)) NUM_NODE="$NODES"
    defaults GLOBAL_BATCH=$((NUM_GPUS * MICRO_BATCH))
    read -ra optimizer <<<"${CPU_OPTIM:-}"
    example_gpt "$HERE/ds_config_TEMPLATE.json" OFFLOAD_DEVICE="$OFFLOAD_DEVICE" SP="$SP" \
        "${optimizer[@]}" "${@:2}"
}
