"""A program that compiles a constraint within limits, before a server does it in its own process.

It reads JSON from its standard input (grammar, limits, seconds of CPU time, bytes of memory), and
writes the error of the grammar, or nothing. Its argument is the folder of llguidance. It is started
without this package, whose import would take longer than the check.
"""

import json
import resource
import sys


def main() -> None:
    task = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (task["seconds"], task["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (task["memory"], task["memory"]))
    sys.path.append(sys.argv[1])
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokens = LLTokenizer(_Bytes())  # type: ignore[arg-type]
    limits = LLParserLimits(**task["limits"])
    matcher = LLMatcher(tokens, task["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    sys.stdout.write(matcher.get_error())


class _Bytes:
    """A tokenizer for llguidance whose tokens are bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


if __name__ == "__main__":
    main()
