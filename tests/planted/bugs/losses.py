"""Planted bugs of what losses and evaluations count."""

# ruff: noqa: E501  texts of the source

from places import (
    COUNT,
    CROSS,
    CUT,
    EVALUATION,
    FORMULA,
    HEAD,
    LOST,
    MISSING,
    OFFSET,
    ORDER,
    RANKS,
    SCALE,
    STALE,
    TRAIN,
    TRAINER,
)  # fmt: skip
from planted import Planted

DISTILL = "features/distillation/divergence.py"
AHEAD = TARGETS = "features/multi_token/layers.py"
REFERENCE = "features/preference/reference.py"
LENGTHS = "distributed/evaluation/test_scores.py"
HEADS = "core/parallel/test_cross_entropy.py"
DIVERGENCE = "features/distillation/test_divergence.py"
TAUGHT = "distributed/parity/test_distillation.py::test_against_one_process[tp2-sp-pp2-interleaved-documents]"
DIVIDED = "distributed/parallel/test_distillation.py::test_two_ranks_against_one"
DEFINED = "features/multi_token/test_definition.py"
PIPE = "distributed/engine/test_pipeline.py::test_ramp_up_and_evaluation"

BUGS = [
    Planted("loss-by-micro-batch-of-rank", "losses", SCALE, TRAIN,
            "means = self._mean_over_ranks(sums / micro_batches)", "means = self._mean_over_ranks(sums) / self.mesh.samples.size",
            "the reported loss is divided by ranks instead of micro batches",
            ("distributed/engine/test_rate_groups.py::test_layouts_train_alike[tp2]",)),
    Planted("evaluation-of-last-batch", "losses", LOST, TRAIN,
            "reduce(add, self.measured(batches, count, measure), sums) / count", "reduce(add, self.measured(batches, count, measure)[:1], sums) / 1",
            "an evaluation is that of its first batch",
            ("features/evaluation/test_evaluation.py::test_an_evaluation_is_the_mean_of_its_batches",)),
    Planted("rows-of-other-stages", "losses", MISSING, EVALUATION,
            "    dist.all_reduce(rows, group=pipeline.handle)\n    return rows", "    return rows",
            "stages without the head have zeros for scores", (LENGTHS,)),
    Planted("rows-in-order-of-world", "losses", RANKS, EVALUATION,
            "return torch.stack(parts).cpu()", "return torch.stack(parts).flip(0).cpu()",
            "rows of data ranks are in the opposite order", (LENGTHS, "distributed/parity/test_toy_family.py::test_a_whole_data_set_counts_every_sample_once")),
    Planted("samples-of-a-round-swapped", "losses", ORDER, EVALUATION,
            "values[numbers] = rows.swapaxes(0, 1)", "values[numbers] = rows.reshape(numbers.shape + rows.shape[3:])",
            "numbers are given to samples of other ranks", (LENGTHS, "distributed/parity/test_toy_family.py::test_a_whole_data_set_counts_every_sample_once")),
    Planted("last-round-dropped", "losses", LOST, EVALUATION,
            "    for start in range(0, count, ranks * size):\n", "    for start in range(0, count - ranks * size + 1, ranks * size):\n",
            "samples that do not fill a round have no numbers", (LENGTHS, "distributed/parity/test_toy_family.py::test_a_whole_data_set_counts_every_sample_once")),
    Planted("padded-length-of-first", "losses", CUT, EVALUATION,
            "longest = -(-table[samples].max(0) // multiple) * multiple", "longest = -(-table[samples].min(0) // multiple) * multiple",
            "texts are cut at the shortest of their batch", (LENGTHS,)),
    Planted("validation-batches-of-rank", "losses", SCALE, "training/plan.py",
            "per_batch = self.global_batch_size // (self.micro_batch_size * self._replicas)", "per_batch = self.global_batch_size // self.micro_batch_size",
            "each rank evaluates the whole batch", ("core/training/test_plan.py", PIPE, "distributed/engine/test_resume.py::test_evaluation_alone")),
    Planted("validation-continues-too-far", "losses", STALE, TRAINER,
            "consumed = self.plan.valid_samples_before(self.iteration)\n                options = self.reading(consumed_samples=consumed)\n                self._valid[name]",
            "consumed = 0\n                options = self.reading(consumed_samples=consumed)\n                self._valid[name]",
            "after a restart the first validation samples are read again",
            ("distributed/engine/test_resume.py::test_resume_is_bitwise[zero1-dp2-fp16-stop4-0]", "distributed/engine/test_resume.py::test_resume_is_bitwise[t5-zero0-pp2-stop4-0]")),
    Planted("mask-not-in-gradient", "losses", LOST, CROSS,
            "self.multiply(chunk, logits_CP, None if self.compiled else mask_C)", "self.multiply(chunk, logits_CP, None)",
            "tokens that do not count have gradients", (HEADS,)),
    Planted("counted-tokens-of-chunk", "losses", SCALE, CROSS,
            "return (total / self.counted,)", "return (total / len(self.mask_T),)",
            "the loss is divided by all tokens", (HEADS,)),
    Planted("label-behind-vocabulary", "losses", OFFSET, CROSS,
            "labels_T = labels_T.masked_fill(labels_T >= self.columns.used, -1)", "labels_T = labels_T.masked_fill(labels_T > self.columns.used, -1)",
            "a label of the next rank is taken for padding's", (HEADS,)),
    Planted("targets-in-order-of-parts", "losses", ORDER, HEAD,
            "return context.sum(zeros.scatter_add(1, self.places_BP, x_BP))", "return context.sum(F.pad(x_BP, (0, zeros.shape[1] - x_BP.shape[1])))",
            "numbers of targets at positions are not put back", ("core/parallel/test_context.py", "distributed/parity/test_preferences.py::test_gradients_against_one_process[cp2-untied-dpo]")),
    Planted("targets-padding-counts", "losses", COUNT, HEAD,
            "        here_BP &= self.mask_BS != 0\n", "",
            "positions that do not count are sent to their rank", ("core/parallel/test_context.py",)),
    Planted("teacher-norm-of-rank", "losses", MISSING, DISTILL,
            "    if group.size > 1:\n        dist.all_reduce(rest_C, group=group.handle)",
            "    if False:\n        dist.all_reduce(rest_C, group=group.handle)",
            "the tokens that are left out are those of one rank",
            (DIVIDED,)),
    Planted("student-sum-not-lowered", "losses", FORMULA, DISTILL,
            "self.sums_3C[1] = (softened_TC * (lower_TC / self.terms.temperature).exp()).sum(0)", "self.sums_3C[1] = softened_TC.sum(0)",
            "sums of ranks are added as if they had one largest logit", (DIVIDED, TAUGHT)),
    Planted("divergence-without-temperature", "losses", SCALE, DISTILL,
            "divergence = divergence * (terms.temperature**2 / self.counted)", "divergence = divergence / self.counted",
            "the divergence lacks the square of the temperature", (DIVERGENCE,)),
    Planted("ahead-loss-of-document-end", "losses", COUNT, TARGETS,
            "        mask_BS = mask_BS * same_BS\n", "        mask_BS = mask_BS * read_BS\n",
            "the first token of the next document counts", (DEFINED,)),
    Planted("ahead-beginning-counts", "losses", COUNT, TARGETS,
            "return Targets(labels_BP, mask_BP * before_BP, places_BP)", "return Targets(labels_BP, mask_BP, places_BP)",
            "targets at the beginning of a row, which no place is before, count", (f"{DEFINED}::test_positions_of_the_head_change_nothing",)),
    Planted("ahead-weight-lost", "losses", SCALE, AHEAD,
            "            loss = loss * self.weights_2[0].to(loss.dtype)", "            pass",
            "losses ahead do not have the weight of their micro batch", (f"{DEFINED}::test_losses_ahead_have_the_weight_of_their_micro_batch",)),
    Planted("reference-of-second-answer", "losses", ORDER, REFERENCE,
            "lambda number: part.rows(number // 2)[number % 2]", "lambda number: part.rows(number // 2)[1 - number % 2]",
            "better and worse answers have each other's reference",
            ("distributed/engine/test_reference.py::test_once", "distributed/engine/test_reference.py::test_against_transformers[dpo-1]")),
    Planted("reference-without-adapters", "losses", STALE, REFERENCE,
            "    if config.section(PreferenceConfig).reference_checkpoint is not None:\n        return spec, 0\n", "",
            "a reference of its own is taken for the base", ("distributed/engine/test_reference.py::test_a_reference_of_its_own_has_all_its_bits",)),
]  # fmt: skip
