"""MLflow: a database in the run's folder, or a server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
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
from megatron.util.secrets import Redactor

_NOT_IN_NAMES = re.compile(r"[^\w. :/-]", re.ASCII)
"""Which MLflow accepts in no name of a metric or parameter."""
_MOST_PARAMS = 100
"""In one request."""
_LONGEST_PARAM = 500
"""That every version and store accepts."""
ASKED = "--report-to mlflow"


def open_writer(
    logging: LoggingConfig, configuration: Mapping[str, Any], iteration: int, samples: int
) -> BackgroundWriter:
    """The writer of a run of its own. That of a new training waits for the store and raises its
    errors; a training that was resumed continues meanwhile."""
    return BackgroundWriter(
        lambda: MlflowWriter(logging, configuration, iteration), wait=iteration == 0
    )


class MlflowWriter:
    """MLflow, under the tags of TensorBoard; a ValueError if it is not installed or does not start.
    A resumed process is a new run, so that no curve has a step twice; the runs of one name have it
    as their tag ``group``. MLflow's environment variables apply, such as ``MLFLOW_TRACKING_URI``
    and ``MLFLOW_EXPERIMENT_NAME``."""

    def __init__(
        self, logging: LoggingConfig, configuration: Mapping[str, Any], iteration: int
    ) -> None:
        package("mlflow", ASKED, "leave out mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        where = logging.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        assert where is not None
        artifacts = _prepare_folder(where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or logging.tracker_project
        tags = {"resumed_at_iteration": str(iteration)} if iteration else {}
        if logging.run_name is not None:
            tags["group"] = logging.run_name
        try:
            self._client: Any = MlflowClient(where)
            found = self._client.get_experiment_by_name(name)
            experiment = (
                found.experiment_id
                if found is not None
                else self._client.create_experiment(name, artifact_location=artifacts)
            )
            run = self._client.create_run(experiment, run_name=logging.run_name, tags=tags)
            self._run: str = run.info.run_id
            params = [
                Param(_name(key), value[:_LONGEST_PARAM])
                for key, value in flat(configuration).items()
            ]
            for at in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._run, params=params[at : at + _MOST_PARAMS])
        except Exception as error:  # it has many classes
            hide = Redactor(os.environ)
            raise ValueError(
                f"{ASKED}: MLflow does not start with {hide.text(where)} ("
                f"{hide.text(' '.join(str(error).split()))[:300]}); name another "
                "--mlflow-tracking-uri, such as sqlite:////folder/mlflow.db"
            ) from error

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        shown = dict(tagged(kind, values))
        if not shown:
            return
        now = int(1000 * time.time())
        all_of_them = shown | {"samples": samples, "tokens": tokens}
        self._client.log_batch(
            self._run,
            metrics=[
                self._metric(_name(tag), float(value), now, step)
                for tag, value in all_of_them.items()
            ],
        )

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        """An artifact, ``samples/iteration-N.md``."""
        text = "\n\n---\n\n".join(map(as_markdown, written.texts))
        self._client.log_text(self._run, text, f"samples/iteration-{written.iteration}.md")

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _prepare_folder(uri: str) -> str | None:
    """The folder for the files of runs beside a database in a file, whose folder is made; None
    where the store decides."""
    if not uri.startswith("sqlite:///"):
        return None
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    return (database.parent / "mlflow-artifacts").resolve().as_uri()


def _name(tag: str) -> str:
    return _NOT_IN_NAMES.sub("_", tag)
