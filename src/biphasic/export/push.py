"""Upload an exported folder to the hub as one commit. Imports no PyTorch."""

import re
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token

# HTTPError is that of huggingface_hub's HTTP client, which has changed before.
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # pyright: ignore[reportPrivateImportUsage]
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import SafetensorError, safe_open

from biphasic.errors import UserError
from biphasic.export.folder import CARD_FILE, quote_numbers, read_card
from biphasic.storage import user_errors

_EXCLUDED = (".*", "*.partial", "*.tmp", "*.lock", "*.incomplete", "__pycache__", "*.pyc", "*~")
"""Patterns for files and folders that are not part of an export."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "onnx/model*.onnx", "onnx/model*.onnx[_.]data")
"""Files from an earlier push that are deleted, because transformers prefers an old `model.safetensors` to new shards."""


def push(folder: Path, repo: str, *, revision: str | None = None, private: bool = False, dry_run: bool = False) -> None:
    """Upload an exported folder as one commit. A missing repository or branch is created.

    The example code in the uploaded card uses the repository's name. Weights from an earlier push that are not in the
    folder are deleted in the same commit. `revision` is a branch (default: `main`), and `private` applies to a new
    repository. A dry run prints what would be uploaded, without any request. Raises a UserError if the folder is not an
    export or has a file that can't be uploaded, the hub would refuse its card or the repository's name, there is no
    token, or the hub can't be reached or refuses.
    """
    if repo.count("/") != 1:
        raise UserError(f"push {repo}: expected ORGANISATION/NAME")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"push {repo}: {' '.join(str(error).split())}") from None
    card = read_card(folder)
    # upload_folder can't upload a card that differs from the folder's, so the commit is put together here.
    contents: dict[str, Path | bytes] = {**files_of(folder), CARD_FILE: _with_repo(str(card), repo, revision).encode()}
    if dry_run:
        sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in contents.items()}
        for name, size in sizes.items():
            print(f"{size:>16,}  {name}")
        print(f"{sum(sizes.values()):>16,}  bytes in {len(sizes)} files")
        kind = "a private repository" if private else "a public repository"
        target = f"{repo} at {revision or 'main'} (created as {kind} if missing)"
        print(f"would be pushed to {target}, with this metadata:\n{card.data}")
        return
    if get_token() is None:
        raise UserError("push: no token for the hub: set HF_TOKEN, or run `hf auth login`; --dry-run needs none")
    try:
        api = HfApi(library_name="biphasic")
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        old = set(api.list_repo_files(repo, revision=revision)) - set(contents)
        stale = [name for name in sorted(old) if any(fnmatch(name, pattern) for pattern in _WEIGHTS)]
        added = [CommitOperationAdd(name, content) for name, content in contents.items()]
        message = f"Export of biphasic: {folder.resolve().name}"
        operations = [*added, *map(CommitOperationDelete, stale)]
        url = api.create_commit(repo, operations, commit_message=message, revision=revision).commit_url
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = {
            401: "the token is not valid (401): set another HF_TOKEN",
            403: f"the token may not write to {repo} (403): use one with write access, or another name",
        }.get(status, f"the hub refused ({status}): {error.server_message or error}")
    except HTTPError as error:
        reason = f"{constants.ENDPOINT} can't be reached ({type(error).__name__}): try again"
    except (OSError, RuntimeError, ValueError) as error:  # no network, or the hub's check of the card
        reason = str(error)
    else:
        also = f", {len(stale)} of an earlier push removed" if stale else ""
        print(f"{repo}{f' at {revision}' if revision else ''}: {len(contents)} files{also}: {url}")
        return
    raise UserError(f"push {repo}: {' '.join(reason.split())}")


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files to upload, by name in the repository; a UserError for a link (to anywhere) or incomplete weights."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(fnmatch(part, pattern) for part in name.parts for pattern in _EXCLUDED):
            continue
        if path.is_symlink():
            raise UserError(f"push {path}: is a link; replace it by the file itself, or remove it")
        if path.is_file():
            if path.suffix == ".safetensors":  # a copy that was interrupted is shorter than its header says
                with user_errors(f"push {path}: can't be read, so the model is not complete", SafetensorError):
                    safe_open(path, "np")
            files[name.as_posix()] = path
    return files


def _with_repo(card: str, repo: str, revision: str | None) -> str:
    """Return the card with example code that loads the model from the repository."""
    argument = f'"{repo}"' + (f', revision="{revision}"' if revision else "")
    pattern = r'(\.from_pretrained\(|SentenceTransformer\(|pipeline\("[^"]+", model=)"[^"]+"(?:, revision="[^"]+")?'
    return quote_numbers(re.sub(pattern, rf"\1{argument}", card))
