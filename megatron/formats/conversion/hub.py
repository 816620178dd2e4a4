"""Uploads a model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from megatron.config import ConfigError
from megatron.formats.conversion.needs import need


def check_hub(repository: str) -> None:
    """Refuses what could not be uploaded, before there is anything to upload.

    Raises:
        ConfigError: the client is not installed, or this is no name of a repository.
    """
    need("--push-to-hub", "huggingface_hub")
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {repository}: {_line(error)}") from None


def push(folder: Path, repository: str, private: bool) -> str:
    """Makes the repository if there is none, and uploads the files of a folder in one commit.

    Args:
        folder: the model.
        repository: ``owner/name``, or a name of the user's own.
        private: whether a new repository is private.

    Returns:
        Address of the repository.

    Raises:
        OSError: the hub cannot be reached or refuses; the folder stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True, repo_type="model")
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            repo_type="model",
            commit_message="Upload model",
        )
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        hint = "; log in with `hf auth login` or set HF_TOKEN" if status in (401, 403) else ""
        why = f"status {status}: {_line(error)}{hint}"
        raise OSError(_failed(folder, repository, api.endpoint, why)) from None
    except Exception as error:  # what the client's HTTP library raises differs between versions
        raise OSError(_failed(folder, repository, api.endpoint, _line(error))) from None
    return str(url)


def _failed(folder: Path, repository: str, endpoint: str, why: str) -> str:
    return (
        f"--push-to-hub {repository}: {endpoint}: {why}. The model is complete in {folder}; "
        f"`hf upload {repository} {folder}` uploads it"
    )


def _line(error: Exception) -> str:
    """A message without its line ends, and not all of a long one."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= 300 else f"{text[:300]}...").rstrip(".")
