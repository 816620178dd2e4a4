"""Flags that set the lengths of generated documents and the depths of their answers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import ConfigError
from megatron.config.flags import option

_SHORTEST, _DEPTHS = 4096, tuple(range(0, 101, 10))


@dataclass(frozen=True)
class LengthConfig:
    """Tasks of length: the length of documents, and the position of the answer in them."""

    lengths: str | None = option(
        None,
        aliases=("--max_seq_lengths", "--max-seq-lengths"),
        derived="4k, 8k, ... up to the model's positions",
    )
    """Comma-separated document lengths in tokens for ruler, passkey and loss_by_position. 4k is
    4096."""
    depths: str | None = option(None, derived="0,10,...,100")
    """Comma-separated positions of the needle or passkey in the text, in percent."""

    @property
    def shares(self) -> list[float]:
        """Depths as fractions of the text. Raises ConfigError outside of 0 to 100 percent."""
        words = [str(d) for d in _DEPTHS] if self.depths is None else self.depths.split(",")
        try:
            depths = [float(word) / 100 for word in words]
        except ValueError:
            depths = [-1.0]
        if not all(0 <= depth <= 1 for depth in depths):
            raise ConfigError(f"--depths {self.depths}: expected percents, as 0,25,50,75,100")
        return depths

    @property
    def numbers(self) -> list[int] | None:
        """Lengths in tokens, ascending, or None without the flag. Raises ConfigError if a value is
        not a positive number of tokens."""
        if self.lengths is None:
            return None
        lengths = set()
        for word in self.lengths.lower().split(","):
            digits = word.strip().removesuffix("k")
            if not digits.isdecimal() or int(digits) == 0:
                raise ConfigError(
                    f"--lengths {self.lengths}: expected numbers of tokens, as 4096,8192 or 4k,8k"
                )
            lengths.add(int(digits) * (1024 if word.strip().endswith("k") else 1))
        return sorted(lengths)

    def of_model(self, longest: int) -> list[int]:
        """Return the lengths to use for a model that reads at most ``longest`` tokens. Raises
        ConfigError if a requested length exceeds ``longest``."""
        if self.numbers is None:
            doubled = [_SHORTEST << n for n in range(12) if _SHORTEST << n <= longest]
            return doubled or [longest]
        if self.numbers[-1] > longest:
            raise ConfigError(
                f"--lengths {self.numbers[-1]} is longer than the {longest} tokens that the model "
                "sees (--max-length, --max-position-embeddings); give shorter ones, or more "
                "positions with --seq-length, --max-position-embeddings and --rope-scaling"
            )
        return self.numbers
