# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The control node's side of publishing: check the bundle, carry what the mirror lacks, have it verified there."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ..module_utils.atomic import CHUNK_BYTES, sha256_bytes
from ..module_utils.bundle_manifest import (
    MANIFEST,
    BundleManifest,
    BundleManifestError,
    bundle_files,
    parse_bundle_manifest,
)
from ..module_utils.model_manifest import readable_size
from ..module_utils.publish import Missing, Segment, as_missing, cut, wrong_files

# So many are lost at most when a run dies, and the login user's home must have room for one more.
ABSORBED_PIECES = 4


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self._task_vars = task_vars or {}
        try:
            return self._publish()
        except AnsibleActionFail as error:
            # Returned and not raised: failed_when sees no result of a plugin that raised.
            return {"failed": True, "msg": str(error.message)}

    def _publish(self) -> dict[str, Any]:
        if self._task.args.get("state", "present") == "absent":
            return self._step("look")
        bundle = Path(str(self._task.args.get("bundle") or "")).expanduser()
        raw = _manifest_bytes(bundle)
        digest = sha256_bytes(raw)
        standing = self._step("look", manifest_sha256=digest)
        if standing.get("failed"):
            return standing
        result: dict[str, Any] = {
            "changed": False,
            "bundle_id": digest[:12],
            "carried": [],
            "carried_bytes": 0,
            "repaired": standing["damaged"],
            "removed": [],
        }
        if standing["published"]:
            return result
        manifest = _checked(bundle, raw)
        begun = self._step("begin", manifest_sha256=digest, manifest=raw.decode(), damaged=standing["damaged"])
        if begun.get("failed"):
            return begun
        missing = as_missing(begun["missing"])
        result["carried"] = [entry.path for entry in missing]
        result["carried_bytes"] = sum(entry.size - entry.have for entry in missing)
        result["changed"] = True
        result["diff"] = _diff(standing, digest[:12], missing)
        if self._task.check_mode:
            return result
        if wrong := wrong_files(bundle, manifest, result["carried"]):
            raise AnsibleActionFail(
                f"Nothing is published: in {bundle} these files are not what the manifest says: {', '.join(wrong)}. "
                "Run playbooks/bundle.yml with wheel_mirror_verify=full; it fetches them anew."
            )
        failure = self._carry(bundle, missing, digest)
        if failure is not None:
            return failure
        finished = self._step("finish", manifest_sha256=digest)
        if finished.get("failed"):
            return finished
        result["removed"] = finished["removed"]
        return result

    def _step(self, step: str, **more: Any) -> dict[str, Any]:
        return self._execute_module(
            module_name="onprem.vllm.publish",
            module_args={**self._task.args, "step": step, **more},
            task_vars=self._task_vars,
        )

    def _carry(self, bundle: Path, missing: Sequence[Missing], digest: str) -> dict[str, Any] | None:
        """Put the missing bytes into the login user's directory, piece by piece, and have them taken from there."""
        if not missing:
            return None
        total = sum(entry.size - entry.have for entry in missing)
        size = int(self._task.args.get("piece_mib", 64)) << 20
        place = self._landing_place(min(total, (ABSORBED_PIECES + 1) * size))
        carried, began, told = 0, time.monotonic(), 0.0
        landed: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="onprem-vllm-") as scratch:
            local = os.path.join(scratch, "piece")
            pieces = cut(missing, size)
            for number, segments in enumerate(pieces):
                _write_piece(bundle, segments, local)
                remote = f"{place}/piece-{number:06}"
                self._connection.put_file(local, remote)
                landed.append({"path": remote, "segments": [asdict(segment) for segment in segments]})
                carried += sum(segment.length for segment in segments)
                last = number == len(pieces) - 1
                if last or len(landed) == ABSORBED_PIECES:
                    taken = self._step("absorb", manifest_sha256=digest, pieces=landed)
                    if taken.get("failed"):
                        return taken
                    landed = []
                now = time.monotonic()
                if last or now - told > 3:
                    told = now
                    rate = readable_size(carried / max(now - began, 0.001))
                    self._display.display(f"  carried {readable_size(carried)} of {readable_size(total)}, {rate}/s")
        return None

    def _landing_place(self, needed: int) -> str:
        """A directory of the login user's, the same each time, so that what a dead run left there goes.

        Raises:
            AnsibleActionFail: it cannot be made, or its file system is too small.
        """
        base = str(self.get_shell_option("remote_tmp", default="~/.ansible/tmp"))
        # The shell expands it: Ansible would take ~ for root's, where the login user may not write.
        home, rest = ('"$HOME"', base[1:]) if base.startswith("~/") else ("", base)
        answer = self._low_level_execute_command(
            f'umask 077 && place={home}{shlex.quote(rest + "/onprem-vllm-publish")} && mkdir -p "$place" '
            '&& rm -f "$place"/piece-* && cd "$place" && pwd && df -Pk .',
            sudoable=False,
        )
        if answer["rc"] != 0:
            raise AnsibleActionFail(
                f"{base}/onprem-vllm-publish cannot be made on the mirror: {answer['stderr'].strip()}"
            )
        place = answer["stdout"].splitlines()[0]
        free = int(answer["stdout"].strip().splitlines()[-1].split()[3]) * 1024
        if free < needed:
            raise AnsibleActionFail(
                f"{place} on the mirror has {readable_size(free)} free, and files pass through it: "
                f"{readable_size(needed)} are needed. Free some space, "
                "or set ansible_remote_tmp to a larger file system."
            )
        return place


def _manifest_bytes(bundle: Path) -> bytes:
    try:
        return (bundle / MANIFEST).read_bytes()
    except OSError:
        raise AnsibleActionFail(
            f"There is no bundle in {bundle} on the control node ({MANIFEST} is missing). "
            "Run playbooks/bundle.yml to its end, or set wheel_mirror_bundle to where the bundle lies."
        ) from None


def _checked(bundle: Path, raw: bytes) -> BundleManifest:
    """The manifest, when the directory holds exactly its files.

    Raises:
        AnsibleActionFail: it does not; every file is named.
    """
    try:
        manifest = parse_bundle_manifest(raw, str(bundle / MANIFEST))
    except BundleManifestError as error:
        raise AnsibleActionFail(str(error)) from None
    present = {path: size for path, size, _unused in bundle_files(bundle)}
    problems = [f"{path} is unexpected" for path in sorted(set(present) - set(manifest.files))]
    problems += [f"{path} is missing" for path in sorted(set(manifest.files) - set(present))]
    problems += [
        f"{path} has {present[path]} bytes instead of {entry.size}"
        for path, entry in sorted(manifest.files.items())
        if path in present and present[path] != entry.size
    ]
    if problems:
        raise AnsibleActionFail(
            f"Nothing is published: the bundle in {bundle} is not what its manifest says: {'; '.join(problems)}. "
            "Run playbooks/bundle.yml to its end."
        )
    return manifest


def _write_piece(bundle: Path, segments: Sequence[Segment], target: str) -> None:
    with open(target, "wb") as piece:
        for segment in segments:
            with (bundle / segment.path).open("rb") as source:
                source.seek(segment.offset)
                left = segment.length
                while left > 0 and (part := source.read(min(left, CHUNK_BYTES))):
                    piece.write(part)
                    left -= len(part)


def _diff(standing: dict[str, Any], name: str, missing: Sequence[Missing]) -> dict[str, str]:
    lines = [f"+ {entry.path} ({readable_size(entry.size)})\n" for entry in missing]
    return {"before": f"current -> {standing['served']}\n", "after": f"current -> {name}\n", "prepared": "".join(lines)}
