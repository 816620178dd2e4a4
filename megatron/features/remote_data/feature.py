"""Feature that reads indexed datasets in object storage on demand."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class RemoteDataFeature(Feature):
    def open_url(self, url: str, cache_path: str | None) -> Any:
        from megatron.features.remote_data.dataset import DEFAULT_CACHE, RemoteDataset

        return RemoteDataset(url, cache_path or DEFAULT_CACHE)


FEATURE = RemoteDataFeature()
