"""Program that compiles a constraint under resource limits, before a server compiles it in its own
process.

It reads JSON from standard input (the grammar, llguidance's limits, seconds of CPU time and bytes
of memory) and writes the grammar's error to standard output, or nothing if it compiles. Its
argument is the folder that contains llguidance. It runs as a plain script, because importing this
package takes longer than the check.
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
    """Byte-level tokenizer with the interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


if __name__ == "__main__":
    main()
