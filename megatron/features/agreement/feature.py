"""Comparison of flags, code, data and checkpoints between the processes of a run before it
starts."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class AgreementFeature(Feature):
    def meeting(self) -> Any:
        from megatron.features.agreement.agreement import RunMeeting

        return RunMeeting()


FEATURE = AgreementFeature()
