"""An exported folder to the hub: what is sent, what never is, and one commit.

It needs no network itself, and imports none of PyTorch.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from biphasic.config.errors import UserError
from biphasic.export.folder import CARD, read_card
from biphasic.export.metadata import checked, require_id, split

_NEVER = (".*", "*.partial", "*.tmp", "*.lock", "*.incomplete", "__pycache__", "*.pyc", "*~")
"""Names of files and folders that aren't part of an export, whoever put them there."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "onnx/model.onnx", "onnx/model.onnx_data")
"""What must not stay from an earlier push: transformers takes an old `model.safetensors` before new shards."""


def push(
    folder: Path, repo: str, *, revision: str | None = None, private: bool = False, dry_run: bool = False
) -> str | None:
    """Send an exported folder to the hub, as one commit; the repository and the branch are made where they are missing.

    In what is sent the card's example code names the repository. Weights of an earlier push that the folder no longer has
    are removed in the same commit.

    Args:
        folder: an export.
        repo: `organisation/name`.
        revision: a branch; default: `main`.
        private: of a repository that doesn't exist yet.
        dry_run: say what would be sent, and contact nobody.

    Returns:
        The commit's address; None after a dry run.

    Raises:
        UserError: it is no export, something in it can't be sent, its card or the repository's name would be refused, there
            is no token, or the hub can't be reached or refuses.
    """
    require_repo(repo)
    card = _named(checked(read_card(folder)), repo, revision)
    files = files_of(folder)
    if dry_run:
        _say(repo, revision, private, card, files)
        return None
    require_token()
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    token, api = _token(), HfApi(library_name="biphasic")
    adds: list[Any] = [
        CommitOperationAdd(name, card.encode() if name == CARD else str(file)) for name, file in files.items()
    ]
    with _one_line(repo):
        api.create_repo(repo, private=private, exist_ok=True, token=token)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True, token=token)
        there = api.list_repo_files(repo, revision=revision, token=token)
        stale = [name for name in there if name not in files and any(fnmatch.fnmatch(name, one) for one in _WEIGHTS)]
        made = api.create_commit(
            repo,
            [*adds, *(CommitOperationDelete(name) for name in stale)],
            commit_message=f"Export of biphasic: {folder.resolve().name}",
            revision=revision,
            token=token,
        )
    gone = f", {len(stale)} of an earlier push removed" if stale else ""
    print(f"{repo}{f' at {revision}' if revision else ''}: {len(files)} files{gone}: {made.commit_url}")
    return made.commit_url


def require_repo(repo: str) -> None:
    """Raise a UserError where `repo` isn't `organisation/name` by the hub's rules."""
    if repo.count("/") != 1:
        raise UserError(f"--push {repo}: expected ORGANISATION/NAME")
    require_id(repo, f"--push {repo}")


def require_token() -> None:
    """Raise a UserError where there is no token of the hub."""
    if _token() is None:
        raise UserError("--push: no token of the hub: set HF_TOKEN, or run `hf auth login`; --dry-run needs none")


def files_of(folder: Path) -> dict[str, Path]:
    """What would be sent, by name in the repository, sorted; hidden files, unfinished ones and caches never are.

    Raises:
        UserError: a link is among them, which may lead to something that isn't the export's.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(fnmatch.fnmatch(part, pattern) for part in name.parts for pattern in _NEVER):
            continue
        if path.is_symlink():
            raise UserError(f"--push {path}: is a link; put the file itself there, or take it away")
        if path.is_file():
            found[name.as_posix()] = path
    return found


def _token() -> str | None:
    from huggingface_hub import get_token

    return get_token()


def _named(card: str, repo: str, revision: str | None) -> str:
    """The card whose example code loads what is pushed, and not a name that the hub doesn't know."""
    at = f'"{repo}"' + (f', revision="{revision}"' if revision else "")
    return re.sub(r'((?:\.from_pretrained|SentenceTransformer)\()"[^"]+"(?:, revision="[^"]+")?', rf"\1{at}", card)


def _say(repo: str, revision: str | None, private: bool, card: str, files: dict[str, Path]) -> None:
    sizes = {name: len(card.encode()) if name == CARD else file.stat().st_size for name, file in files.items()}
    for name, size in sizes.items():
        print(f"{size:>16,}  {name}")
    print(f"{sum(sizes.values()):>16,}  bytes in {len(sizes)} files")
    kind = "a private repository" if private else "a public repository"
    print(f"would go to {repo} at {revision or 'main'} ({kind}, if it is new), with this metadata:")
    import yaml

    print(yaml.safe_dump(split(card)[0], sort_keys=False, allow_unicode=True, width=1000).rstrip())


@contextmanager
def _one_line(repo: str) -> Iterator[None]:
    """Make of what may go wrong on the way a line for the person."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of its HTTP client, which has changed before
        OfflineModeIsEnabled,
    )

    from biphasic.storage import short

    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        why = {
            401: "the token is not valid (401): set another HF_TOKEN",
            403: f"the token may not write to {repo} (403): take one with the right to write, or another name",
            404: f"{repo} is not there, or the token may not see it (404)",
        }.get(status, f"the hub refused ({status}): {error.server_message or short(error)}")
        raise UserError(f"--push {repo}: {why}") from None
    except OfflineModeIsEnabled:
        raise UserError(f"--push {repo}: HF_HUB_OFFLINE is set: unset it") from None
    except HTTPError as error:
        raise UserError(f"--push {repo}: {where} can't be reached ({type(error).__name__}): try again") from None
    except ValueError as error:  # the hub's own look at the card
        raise UserError(f"--push {repo}: {' '.join(str(error).split())}") from None
    except (OSError, RuntimeError) as error:
        raise UserError(f"--push {repo}: {short(error)}") from None
