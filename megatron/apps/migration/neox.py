"""Rules of GPT-NeoX's keys that are more than a name (``tables/neox.txt``).

Their meaning is that of GPT-NeoX 2.0: https://github.com/EleutherAI/gpt-neox.
"""

from __future__ import annotations

import re
from typing import Any

from megatron.apps.migration.deepspeed_keys import put_zero
from megatron.apps.migration.rules import rules_of
from megatron.apps.migration.translation import Translation

_EPSILON = {"layernorm": ("layernorm_epsilon", 1e-5), "rmsnorm": ("rms_norm_epsilon", 1e-8)}
_INITIALISATIONS = ("normal", "scaled_normal")


def norm(t: Translation) -> None:
    kind = t.get("norm", "layernorm")
    if kind not in _EPSILON:
        t.lose("norm scalenorm_epsilon", f"there is no {kind}; LayerNorm and RMSNorm are there")
        return
    biased = t.get("use_bias_in_norms", True)
    plain = "LayerNorm" if biased else "UnbiasedLayerNorm"
    names = "norm use_bias_in_norms" if kind == "layernorm" and not biased else "norm"
    t.put(names, "--normalization", plain if kind == "layernorm" else "RMSNorm")
    name, default = _EPSILON[kind]
    t.put(name, "--norm-epsilon", t.get(name, default))
    t.harmless("layernorm_epsilon rms_norm_epsilon scalenorm_epsilon", f"norm is {kind}")


def positions(t: Translation) -> None:
    kind = t.get("pos_emb", "learned")
    names = {"learned": "learned_absolute", "rotary": "rope", "rpe": "relative"}
    t.put("pos_emb", "--position-embedding-type", names.get(kind, kind))
    if kind == "rotary":
        t.put("rotary_pct", "--rotary-percent", t.get("rotary_pct", 1.0))
        t.put("rotary_emb_base", "--rotary-base", t.get("rotary_emb_base", 10000))
    if kind == "rpe":
        t.lose("pos_emb", "relative biases are for T5 (pretrain_t5.py); GPTs have rope or alibi")
    keys = "rotary_pct rotary_emb_base rpe_num_buckets rpe_max_distance"
    t.harmless(keys, f"pos_emb is {kind}")


