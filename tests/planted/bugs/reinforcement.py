"""Planted bugs of reinforcement learning and of preferences."""

# ruff: noqa: E501  texts of the source

from places import COUNT, FORMULA, GROUP, LOST, OFFSET, ORDER, SCALE, STALE
from planted import Planted

BETTER, LOSSES, KEPT, BATCHES, OBJECTIVE = (
    f"apps/reinforcement/{n}.py" for n in ("advantages", "losses", "kept", "batches", "objective")
)
PAIRS = "features/preference/losses.py"
ADVANTAGES, OF_LOSSES = (f"apps/reinforcement/test_{n}.py" for n in ("advantages", "losses"))
FORMULAS = "features/preference/test_preference.py"
CELL = "distributed/parity/test_reinforcement.py::test_gradients_against_one_process[{}]"
AGAIN = "distributed/test_reinforcement.py::test_continued_in_the_middle_of_a_generation[passes]"

BUGS = [
    Planted("group-deviation-of-population", "reinforcement", FORMULA, BETTER,
            "result_E / (np.sqrt(squares_E / (count_E - 1)) + SMALLEST_DEVIATION)", "result_E / (np.sqrt(squares_E / count_E) + SMALLEST_DEVIATION)",
            "rewards are divided by the deviation of all texts", (ADVANTAGES, "apps/reinforcement/test_against_trl.py")),
    Planted("failed-rewards-count", "reinforcement", COUNT, BETTER,
            "count_E, sum_E = groups.sum(known_E.astype(np.float64)), groups.sum(zeroed_E)",
            "count_E, sum_E = groups.sum(np.ones_like(zeroed_E)), groups.sum(zeroed_E)",
            "texts without a reward count as zero", (ADVANTAGES,)),
    Planted("groups-by-neighbours", "reinforcement", GROUP, BETTER,
            "_, self._places_E = np.unique(groups_E, return_inverse=True)", "self._places_E = np.arange(len(groups_E)) // max(1, len(groups_E) // len({*groups_E.tolist()}))",
            "groups are runs of texts, whatever their numbers", (f"{ADVANTAGES}::test_groups_of_any_order",)),
    Planted("value-after-the-end", "reinforcement", OFFSET, BETTER,
            "next_EL = np.pad(values_EL[:, 1:], ((0, 0), (0, 1)))", "next_EL = np.pad(values_EL[:, 1:], ((0, 0), (0, 1)), mode=\"edge\")",
            "the last token expects a value after the end", (ADVANTAGES,)),
    Planted("reward-at-last-place", "reinforcement", OFFSET, BETTER,
            "rewards_EL[written_E, lengths_E[written_E] - 1] += rewards_E[written_E]", "rewards_EL[written_E, -1] += rewards_E[written_E]",
            "short texts have their reward behind their end", (ADVANTAGES,)),
    Planted("tokens-of-a-micro-batch", "reinforcement", SCALE, LOSSES,
            "return mean if options.loss_type == \"bnpo\" else mean * tokens.share", "return mean",
            "losses are means over ranks and micro batches of different numbers of tokens",
            (f"{OF_LOSSES}::test_micro_batches_add_up_to_a_step",)),
    Planted("clipped-side", "reinforcement", FORMULA, LOSSES,
            "-torch.min(bounded * advantages_BS, clipped * advantages_BS)", "-torch.max(bounded * advantages_BS, clipped * advantages_BS)",
            "the better of both bounds counts", ("apps/reinforcement/test_against_trl.py", CELL.format("tp2-sp-untied-grpo"), OF_LOSSES)),
    Planted("divergence-direction", "reinforcement", FORMULA, LOSSES,
            "return torch.exp(-ratio_BS) + ratio_BS - 1", "return torch.exp(ratio_BS) - ratio_BS - 1",
            "the divergence is that of the reference from the policy", (f"{OF_LOSSES}::test_estimates_of_the_divergence",)),
    Planted("value-loss-clipped", "reinforcement", FORMULA, LOSSES,
            "total = (torch.maximum(*errors) * mask_BS).sum() / 2", "total = (torch.minimum(*errors) * mask_BS).sum() / 2",
            "the smaller error of values counts", (f"{OF_LOSSES}::test_value_loss",)),
    Planted("kept-texts-without-old", "reinforcement", STALE, KEPT,
            '_OF_TOKENS = "advantages_L", "returns_L", "old_L", "reference_L", "values_L"', '_OF_TOKENS = "advantages_L", "returns_L", "reference_L", "values_L"',
            "a run that continues compares with the weights of now", (AGAIN,)),
    Planted("kept-texts-shifted", "reinforcement", OFFSET, KEPT,
            "return [self.written_E[at * size : (at + 1) * size] for at in range(count)]", "return [self.written_E[at::count] for at in range(count)]",
            "groups are divided over steps", ("distributed/test_reinforcement.py::test_texts_of_later_steps",
             "distributed/test_reinforcement.py::test_replaced_groups_are_the_same_everywhere", AGAIN)),
    Planted("prompt-tokens-count", "reinforcement", COUNT, BATCHES,
            "before = len(each.prompt.tokens) - 1\n", "before = max(0, len(each.prompt.tokens) - 2)\n",
            "the last token of the prompt is trained", ("apps/reinforcement/test_exact.py", AGAIN)),
    Planted("pair-equal-rewards", "reinforcement", ORDER, OBJECTIVE,
            "return (second_N > first_N).long()", "return (second_N >= first_N).long()",
            "of equal texts the second is the better one", ("apps/reinforcement/test_losses.py",)),
    Planted("preference-ratio-of-sum", "reinforcement", SCALE, PAIRS,
            "margin_N = _margin(ratio_R / answers.tokens_R)", "margin_N = _margin(ratio_R)",
            "the margin of ipo is that of whole answers", (FORMULAS, "features/preference/test_against_trl.py")),
    Planted("preference-pairs-shifted", "reinforcement", ORDER, PAIRS,
            "return values_R[0::2] - values_R[1::2]", "half = len(values_R) // 2\n    return values_R[:half] - values_R[half:]",
            "better answers are taken to come before all worse ones", (FORMULAS,)),
    Planted("preference-reference-point", "reinforcement", LOST, PAIRS,
            "kl = other_N.mean().clamp(min=0)", "kl = ratio_N.detach().mean().clamp(min=0)",
            "the reference point is that of the judged answers", (FORMULAS,)),
    Planted("preference-cross-entropy-of-means", "reinforcement", SCALE, PAIRS,
            "return {LM_LOSS: -total / answers.text_tokens_R[0::2].sum()}", "return {LM_LOSS: -(answers.text_log_prob_R[0::2] / answers.text_tokens_R[0::2]).mean()}",
            "the cross entropy is a mean of answers and not of tokens", (FORMULAS,)),
]  # fmt: skip
