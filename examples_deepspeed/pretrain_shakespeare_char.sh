#!/usr/bin/env bash
# A small GPT over the characters of tiny Shakespeare (github.com/karpathy/char-rnn,
# data/tinyshakespeare/input.txt): the recipe of github.com/karpathy/nanoGPT, whose README publishes
# the validation losses. MODEL=cpu (the default) takes minutes on one core, MODEL=gpu is larger.
#
#     SHAKESPEARE=input.txt examples_deepspeed/pretrain_shakespeare_char.sh
#     python tools/generate.py --load runs/shakespeare-cpu --prompt $'ROMEO:\n'
#
# The first 90 % of the characters train, the rest validates: each evaluation reads all of it once
# (cpu), or about five times (gpu). The lowest loss is printed at the end.
size=${MODEL:-cpu}
source "$(dirname "$0")/common.sh"

case $size in
    cpu)
        published=1.88 length=64 batch=12 steps=2000 eval_interval=2001 passes=1
        # Initial weights are the one difference: 0.05 instead of 0.02, too narrow for this width.
        shape="--num-layers 4 --hidden-size 128 --num-attention-heads 4 --init-method-std 0.05
            --attention-dropout 0 --hidden-dropout 0"
        ;;
    gpu)
        published=1.4697 length=256 batch=64 steps=5000 eval_interval=250 passes=5
        shape="--num-layers 6 --hidden-size 384 --num-attention-heads 6
            --attention-dropout 0.2 --hidden-dropout 0.2 --bf16"
        ;;
    *) fail "MODEL $size: cpu or gpu" ;;
esac
[[ -f ${SHAKESPEARE:-} ]] || fail "set SHAKESPEARE to the text (input.txt of tiny Shakespeare)"

characters=$(wc -c <"$SHAKESPEARE")
windows=$(((characters - characters * 9 / 10 - 1) / length))
((windows > 0)) || fail "$SHAKESPEARE: $characters characters are too few"

name=shakespeare-$size
folder=${RUNS:-runs}/$name
text=$folder/text
VOCAB_FILE=$text/vocab.json MERGE_FILE=$text/merges.txt
# shellcheck disable=SC2034 # for common.sh
LAUNCHER=${LAUNCHER:-python} TOKENIZER='' DATA_PATH=$text/char_text_document

# Two documents, and a vocabulary of the characters that occur, in their order (65; nanoGPT's ids).
if [[ -z ${DRY_RUN:-} ]]; then
    python - "$SHAKESPEARE" "$text" <<'PYTHON'
import json, pathlib, sys
from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE

text, folder = pathlib.Path(sys.argv[1]).read_bytes(), pathlib.Path(sys.argv[2])
if not text.isascii():
    sys.exit(f"{sys.argv[1]} is not ASCII: a token would not be a character")
folder.mkdir(parents=True, exist_ok=True)
cut = len(text) * 9 // 10
(folder / "train.txt").write_bytes(text[:cut])
(folder / "validation.txt").write_bytes(text[cut:])
vocabulary = {CHARACTER_OF_BYTE[byte]: i for i, byte in enumerate(sorted(set(text)))}
(folder / "vocab.json").write_text(json.dumps(vocabulary))
(folder / "merges.txt").write_text("#version: 0.2\n")
PYTHON
    python tools/preprocess_data.py --input "$text/train.txt" "$text/validation.txt" \
        --output-prefix "$text/char" --workers 1 \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE"
fi

# shellcheck disable=SC2086
(pretrain "$name" $shape --seq-length $length --disable-bias-linear --no-bias-gelu-fusion \
    --make-vocab-size-divisible-by 1 --split 1,1,0 \
    --deepspeed_config deepspeed_configs/ds_zero1.json \
    --micro-batch-size $batch --global-batch-size $batch --train-iters $steps \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 100 \
    --weight-decay 0.1 --adam-beta2 0.99 --log-interval 100 \
    --eval-interval $eval_interval --eval-iters $(((windows * passes + batch - 1) / batch)) "$@")
[[ -z ${DRY_RUN:-} ]] || exit 0

python - "$folder/metrics.jsonl" "$published" <<'PYTHON'
import json, sys

rows = [row for row in map(json.loads, open(sys.argv[1])) if row["kind"] == "validation"]
if not rows:
    sys.exit("no evaluation yet: start it again, it continues from its checkpoint")
best = min(rows, key=lambda row: row["loss"])
print(f"validation loss {best['loss']:.4f} (nanoGPT: {sys.argv[2]}), step {best['iteration']}")
PYTHON