def mlp(t: Translation) -> None:
    """Width of the MLP: a gated one has int(2/3 I) // 2 channels of ``intermediate_size`` I,
    rounded up to ``mlp_multiple_of``."""
    kind, llama = t.get("activation", "gelu"), t.get("mlp_type") == "llama"
    gated = {"swiglu": "swiglu", "geglu": "geglu_erf"}.get("swiglu" if llama else kind)
    multiple = int(t.get("mlp_multiple_of", 256 if llama else 1))
    size_key = "feedforward_size" if "feedforward_size" in t.source else "intermediate_size"
    size = t.get(size_key)
    if size is None and t.get("expansion_factor") is not None:
        size, size_key = int(t.get("expansion_factor") * t.get("hidden_size")), "expansion_factor"
    if size is None:
        size = 4 * int(t.get("hidden_size", 0))
    width = int(2 * int(size) / 3) // (1 if llama else 2) if gated else int(size)
    width = -(-width // multiple) * multiple
    t.put(
        [size_key, "mlp_multiple_of"],
        "--ffn-hidden-size",
        width,
        note="of gated MLPs a share" if gated else "",
    )
    t.harmless("intermediate_size feedforward_size expansion_factor", f"{size_key} is used")
    if gated:
        t.put(["activation", "mlp_type"], "--glu-activation", gated)
    elif kind == "relu":
        t.put("activation", "--relu")
    elif kind == "gelu":
        fused = bool(t.get("bias_gelu_fusion", False))
        t.put(["bias_gelu_fusion"], "--no-bias-gelu-fusion", fused)
        for key in t.given("activation"):
            t.tell(key, "GELU" if fused else "exact GELU: --no-bias-gelu-fusion")
    elif kind in ("silu", "swish"):
        t.lose("activation", "MLPs with SiLU are gated here: --swiglu is another network")
    else:
        t.lose("activation", f"there is no {kind}")
    t.harmless("mlp_type", "the plain MLP")
    t.harmless("bias_gelu_fusion use_flashattn_swiglu", "fusion comes from --torch-compile")
    t.lose("swiglu_limit", "--activation-func-clamp-value is another function")


def biases(t: Translation) -> None:
    attention, inner = t.get("use_bias_in_attn_linear", True), t.get("use_bias_in_mlp", True)
    if not (attention and inner):
        t.put("use_bias_in_attn_linear use_bias_in_mlp", "--disable-bias-linear")
        if attention:
            t.put("use_bias_in_attn_linear", "--add-attention-bias")
        if inner:
            t.put("use_bias_in_mlp", "--add-mlp-bias")
    t.harmless("use_bias_in_attn_linear use_bias_in_mlp", "linear layers have biases")
    t.harmless("use_bias_in_norms", "LayerNorm has a bias, RMSNorm has none")


def residual(t: Translation) -> None:
    if t.get("gpt_j_residual", False):
        t.put("gpt_j_residual", "--parallel-residual")
        t.put("gpt_j_tied", "--shared-parallel-norm", t.get("gpt_j_tied", False))
    t.harmless("gpt_j_residual", "attention and MLP follow each other")
    t.harmless("gpt_j_tied", "it has an effect with gpt_j_residual only")


def initialisation(t: Translation) -> None:
    kind, out = t.get("init_method", "normal"), t.get("output_layer_init_method", "scaled_normal")
    keys = "init_method output_layer_init_method init_method_std"
    if kind == "xavier_uniform":
        t.put("init_method", "--init-method-xavier-uniform")
        t.harmless("init_method_std", "init_method is xavier_uniform")
    elif kind in _INITIALISATIONS:
        t.put("init_method_std", "--init-method-std", t.get("init_method_std", 0.02))
        t.harmless("init_method", "the normal distribution is the default")
    elif kind == "small_init":
        std = (2 / (5 * t.get("hidden_size", 1))) ** 0.5
        t.put("init_method", "--init-method-std", round(std, 8), note="sqrt(2 / (5 x hidden size))")
        t.harmless("init_method_std", "init_method is small_init")
    else:
        t.lose("init_method", f"weights start from the normal distribution, not {kind}")
        t.put("init_method_std", "--init-method-std", t.get("init_method_std", 0.02))
    if out in ("scaled_normal", *(("xavier_uniform",) if kind == out else ())):
        t.harmless("output_layer_init_method", "output projections start like that")
    else:
        t.lose(
            "output_layer_init_method",
            f"output projections start with --init-method-std over sqrt(2 x layers), not {out}",
        )
    t.harmless(keys, "it is the default")


def attention(t: Translation) -> None:
    kinds = set(re.findall(r"[a-z_]+", str(t.get("attention_config", []))))
    keys = ["attention_config"]
    if kinds <= {"global", "flash"}:
        if "flash" in kinds:
            t.put(keys, "--attention-backend", "flash")
        t.harmless(keys, "every layer attends to all tokens before")
    else:
        t.lose(
            keys,
            f"attention of the kinds ', '.join(sorted(kinds - {'global', 'flash'})): it is "
            "dense, or local with --sliding-window",
        )


def architecture(t: Translation) -> None:
    if t.get("model_arch", "gpt2") == "gpt2":
        t.harmless("model_arch", "pretrain_gpt.py trains it")
    t.lose("model_arch", "pretrain_t5.py trains a T5; write its flags by hand")


def pipeline(t: Translation) -> None:
    if int(t.get("pipe_parallel_size", 0)) > 1:
        t.put("pipe_parallel_size", "--pipeline-model-parallel-size", t.get("pipe_parallel_size"))
    t.harmless("pipe_parallel_size", "0 and 1 are no pipeline")


def partition(t: Translation) -> None:
    method = str(t.get("pipe_partition_method", "type:transformer|mlp")).lower()
    if int(t.get("pipe_parallel_size", 0)) < 2:
        t.harmless("pipe_partition_method", "there is no pipeline")
    elif method == "parameters":
        t.put("pipe_partition_method", "--pipeline-partition", "parameters")
    elif method.startswith("type:") and "transformer" in method:
        t.put("pipe_partition_method", "--pipeline-partition", "blocks")
    else:
        t.lose(
            "pipe_partition_method",
            "--pipeline-partition has blocks, parameters, or the number of blocks of each stage",
        )


def recompute(t: Translation) -> None:
    if t.get("checkpoint_activations", False):
        t.put("checkpoint_activations", "--recompute-granularity", "full")
        t.put("checkpoint_activations", "--recompute-method", "uniform")
        t.put("checkpoint_num_layers", "--recompute-num-layers", t.get("checkpoint_num_layers", 1))
        if int(t.get("model_parallel_size", 1)) > 1 and not t.get("sequence_parallel", False):
            t.put(
                "partition_activations",
                "--partition-activations",
                t.get("partition_activations", False),
            )
        t.put("checkpoint_in_cpu", "--checkpoint-in-cpu", t.get("checkpoint_in_cpu", False))
        t.harmless(
            "partition_activations",
            "there are no tensor-parallel ranks to divide them over, or --sequence-parallel does",
        )
    keys = "checkpoint_activations checkpoint_num_layers partition_activations checkpoint_in_cpu"
    t.harmless(keys, "nothing is recomputed without checkpoint_activations")


def accumulation(t: Translation) -> None:
    if "train_batch_size" in t.source:
        t.harmless("gradient_accumulation_steps gas", "it follows from train_batch_size")
        return
    steps = t.get("gradient_accumulation_steps", t.get("gas", 1))
    t.put("gradient_accumulation_steps gas", "--num-accumulation-steps", steps)


def split(t: Translation) -> None:
    if "split" in t.source:
        t.put("split", "--split", str(t.get("split")).replace(" ", ""))


def _data(t: Translation, which: str, flag: str) -> None:
    keys = [f"{which}_data_paths", f"{which}_data_weights"]
    paths, weights = t.get(keys[0], []), t.get(keys[1], [])
    if len(paths) == 1:
        t.put(keys[0], flag, paths[0])
        t.harmless(keys, "there is one path")
    elif paths:
        weights = weights or [1] * len(paths)
        words = [word for pair in zip(weights, paths, strict=False) for word in pair]
        t.put(keys, flag, *words)
    t.harmless(keys, "it is not set")


def train_data(t: Translation) -> None:
    _data(t, "train", "--train-data-path")


def valid_data(t: Translation) -> None:
    _data(t, "valid", "--valid-data-path")


def test_data(t: Translation) -> None:
    _data(t, "test", "--test-data-path")


def tokenizer(t: Translation) -> None:
    kind, file = t.get("tokenizer_type", "GPT2BPETokenizer"), t.get("vocab_file")
    if kind == "GPT2BPETokenizer":
        t.put("tokenizer_type", "--tokenizer-type", kind)
        if file:
            t.put("vocab_file", "--vocab-file", file)
        if t.get("merge_file"):
            t.put("merge_file", "--merge-file", t.get("merge_file"))
        return
    names = {
        "HFTokenizer": "HFTokenizer",
        "HFGPT2Tokenizer": "HFTokenizer",
        "SPMTokenizer": "GPTSentencePieceTokenizer",
    }
    if kind not in names:
        t.lose(
            "tokenizer_type vocab_file",
            f"there is no {kind}; --tokenizer-type HFTokenizer reads a folder of Hugging Face",
        )
        return
    t.put("tokenizer_type", "--tokenizer-type", names[kind])
    if file:
        folder = file.rpartition("/")[0] or "." if str(file).endswith("tokenizer.json") else file
        t.put("vocab_file", "--tokenizer-model", folder)
    t.harmless("merge_file", f"{kind} has no merges file")


def optimizer(t: Translation) -> None:
    key = "optimizer.type" if "optimizer.type" in t.source else "optimizer_type"
    kind = str(t.get(key, "adam")).lower()
    names = {
        "adam": "adam",
        "adamw": "adam",
        "cpu_adam": "adam",
        "cpu_torch_adam": "adam",
        "sgd": "sgd",
        "lion": "lion",
    }
    if kind in names:
        t.put(key, "--optimizer", names[kind])
        if kind.startswith("cpu"):
            t.put_json(key, "zero_optimization.offload_optimizer.device", "cpu")
    else:
        t.lose(key, f"there is no {kind}; --optimizer has adam, muon, soap, lion and others")
    t.harmless("optimizer_type", "optimizer.type is used")
    t.lose(
        "use_bnb_optimizer",
        "--use-precision-aware-optimizer --exp-avg-dtype int8 --exp-avg-sq-dtype int8 keeps "
        "moments in 8 bits",
    )


def decay_fraction(t: Translation) -> None:
    if "lr_decay_fraction" in t.source and "train_iters" in t.source:
        iters = int(t.get("lr_decay_fraction") * t.get("train_iters"))
        t.put("lr_decay_fraction", "--lr-decay-iters", iters)


def precision(t: Translation) -> None:
    given = {"bfloat16": "bf16", "bf16": "bf16"}.get(t.get("precision"), t.get("precision"))
    if given is None:
        given = "bf16" if t.get("bf16.enabled") else "fp16" if t.get("fp16.enabled") else "fp32"
        if t.get("fp16.type") == "bfloat16" and given == "fp16":
            given = "bf16"
    keys = "precision fp16 fp16.enabled fp16.type fp16.auto_cast bf16 bf16.enabled"
    if given in ("fp16", "bf16"):
        t.put("precision" if t.get("precision") else f"{given}.enabled", f"--{given}")
    t.harmless(keys, f"training is in {given}")


def scale(t: Translation) -> None:
    if "fp16.initial_scale_power" in t.source:
        power = t.get("fp16.initial_scale_power")
        t.put("fp16.initial_scale_power", "--initial-loss-scale", 2 ** int(power))


def accumulate(t: Translation) -> None:
    keys = "fp32_allreduce data_types.grad_accum_dtype"
    on = [key for key in t.given(keys) if t.source[key] in (True, "fp32")]
    if on:
        t.put(on[0], "--accumulate-allreduce-grads-in-fp32")
    t.harmless(keys, "it is off, or said already")


def zero(t: Translation) -> None:
    put_zero(t, "zero_optimization.")


def extra(t: Translation) -> None:
    for key in [k for k in t.source if k.startswith("deepspeed_extra_args.")]:
        t.put_json(key, key.partition(".")[2], t.source[key])


def save_interval(t: Translation) -> None:
    if t.get("checkpoint_scale", "linear") == "linear":
        every = t.get("checkpoint_factor", t.get("save_interval"))
        if every is not None:
            t.put("checkpoint_factor save_interval", "--save-interval", every)
        t.harmless("checkpoint_scale", "it is the default")
    else:
        t.lose(
            "checkpoint_scale checkpoint_factor",
            "checkpoints are saved at multiples of --save-interval",
        )
    t.harmless("checkpoint_factor save_interval", "it is not set")


def wandb(t: Translation) -> None:
    keys = "use_wandb wandb_project wandb_team wandb_group wandb_host wandb_init_all_ranks"
    if not t.get("use_wandb", False):
        t.harmless(keys, "use_wandb is off")
        return
    t.put("use_wandb wandb_project", "--wandb-project", t.get("wandb_project", "neox"))
    if t.get("wandb_team"):
        t.put("wandb_team", "--wandb-entity", t.get("wandb_team"))
    if t.get("wandb_group"):
        t.put("wandb_group", "--run-name", t.get("wandb_group"))
    t.harmless("wandb_team wandb_group", "it is not set")
    t.harmless(
        "wandb_host wandb_init_all_ranks", "WANDB_BASE_URL in the environment names another server"
    )


def noise(t: Translation) -> None:
    keys = (
        "log_gradient_noise_scale gradient_noise_scale_n_batches gradient_noise_scale_cpu_offload"
    )
    if t.get("log_gradient_noise_scale", False):
        every = t.get("gradient_noise_scale_n_batches", 5)
        t.put(
            "log_gradient_noise_scale gradient_noise_scale_n_batches",
            "--gradient-noise-interval",
            every,
        )
    t.harmless(keys, "it is off, or needs no memory here")


def launcher(t: Translation) -> None:
    words: dict[str, Any] = {
        "hostfile": "--hostfile",
        "include": "--include",
        "exclude": "--exclude",
    }
    words |= {
        k: f"--{k}" for k in ("num_nodes", "num_gpus", "master_port", "master_addr", "launcher")
    }
    for key, word in words.items():
        value = t.source.get(key)
        if value is not None and value != -1:
            t.launcher += [word, str(value)]
            t.tell(key, f"deepspeed {word} {value}")
    if isinstance(t.get("num_gpus"), int):
        t.processes = t.get("num_gpus") * max(1, int(t.get("num_nodes", 1)))
    t.harmless([*words], "it is not set")
    names = (
        "force_multi no_ssh_check comment account detect_nvlink_pairs autotuning_run launcher_args"
    )
    t.lose(names, "a setting of its launcher; give deepspeed's own words before the program")


RULES = rules_of(__name__)
