"""Finding a model's directory: on disk, or in the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from tokenspeed.config.model import ModelError

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]


class ModelNotFoundError(ModelError):
    """A model that is neither a directory nor a repository that can be fetched."""

    code = "model_not_found"


def resolve(model: str) -> Path:
    """The directory of a model: `model` itself if it is one, otherwise the repository of that id, fetched if need be.

    Raises:
        ModelNotFoundError: saying what was tried.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except HFValidationError:
        raise ModelNotFoundError(f"{model}: there is no such directory, and it is not a repository id") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(f"{model}: there is no such directory, and no such repository in the hub") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelNotFoundError(
            f"{model}: there is no such directory, and the repository cannot be fetched and is not in the local cache "
            f"({type(error).__name__})"
        ) from error
