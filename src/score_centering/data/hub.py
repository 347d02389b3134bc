"""Problems of a Hugging Face dataset repository at a pinned commit; every file is checked against the commit's hash."""

import fnmatch
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from score_centering.data.source import Source
from score_centering.data.tables import AS_NAMED, SUFFIXES, Reading, read_rows
from score_centering.settings import UserError
from score_centering.settings.inputs import sha256_file

RETRY_DELAYS_S = (1.0, 4.0, 16.0)  # on top of the client's own resumption of a transfer

T = TypeVar("T")


def open_hub(
    repo: str,
    revision: str,
    files: Sequence[str],
    *,
    endpoint: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    reading: Reading = AS_NAMED,
) -> Source:
    """The data files of `repo` that match one of the glob patterns `files`, at commit `revision` (40 hex digits).

    `endpoint` defaults to the client's (environment variable HF_ENDPOINT), `cache_dir` to the client's cache.
    """
    where = f"hub dataset {repo} at {revision}"
    api = HfApi(endpoint=endpoint)

    def list_files() -> list[RepoFile]:
        entries = api.list_repo_tree(repo, revision=revision, repo_type="dataset", recursive=True)
        return [entry for entry in entries if isinstance(entry, RepoFile)]

    listed = _attempt(list_files, where, retry_delays_s)
    chosen = sorted((entry for entry in listed if _matches(entry.path, files)), key=lambda entry: entry.path)
    if not chosen:
        raise UserError(f"{where}: no {' or '.join(SUFFIXES)} file matches dataset.hub.files {list(files)}")
    paths, digests = [], {}
    for entry in chosen:
        path = _download(entry, repo, revision, endpoint, cache_dir, where, retry_delays_s)
        paths.append(path)
        digests[entry.path] = sha256_file(path)
    pin = {"kind": "hub", "repo": repo, "revision": revision, **reading.pin()}
    return Source(name=repo, rows=read_rows(paths, reading), pin=pin, files=digests)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return path.endswith(SUFFIXES) and any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _download(
    entry: RepoFile,
    repo: str,
    revision: str,
    endpoint: str | None,
    cache_dir: str | os.PathLike[str] | None,
    where: str,
    retry_delays_s: Sequence[float],
) -> Path:
    """The file in the client's cache. One whose content is not the commit's is fetched once more, then refused."""
    for force in (False, True):

        def fetch(force: bool = force) -> str:
            return hf_hub_download(
                repo,
                entry.path,
                repo_type="dataset",
                revision=revision,
                endpoint=endpoint,
                cache_dir=cache_dir,
                force_download=force,
            )

        path = Path(_attempt(fetch, f"{where}: {entry.path}", retry_delays_s))
        if (found := _content_hash(path, entry)) == (expected := _expected_hash(entry)):
            return path
    raise UserError(f"{where}: {entry.path} has the hash {found}, the commit lists {expected}; the transfer is corrupt")


def _expected_hash(entry: RepoFile) -> str:
    return entry.lfs.sha256 if entry.lfs is not None else entry.blob_id


def _content_hash(path: Path, entry: RepoFile) -> str:
    """sha256 of a large file, git's blob hash of a small one: what the commit lists of each."""
    if entry.lfs is not None:
        return sha256_file(path)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _attempt(call: Callable[[], T], where: str, delays_s: Sequence[float]) -> T:
    """`call()`, repeated after each delay while the fault is one of transport; any other is a `UserError` at once."""
    for delay in (*delays_s, None):
        try:
            return call()
        except GatedRepoError as error:
            raise UserError(f"{where}: access is gated; accept its terms and set HF_TOKEN") from error
        except RevisionNotFoundError as error:
            raise UserError(f"{where}: no such revision (404)") from error
        except RepositoryNotFoundError as error:
            raise UserError(f"{where}: no such repository, or no access ({_status(error)}); set HF_TOKEN") from error
        except OfflineModeIsEnabled as error:
            raise UserError(f"{where}: HF_HUB_OFFLINE is set; the dataset stage needs the hub once") from error
        except LocalEntryNotFoundError as error:
            fault = error.__cause__ or error
        except EntryNotFoundError as error:
            raise UserError(f"{where}: no such file in the repository (404)") from error
        except HfHubHTTPError as error:
            if error.response.status_code < 500 and error.response.status_code not in (408, 429):
                raise UserError(f"{where}: the hub answered {_status(error)}") from error
            fault = error
        except (httpx.TransportError, OSError) as error:
            fault = error
        if delay is not None:
            time.sleep(delay)
    raise UserError(f"{where}: {len(delays_s) + 1} attempts failed, the last with: {_one_line(fault)}") from fault


def _status(error: HfHubHTTPError) -> str:
    return f"{error.response.status_code} {error.response.reason_phrase}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
