"""Trackio: databases in a folder of the user, or a Space of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.output import LoggingConfig
from megatron.features.trackers import package
from megatron.features.trackers.background import BackgroundWriter
from megatron.features.trackers.tags import (
    as_markdown,
    flat,
    tagged,
)
from megatron.training.metrics import WrittenTexts
from megatron.training.writers import Values

ASKED = "--report-to trackio"


def open_writer(
    logging: LoggingConfig, configuration: Mapping[str, Any], iteration: int, samples: int
) -> BackgroundWriter:
    """The writer of a run of its own. That of a new training waits for trackio and raises its
    errors; a training that was resumed continues meanwhile."""
    return BackgroundWriter(
        lambda: TrackioWriter(logging, configuration, iteration), wait=iteration == 0
    )


class TrackioWriter:
    """Trackio, under the tags of TensorBoard; a ValueError if it is not installed or does not
    start. A resumed process is a new run in the group of the run's name, so that no curve has a
    step twice. Trackio's environment variables apply, such as ``TRACKIO_DIR`` and
    ``TRACKIO_SPACE_ID``."""

    def __init__(
        self, logging: LoggingConfig, configuration: Mapping[str, Any], iteration: int
    ) -> None:
        self._trackio = package("trackio", ASKED, "leave out trackio")
        name = logging.run_name
        try:
            self._run: Any = self._trackio.init(
                project=logging.tracker_project,
                name=f"{name} from iteration {iteration}" if name and iteration else name,
                group=name,
                config=flat(configuration),
                embed=False,
                # They have steps of their own, and the log has the memory.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:  # it has many classes
            raise ValueError(
                f"{ASKED}: trackio does not start ({' '.join(str(error).split())[:300]}); see "
                "TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL in the environment"
            ) from error

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        shown = dict(tagged(kind, values))
        if shown:
            self._run.log(shown | {"samples": samples, "tokens": tokens}, step=step)

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        text = "\n\n---\n\n".join(map(as_markdown, written.texts))
        self._run.log({"samples of text": self._trackio.Markdown(text)}, step=written.iteration)

    def close(self) -> None:
        self._run.finish()
