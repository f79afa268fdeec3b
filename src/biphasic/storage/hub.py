"""Ask the Hugging Face hub whether a model is there, before libraries that retry for a minute are called."""

import os
import posixpath
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from biphasic.errors import Missing, UserError, first_line
from biphasic.storage.files import UnreachableError, is_folder, is_remote

_OWN_FOLDERS = ("runs", "data")
"""Folders that jobs write to by default. A path into them is never a hub id."""
UNREACHABLE = "can't be reached"
"""Part of the reason why a model is missing if the hub did not answer, so that the model may exist."""
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
_TIMEOUT = 10.0


def is_local_path(path: str) -> bool:
    """Return whether a path can only be local: `./x`, `~/x`, `/x`, `x/`, `a/b/c`, or a path into `runs/` or `data/`."""
    if is_remote(path):
        return False
    looks_local = path.startswith((".", "/", "~")) or path.endswith("/") or path.count("/") > 1
    return looks_local or path.split("/")[0] in _OWN_FOLDERS


def is_made_by_jobs(path: str) -> bool:
    """Return whether jobs write to a path by default, below `runs/`, `data/` or the folder that `BUCKET` names."""
    folders = (*_OWN_FOLDERS, os.environ.get("BUCKET") or "runs")
    return any(posixpath.normpath(path).startswith(f"{posixpath.normpath(folder)}/") for folder in folders)


def why_missing(path: str, revision: str | None = None) -> str | None:
    """Return why a model or tokenizer can't be loaded, or None if it is a folder here, in the hub's cache or on the hub.

    The hub is asked once, without retries. Paths in a bucket are not checked and give None, as does an overloaded hub.
    Raises a UserError if a folder above a local one may not be entered.
    """
    if is_remote(path) or is_folder(path):
        return None
    if is_local_path(path):
        return "there is no such folder"
    reason = _why_not_on_hub(path, revision, int(time.monotonic() // 60))
    return None if reason is None else f"no such folder here, and from the hub: {reason}"


def require_model(path: str, revision: str | None = None) -> None:
    """Raise a UserError if a model is in a bucket, or is missing here and on the hub."""
    reason = "a model in a bucket is not supported: download it to a folder" if is_remote(path) else None
    if (reason := reason or why_missing(path, revision)) is not None:
        reason = reason.replace("no such folder", "no such checkpoint or folder")
        raise (UserError if is_remote(path) else Missing)(f"model {path}: can't be loaded ({reason})")


@lru_cache(maxsize=256)
def _why_not_on_hub(path: str, revision: str | None, minute: int) -> str | None:
    """Ask the hub. The answer is cached for a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        if any(isinstance(try_to_load_from_cache(path, file, revision=revision), str) for file in _FILES):
            return None
        with hub_errors():
            get_hf_file_metadata(hf_hub_url(path, _FILES[0], revision=revision), timeout=_TIMEOUT)
    except EntryNotFoundError:
        return None  # The repository is there, without this file.
    except GatedRepoError:
        return "access is restricted: accept its terms on the hub, and log in (hf auth login)"
    except RepositoryNotFoundError:
        return "there is no such model, or it is private and you are not logged in (hf auth login)"
    except (OSError, ValueError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (429, *range(500, 600)):
            return None  # The hub has answered, so the libraries' retries may help.
        answered = isinstance(error, (HfHubHTTPError, ValueError))
        return first_line(error) if answered else f"{UNREACHABLE} ({first_line(error)})"
    return None


@contextmanager
def hub_errors() -> Iterator[None]:
    """Raise the errors of the hub client's HTTP library, such as an unknown host, as UnreachableErrors."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0].startswith("httpx") and not isinstance(error, OSError):
            raise UnreachableError(first_line(error)) from error
        raise
