"""Planted bugs of generation: pages, states, drafts, stages and draws."""

# ruff: noqa: E501  texts of the source

from places import COUNT, CUT, FORMULA, GROUP, LOST, MISSING, OFFSET, ORDER, RANKS, SEED, STALE
from planted import Planted

RUN, PAGES, READING, STATES, ROWS, DRAFTS, STAGES = (
    f"apps/generation/execution/{n}.py"
    for n in (
        "runner",
        "paged_attention",
        "page_reading",
        "states",
        "row_rule",
        "drafting",
        "stages",
    )
)
POOL, SCHEDULE = (f"apps/generation/scheduling/{n}.py" for n in ("pages", "schedule"))
DRAW = "apps/generation/decoding/sampling.py"
TESTS = "apps/generation/"
RUNNER = f"{TESTS}execution/test_runner.py::"
CROWD = (f"{RUNNER}test_alone_in_a_crowd_and_in_pieces",)
MODEL = (f"{RUNNER}test_against_the_model_without_pages",)
SHARED = (f"{RUNNER}test_shared_and_copied_pages",)
BEFORE = (f"{RUNNER}test_what_was_in_a_page_before_does_not_matter",)
OF_STATES = (f"{TESTS}execution/test_layer_memory.py",)
DRAFTED = (f"{TESTS}execution/test_drafting.py",)
ROW_RULES = f"{TESTS}execution/test_packed_weights.py::"
ENGINE = f"{TESTS}scheduling/test_engine.py::"
POOLED = f"{TESTS}scheduling/test_pages.py"
LAYOUTS = "distributed/inference/test_runner_layouts.py::test_a_sample_of_layouts[{}]"
SAMPLED = f"{TESTS}decoding/test_sampling.py"

