# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""The certificate of the proxy: a given one, looked at before it counts, or one of a CA that lives on this host."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .atomic import write_file

# Longer-lived ones are refused by browsers and by Apple's systems.
LEAF_DAYS = 397
CA_DAYS = 3650
CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----")
LONGEST_NAME = 64  # of a subject (RFC 5280, appendix A.1)
# As public CAs do: what was just issued is not of the future for a client whose clock is behind.
BACKDATED_S = 3600
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
# With the identifiers of keys that strict clients want (RFC 5280, 4.2.1.1; Python's from 3.13 on).
_CA = """
[ca]
default_ca = here
[here]
database = {scratch}/index
new_certs_dir = {scratch}
default_md = sha256
policy = name
rand_serial = yes
[name]
commonName = supplied
[root]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


class CertificateRefused(ValueError):
    """A certificate that clients would not accept; the message says what is wrong with it and what to do."""


@dataclass(frozen=True)
class Certificate:
    """A certificate with its chain, leaf first, and its key, both PEM."""

    chain: str
    key: str

    @property
    def pem(self) -> bytes:
        """Both in one text, as HAProxy reads it."""
        return f"{self.chain.strip()}\n{self.key.strip()}\n".encode()


def check(certificate: Certificate, names: Sequence[str]) -> None:
    """Refuse what clients would not accept.

    Raises:
        CertificateRefused: the key is another one's, it is not valid now, or not for all of ``names``.
    """
    try:
        _load(certificate)
    except ssl.SSLError as error:
        raise CertificateRefused(
            f"The certificate and its key do not belong together, or one of them is no PEM ({error.reason}). Give "
            "litellm_proxy_certificate with the leaf first, and the key it was issued for."
        ) from None
    now = time.time()
    if now >= (ends := _moment(certificate.chain, "-enddate")):
        raise CertificateRefused(f"The certificate has expired: it was valid until {_utc(ends)}. Have it renewed.")
    if now < (begins := _moment(certificate.chain, "-startdate")):
        raise CertificateRefused(f"The certificate is not valid before {_utc(begins)}; look at this host's clock, too.")
    wrong = [name for name in names if not _is_for(certificate.chain, name)]
    if wrong:
        raise CertificateRefused(
            f"The certificate is not for {', '.join(wrong)}. Have one issued for all of litellm_proxy_names, or "
            "correct that list."
        )


def _load(certificate: Certificate) -> None:
    """Let OpenSSL take certificate and key together, from a file that is in memory alone: a killed run leaves no key.

    Raises:
        ssl.SSLError: they do not belong together, or one is no PEM.
    """
    descriptor = os.memfd_create("certificate.pem")
    try:
        os.write(descriptor, certificate.pem)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _is_for(chain: str, name: str) -> bool:
    return "does match" in _read(chain, "-checkip" if _is_address(name) else "-checkhost", name)


def _read(chain: str, *words: str) -> str:
    """What openssl says of a certificate."""
    return _openssl("x509", "-noout", *words, given=chain)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class OwnCa:
    """A CA whose key never leaves this host; ``directory`` is root's alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / "root.pem"

    def issued(self) -> Certificate | None:
        """The certificate that was issued last."""
        try:
            found = json.loads((self.directory / "issued.json").read_text(encoding="utf-8"))
            return Certificate(str(found["chain"]), str(found["key"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def due(self, names: Sequence[str], renew_days: int) -> str:
        """Why a certificate must be issued, empty where the last one is good for a while.

        Raises:
            CertificateRefused: the root itself ends soon, and with it all that it signs.
        """
        last = self.issued()
        if last is None or not self.root.is_file():
            return "there is none yet"
        root = self.root.read_text(encoding="utf-8")
        if _days_left(root) < renew_days:
            raise self._refused(f"ends within {renew_days} days", "It signs nothing that would be valid for longer.")
        if (begins := _moment(root, "-startdate")) > time.time():
            raise self._refused(f"is not valid before {_utc(begins)}", "Look at this host's clock, then and now.")
        try:
            check(last, names)
        except CertificateRefused as error:
            return str(error)
        soon = _read(last.chain, "-checkend", str(renew_days * 86400))
        return f"it expires within {renew_days} days" if "will expire" in soon else ""

    def keep(self, handed_out: str, file: str) -> None:
        """See to it that this CA signs with a root that clients were given, before anything of it is made.

        Args:
            handed_out: what ``file`` on the control node holds; a root may stand in it among others.
            file: its name, for messages.

        Raises:
            CertificateRefused: there is no CA here though a root was handed out, or it has another root.
        """
        trusted = [_fingerprint(found) for found in CERTIFICATE.findall(handed_out)]
        if not trusted:
            return
        prints = ", ".join(trusted)
        before = f"A root was handed out before ({file} on the control node, SHA-256 {prints}), and clients trust it"
        back = (
            f"Put the backup of {self.directory} on the host. For a new root, which every client must be given, delete "
            "or rename that file"
        )
        if self._is_none():
            raise CertificateRefused(f"{before}; this host has no CA, and a new one would have another root. {back}.")
        # Of a CA that lost a part of itself, issue() says what is to be done.
        if (own := self._own_root()) and _fingerprint(own) not in trusted:
            raise CertificateRefused(f"{before}; the CA in {self.directory} has another ({_fingerprint(own)}). {back}.")

    def _is_none(self) -> bool:
        return not any((self.directory / name).exists() for name in ("root.key", "root.pem", "issued.json"))

    def _own_root(self) -> str:
        """The root, also where a killed run left it in the key's file alone; empty where there is none."""
        for path in (self.root, self.directory / "root.key"):
            if path.is_file() and (found := CERTIFICATE.search(path.read_text(encoding="utf-8"))):
                return found[0]
        return ""

    def issue(self, names: Sequence[str]) -> Certificate:
        """A new certificate for ``names``, from the CA, which is made where there is none.

        Raises:
            CertificateRefused: the CA has lost a part of itself.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self.directory.glob(".issuing-*"):  # by a killed run
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=".issuing-", dir=self.directory) as scratch:
            beside = Path(scratch)
            alternatives = ",".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in names)
            (beside / "ca").write_text(_CA.format(scratch=scratch, names=alternatives), encoding="utf-8")
            (beside / "index").touch()
            root_key = self.directory / "root.key"
            if self._is_none():
                name = f"CA of the proxy {names[0]}"[:LONGEST_NAME]
                made = _signed(beside, "root", name, CA_DAYS, "-selfsign", "-keyfile", str(beside / "root.key"))
                both = f"{made.key}{made.chain}".encode()
                write_file(root_key, both, 0o400)  # in one step: neither is ever there without the other
            self._publish_root(root_key)
            days = min(LEAF_DAYS, _days_left(self.root.read_text(encoding="utf-8")))
            name = names[0] if len(names[0]) <= LONGEST_NAME else "proxy"
            made = _signed(beside, "leaf", name, days, "-cert", str(self.root), "-keyfile", str(root_key))
        content = json.dumps({"chain": made.chain, "key": made.key}).encode()
        write_file(self.directory / "issued.json", content, 0o400)
        return made

    def _publish_root(self, root_key: Path) -> None:
        """Have the root lie beside its key as it lies in that file, and refuse a root without its key.

        A new root would be one that no client trusts, so it is not made of itself.
        """
        whole = root_key.read_text(encoding="utf-8") if root_key.is_file() else ""
        if not whole:
            raise self._refused("has no root.key", "")
        begin = whole.find("-----BEGIN CERTIFICATE-----")
        if begin >= 0 and not (self.root.is_file() and self.root.read_text(encoding="utf-8") == whole[begin:]):
            write_file(self.root, whole[begin:].encode(), 0o444)
        if not self.root.is_file():  # made by a version that kept the two apart, as below
            raise self._refused("has no root.pem", "")
        try:
            _load(Certificate(self.root.read_text(encoding="utf-8"), whole[: begin if begin >= 0 else None]))
        except ssl.SSLError:
            raise self._refused("has a root.key that is not the one of root.pem", "") from None

    def _refused(self, what: str, why: str) -> CertificateRefused:
        return CertificateRefused(
            f"The own CA in {self.directory} {what}. {why or 'Bring the files there back from a backup.'} Otherwise "
            "move the directory away, and what litellm_proxy_ca_file names on the control node, and run again: a new "
            "CA is made, whose root every client must be given."
        )


def _signed(beside: Path, kind: str, name: str, days: int, *by: str) -> Certificate:
    """A new certificate by the configuration in ``beside``, from a while ago on.

    Raises:
        CertificateRefused: openssl is missing or failed.
    """
    request, key, signed = (beside / f"{kind}.{ending}" for ending in ("request", "key", "pem"))
    _openssl("req", "-new", *_EC, "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}")
    now = time.time()
    begins, ends = (
        time.strftime("%Y%m%d%H%M%SZ", time.gmtime(moment)) for moment in (now - BACKDATED_S, now + days * 86400)
    )
    _openssl(
        *("ca", "-batch", "-notext", "-config", str(beside / "ca"), "-extensions", kind, *by),
        *("-in", str(request), "-startdate", begins, "-enddate", ends, "-out", str(signed)),
    )
    return Certificate(signed.read_text(encoding="utf-8"), key.read_text(encoding="utf-8"))


def _fingerprint(certificate: str) -> str:
    """SHA-256 as ``openssl x509 -fingerprint -sha256`` shows it, of what is no certificate too."""
    try:
        content = ssl.PEM_cert_to_DER_cert(certificate)
    except ValueError:
        content = certificate.encode()
    return hashlib.sha256(content).digest().hex(":").upper()


def _days_left(chain: str) -> int:
    """Whole days until the first certificate ends."""
    return int((_moment(chain, "-enddate") - time.time()) // 86400)


def _moment(chain: str, which: str) -> int:
    """When the first certificate begins or ends, seconds since 1970."""
    return ssl.cert_time_to_seconds(_read(chain, which).partition("=")[2].strip())


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))


def _openssl(*words: str, given: str = "") -> str:
    """What openssl says, status 1 of a check included.

    Raises:
        CertificateRefused: it is missing or failed.
    """
    try:
        done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False, input=given)
    except OSError as error:
        raise CertificateRefused(f"openssl cannot be run ({error.strerror}): install the package openssl.") from error
    is_check = any(word in words for word in ("-checkhost", "-checkip", "-checkend"))
    if done.returncode and not is_check:
        raise CertificateRefused(f"openssl {words[0]} failed: {done.stderr.strip()}")
    return done.stdout
