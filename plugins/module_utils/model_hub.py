# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The Hugging Face Hub as a source of models, through huggingface_hub; on the connected side only."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .download import RETRIED_STATUS, DownloadError, download, pause_s
from .model_manifest import ModelError, Origin, git_oid

try:
    import httpx2
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.file_download import get_hf_file_metadata
except ImportError as error:  # most control nodes stage nothing from the Hub
    _import_error: ImportError | None = error
else:
    _import_error = None

_COMMIT = re.compile(r"[0-9a-f]{40}")
# The Hub serves larger files through Xet alone (huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE).
PLAIN_HTTP_BYTES = 50_000_000_000
# A signed address expires; after this many failures in a row the Hub is asked for a new one.
ADDRESSES, ATTEMPTS_PER_ADDRESS = 3, 3
ATTEMPTS_PER_QUESTION = 5

Answer = TypeVar("Answer")


class Hub:
    """One repository at one commit."""

    def __init__(
        self,
        name: str,
        source: Mapping[str, Any],
        staged: Mapping[str, Any],
        notes: list[str],
        *,
        update: bool = False,
    ) -> None:
        """Resolve the revision to a commit.

        Args:
            staged: the source of the model that the bundle has, whose commit a moving revision stays at.
            notes: takes what a person should know.
            update: let a moving revision move.

        Raises:
            ModelError: no such repository, revision or permission, or the Hub does not answer.
        """
        if _import_error is not None:
            raise ModelError(
                f"Model {name}: the Hub needs huggingface_hub 2.4 or newer on this machine ({_import_error}). "
                "Install it beside ansible-core: pip install 'huggingface_hub>=2.4'. Hosts do not need it."
            )
        self.name = name
        self.repository = str(source["repository"])
        # From the environment alone; False keeps the client from reading a token that someone stored at login.
        self._token: str | bool = os.environ.get("HF_TOKEN") or False
        self.endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        self._api = huggingface_hub.HfApi(endpoint=self.endpoint, token=self._token, library_name="onprem.vllm")
        self.commit = self._resolve(str(source.get("revision") or "main"), staged, notes, update=update)

    def _resolve(self, revision: str, staged: Mapping[str, Any], notes: list[str], *, update: bool) -> str:
        if _COMMIT.fullmatch(revision):
            return revision
        pinned = None
        if not update and (staged.get("repository"), staged.get("revision")) == (self.repository, revision):
            pinned = staged.get("commit")
        try:
            current = self._asked(lambda: self._api.model_info(self.repository, revision=revision, timeout=30)).sha
        except ModelError as error:
            if not pinned:
                raise
            notes.append(f"{error} It stays at commit {pinned}.")
            return str(pinned)
        if pinned and current != pinned:
            notes.append(
                f"Model {self.name}: {revision!r} of {self.repository} has moved to {current}; the bundle stays at "
                f"{pinned}. To take the new one, set `revision: {current}`."
            )
            return str(pinned)
        if not pinned:
            notes.append(
                f"Model {self.name}: {revision!r} of {self.repository} is {current} now and stays so in this bundle. "
                f"Set `revision: {current}` to have the same in every bundle."
            )
        return str(current)

    def listing(self) -> dict[str, Origin]:
        entries = self._asked(
            lambda: list(self._api.list_repo_tree(self.repository, recursive=True, revision=self.commit))
        )
        return {
            entry.path: Origin(
                entry.lfs.size if entry.lfs else entry.size,
                entry.lfs.sha256 if entry.lfs else entry.blob_id,
                sha256=entry.lfs.sha256 if entry.lfs else None,
                git_oid=None if entry.lfs else entry.blob_id,
            )
            for entry in entries
            if isinstance(entry, huggingface_hub.hf_api.RepoFile)
        }

    def fetch(self, path: str, origin: Origin, destination: Path, arrived: Callable[[int], None]) -> None:
        if origin.size > PLAIN_HTTP_BYTES:
            self._fetch_by_client(path, destination)
            arrived(origin.size)
        else:
            self._fetch_by_http(path, origin, destination, arrived)
        if origin.git_oid is not None and (actual := git_oid(destination)) != origin.git_oid:
            destination.unlink()
            raise ModelError(f"what arrived has git's hash {actual}, the Hub lists {origin.git_oid}")

    def _fetch_by_http(self, path: str, origin: Origin, destination: Path, arrived: Callable[[int], None]) -> None:
        url = huggingface_hub.hf_hub_url(self.repository, path, revision=self.commit, endpoint=self.endpoint)
        failure: DownloadError | None = None
        for _unused in range(ADDRESSES):
            with self._told():
                metadata = get_hf_file_metadata(url, token=self._token, endpoint=self.endpoint, retry_on_errors=True)
            if metadata.commit_hash not in (None, self.commit):
                raise ModelError(f"the Hub answers with commit {metadata.commit_hash} where {self.commit} was asked")
            headers = {}
            # A signed address elsewhere needs no token, and its host shall not see it.
            if self._token and urlsplit(metadata.location)[:2] == urlsplit(self.endpoint)[:2]:
                headers["Authorization"] = f"Bearer {self._token}"
            try:
                download(
                    metadata.location,
                    destination,
                    origin.sha256,
                    origin.size,
                    headers=headers,
                    attempts=ATTEMPTS_PER_ADDRESS,
                    progress=arrived,
                    use_proxy=True,
                )
            except DownloadError as error:
                failure = error
            else:
                return
        # Without the address: a signed one is as good as a key until it expires.
        raise ModelError(f"{url}: {str(failure).removeprefix(metadata.location).lstrip(': ')}")

    def _fetch_by_client(self, path: str, destination: Path) -> None:
        beside = destination.with_name(f"{destination.name}.xet")
        with self._told():
            arrived = self._api.hf_hub_download(
                self.repository, path, revision=self.commit, local_dir=beside, token=self._token
            )
        os.replace(arrived, destination)
        shutil.rmtree(beside)

    def _asked(self, question: Callable[[], Answer]) -> Answer:
        """Ask the Hub; a busy one is asked again, which the client does for downloads but not for its API."""
        for attempt in range(ATTEMPTS_PER_QUESTION - 1):
            try:
                return question()
            except errors.HfHubHTTPError as error:
                if error.response.status_code not in RETRIED_STATUS:
                    break
                time.sleep(pause_s(error.response.headers.get("Retry-After"), attempt))
            except (httpx2.HTTPError, OSError, ValueError):
                break
        with self._told():
            return question()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in our words what the client's exceptions mean."""
        where = f"Model {self.name}: {self.repository} at {self.endpoint}"
        try:
            yield
        except errors.GatedRepoError:
            raise ModelError(
                f"{where} is gated: accept its terms on the Hub with an account, and run again with that account's "
                "token in the environment variable HF_TOKEN."
            ) from None
        except errors.RevisionNotFoundError:
            raise ModelError(f"{where} has no such revision. Name a branch, a tag or a full commit.") from None
        except errors.RepositoryNotFoundError:
            token = "The token in HF_TOKEN may not see it." if self._token else "If it is private, set HF_TOKEN."
            raise ModelError(f"{where} does not exist. {token}") from None
        except errors.EntryNotFoundError as error:
            raise ModelError(f"{where} lacks a file that it lists ({_line(error)}).") from None
        except errors.OfflineModeIsEnabled:
            raise ModelError(f"{where} cannot be asked: HF_HUB_OFFLINE is set. Unset it on this machine.") from None
        except errors.HfHubHTTPError as error:
            raise ModelError(f"{where} refuses: {_line(error)}.") from None
        except (httpx2.HTTPError, OSError, ValueError) as error:
            raise ModelError(f"{where} does not answer: {_line(error)}.") from None


def _line(error: Exception) -> str:
    """An exception's first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
