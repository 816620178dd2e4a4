"""The lists of upstream flags: each has one state, which is what the parser does."""

from __future__ import annotations

import pytest
from programs import PROGRAMS, flags_of
from upstream import STATES, UPSTREAMS, UpstreamFlag, errors_of, page, states_of, upstream_flags

from megatron.apps.migration.advice import another_program
from megatron.config import FLAG_CLASSES, FlagParser
from megatron.formats.refused_flags import OWN_FLAGS, REFUSED

SIZES = {"megatron-deepspeed": 322, "megatron-lm-2023": 253, "megatron-lm": 807}
EXAMPLES = {
    "--muon-coefficient-type": "quintic",
    "--split": "98,2,0", "--profile_steps": "2,3", "--zero-stage": "1",
    "--rampup-batch-size": "16 16 100", "--mlp-type": "standard",
    "--loss-scale-window": "1000", "--window-attn-skip-freq": "2",
    "--sft-tokenizer-prompt-format": "chat", "--recompute-modules": "mlp_act",
}  # fmt: skip


@pytest.fixture(scope="module")
def parser() -> FlagParser:
    return FlagParser(*FLAG_CLASSES, prog="pretrain_gpt.py")


def listed() -> dict[tuple[str, ...], list[UpstreamFlag]]:
    """The flags of all lists, with the kinds that they have in them."""
    found: dict[tuple[str, ...], list[UpstreamFlag]] = {}
    for name in UPSTREAMS:
        for flag in upstream_flags(name)[1]:
            found.setdefault(flag.names, []).append(flag)
    return found


@pytest.mark.parametrize("name", UPSTREAMS)
def test_list_is_whole_and_names_its_source(name):
    source, flags = upstream_flags(name)
    assert source.startswith("https://github.com/") and len(source.split()[1]) >= 8
    assert len(flags) == SIZES[name]
    names = [name for flag in flags for name in flag.names]
    assert len(names) == len(set(names)) and all(flag.kind for flag in flags)


def test_every_flag_has_one_state(parser):
    wrong = {names: states for names, (flag, *_) in listed().items()
             if len(states := {state for state, _ in states_of(flag)}) != 1}  # fmt: skip
    assert not wrong


def test_parser_does_what_the_page_says(parser, capsys):
    """Flags that are known parse with their upstream value, others are refused with their line."""
    wrong = []
    for flags in listed().values():
        for flag in flags:
            ((state, text),) = {sorted(states_of(flag))[0]}
            for name in flag.names:
                refused_words = errors_of(flag) if flag.choices else ()
                words = EXAMPLES[name].split() if name in EXAMPLES else flag.values
                if refused_words and state != "refused":
                    words = [word for word in flag.choices if word not in refused_words][:1]
                words = [name, *words]
                try:
                    parser.settings(words)
                    done = ""
                except SystemExit as end:
                    done = capsys.readouterr().err
                    assert end.code == 2
                expected = (
                    f"pretrain_gpt.py: error: {name} is not supported here: {text}\n"
                    if state == "refused"
                    else ""
                )
                if done != expected:
                    wrong.append((words, state, done))
    assert not wrong


def test_every_row_of_the_refused_flags_is_needed():
    used = {text for flags in listed().values() for state, text in states_of(flags[0])
            if state == "refused"}  # fmt: skip
    assert set(REFUSED.values()) <= used


def test_page_counts_every_flag_once():
    text = page()
    for name, title in UPSTREAMS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
        total, *counts = (int(cell) for cell in row.split("|")[2:-1])
        assert total == SIZES[name] == sum(counts) and len(counts) == len(STATES)
        assert all(counts)


def test_flags_of_other_programs_are_theirs():
    own = {program: set().union(*(flags_of(p) for p in PROGRAMS if p[0] == program))
           for program in OWN_FLAGS}  # fmt: skip
    training = flags_of(("pretrain_gpt.py",))
    for program, flags in OWN_FLAGS.items():
        assert set(flags.split()) <= own[program] - training, program


def test_tools_and_training_say_whose_flag_it_is():
    def of_training() -> set[str]:
        return flags_of(("pretrain_gpt.py",))

    assert (
        another_program("--json-keys", "pretrain_gpt.py", of_training)
        == "is a flag of tools/preprocess_data.py"
    )
    assert (
        another_program("--lr", "preprocess_data.py", of_training) == "is a flag of pretrain_gpt.py"
    )
    assert (
        another_program("--architecture", "convert_checkpoint.py to-gguf", of_training)
        == "is no flag of to-gguf, but of another command of tools/convert_checkpoint.py"
    )
    assert another_program("--learning-speed", "preprocess_data.py", of_training) is None


def test_a_value_that_asks_for_something_else_is_an_error(parser, capsys):
    (flag,) = [f for f in listed()["--data-impl",] if "lazy" in f.choices]
    assert errors_of(flag) == ("lazy", "cached")
    for word in errors_of(flag):
        with pytest.raises(SystemExit):
            parser.settings(["--data-impl", word])
        assert f"{word} is not supported here, mmap or infer is" in capsys.readouterr().err