BUGS = [
    Planted("page-of-last-token", "generation", OFFSET, PAGES,
            "part.pages[position // P] for", "part.pages[min(position + 1, positions_S[-1]) // P] for",
            "a token at the end of a page is written into the next one", MODEL),
    Planted("page-not-cleared", "generation", STALE, RUN,
            "[page for part in parts for page in part.pages[-(-part.start // P) :]]", "[]",
            "what was in a page before is seen", BEFORE),
    Planted("page-copies-lost", "generation", STALE, RUN,
            "            self.memory.copy(step.copies)\n", "",
            "a text that leaves a shared page reads an empty one", SHARED),
    Planted("page-window", "generation", OFFSET, READING,
            "return 0 if window is None else max(0, first_key(query, window)) // positions",
            "return 0 if window is None else -(-max(0, first_key(query, window)) // positions)",
            "the page with the first key of a window is left out", MODEL),
    Planted("page-order-of-sums", "generation", ORDER, READING,
            "F.pad(x_BCKGE.flatten(2), (0, -columns % _VECTORS)).sum(1)", "x_BCKGE.flatten(2).sum(1)",
            "a text's sums depend on the pages of others",
            (f"{TESTS}execution/test_page_reading.py::test_sums_next_to_others",)),
    Planted("page-mask-of-later-keys", "generation", OFFSET, READING,
            "hidden_UP = distances_UP < 0", "hidden_UP = distances_UP < -1",
            "a generated token sees one place behind it", (*MODEL, *CROWD)),
    Planted("page-largest-of-a-page", "generation", FORMULA, READING,
            "shares_BCKG1 = (largest_BCKG1 - most_B1KG1).exp_()", "shares_BCKG1 = (most_B1KG1 - largest_BCKG1).exp_().clamp_(max=1)",
            "pages of a text are weighed alike", MODEL),
    Planted("prompt-tiles-from-part", "generation", ORDER, PAGES,
            "before = prompt.start - begin * P\n", "before = 0\n",
            "queries of a prompt that continues stand at the start of a tile", CROWD),
    Planted("pass-cut-within-piece", "generation", CUT, RUN,
            "                end -= (part.start + end) % piece", "                pass",
            "a prompt is cut within a piece of a layer with states", OF_STATES),
    Planted("states-of-neighbour", "generation", RANKS, STATES,
            "_store(pools, [slot], states or ())", "_store(pools, [max(0, slot - 1)], states or ())",
            "the states of a prompt go to another text", OF_STATES),
    Planted("states-not-begun-again", "generation", STALE, STATES,
            "if pieces[0].start else None", "if True else None",
            "a new text begins with the states of the last one in its slot", OF_STATES),
    Planted("rows-of-a-rank", "generation", MISSING, ROWS,
            "            dist.all_gather_object(rules, self, group=group.handle)", "            pass",
            "ranks of a model fill up passes differently",
            (f"{ROW_RULES}test_ranks_agree_on_the_strictest_rule",)),
    Planted("rows-without-spare", "generation", OFFSET, ROWS,
            "padded = max(self.fewest, rows) + self.spare", "padded = max(self.fewest, rows)",
            "the last row that counts has other code",
            (f"{ROW_RULES}test_no_row_that_counts_is_the_last",)),
    Planted("stage-state-lost", "generation", LOST, STAGES,
            "reached = reached.changed(encoder=self._received(length, holder))", "self._received(length, holder)",
            "an encoder's output does not reach the next stage",
            ("distributed/inference/test_runner_neighbors.py::test_the_neighbours_travel_between_stages",)),
    Planted("stage-owner-rank", "generation", RANKS, STAGES,
            "dist.send(hidden.contiguous(), pipeline.ranks[owner], group=pipeline.handle)",
            "dist.send(hidden.contiguous(), owner, group=pipeline.handle)",
            "a rank of the pipeline is taken for a global one", (LAYOUTS.format("gemma2-tp2-pp2"),)),
    Planted("logits-with-padding", "generation", CUT, STAGES,
            "return torch.cat(_gathered(logits_RP, group), dim=1)[:, :vocab_size].float()",
            "return torch.cat(_gathered(logits_RP[:, : vocab_size // group.size], group), dim=1).float()",
            "ranks leave out their last rows of the vocabulary", (LAYOUTS.format("gemma2-tp2-pp2"),)),
    Planted("score-of-absent-token", "generation", LOST, STAGES,
            "    target_R = target_R.masked_fill(absent_R, -torch.inf)\n", "",
            "ranks without a token score their first one",
            ("distributed/inference/test_runner_evaluator.py::test_scores_are_those_of_an_evaluation",)),
    Planted("score-norm-of-rank", "generation", MISSING, STAGES,
            "norms_R = torch.stack(_gathered(norms_R, group)).logsumexp(0)", "norms_R = torch.stack(_gathered(norms_R, group)).amax(0)",
            "scores are normalised by the largest part of the vocabulary",
            ("distributed/inference/test_runner_evaluator.py::test_scores_are_those_of_an_evaluation",)),
    Planted("draft-states-of-page", "generation", OFFSET, DRAFTS,
            "places.append(np.array(part.pages)[at // P] * M + at % P % M)", "places.append(np.array(part.pages)[at // P] * M + np.minimum(at % P, M - 1))",
            "inputs of drafts overwrite each other at the end of a page", DRAFTED),
    Planted("draft-inputs-not-copied", "generation", STALE, DRAFTS,
            "            self._inputs_DXMH[:, target] = self._inputs_DXMH[:, source]", "            pass",
            "a text that leaves a shared page drafts from another", DRAFTED),
    Planted("draft-position", "generation", OFFSET, DRAFTS,
            "position_ids=(places_1T - 1 - depth).clamp(min=0),", "position_ids=places_1T,",
            "blocks ahead have the positions of their tokens",
            (f"{DRAFTED[0]}::test_drafts_are_those_of_the_training_pass[temperature-2]",)),
    Planted("page-digest-without-prefix", "generation", STALE, POOL,
            "before = blake2b(before + page.tobytes(), digest_size=32).digest()", "before = blake2b(page.tobytes(), digest_size=32).digest()",
            "pages of equal tokens after different ones are shared", (POOLED, f"{ENGINE}test_nothing_depends_on_others")),
    Planted("page-digest-without-adapter", "generation", STALE, POOL,
            "    if adapter is not None:\n", "    if adapter is not None and not before:\n        pass\n    if False:\n",
            "texts of different adapters share pages", ("distributed/inference/test_adapters.py::test_equal_prompts_of_other_adapters_share_no_pages",)),
    Planted("page-shared-before-filled", "generation", "read too early", POOL,
            "return self._claims.setdefault(page, owner) == owner", "return False",
            "a page that nothing fills is waited for", (POOLED,)),
    Planted("page-freed-with-users", "generation", COUNT, POOL,
            "            if self._users[page]:\n                continue\n", "",
            "a page is free when its first user leaves", (POOLED,)),
    Planted("prompt-shared-over-adapters", "generation", GROUP, SCHEDULE,
            "key = job.prompt, job.request.adapter", "key = job.prompt, None",
            "requests of other adapters wait for a prompt of the base",
            ("distributed/inference/test_adapters.py::test_equal_prompts_of_other_adapters_share_no_pages",)),
    Planted("step-over-budget", "generation", COUNT, SCHEDULE,
            "decoded = sum(len(part.tokens) + part.drafts for _, part in planned)", "decoded = len(planned)",
            "drafts do not count in a step's tokens", (f"{TESTS}scheduling/test_drafts.py::test_room_for_drafts_in_a_step",)),
    Planted("draw-of-the-same-place", "generation", SEED, DRAW,
            "        self._position += 1\n", "",
            "all tokens of a text are drawn by one number", (SAMPLED,)),
    Planted("draw-edge", "generation", OFFSET, DRAW,
            'sums.searchsorted(target, "right") if', 'sums.searchsorted(target, "left") if',
            "a token without probability can be drawn", (SAMPLED,)),
    Planted("penalty-of-prompt", "generation", COUNT, DRAW,
            "self._counts: Counter[int] = Counter()", "self._counts: Counter[int] = Counter(prompt)",
            "tokens of the prompt count as repeated", (SAMPLED,)),
]  # fmt: skip
