# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Requests that cannot be answered as they are, each with its documented status."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import proxy_under_test as proxy


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_a_body_of_100_mb(lab, version):
    big = proxy.WORK / "big"
    big.write_bytes(b" " * 100_000_000)
    status, said = proxy.ask(lab, "/v1/chat/completions", version, "-H", "Expect:", "--data-binary", f"@{big}")
    big.unlink()
    assert (status, json.loads(said)["error"]["code"]) == (413, "413")


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
@pytest.mark.parametrize("claimed", [(1 << 31) + 12, (1 << 32) + 3, (1 << 63) + 9, (1 << 64) - 1])
def test_a_size_that_32_or_63_bits_do_not_hold(lab, version, claimed):
    """HAProxy answers once 64 KiB are there, whatever is claimed to follow; curl never sends the rest."""
    body = proxy.WORK / "body"
    body.write_text("{" + " " * 200_000)
    lines = ["Content-Type: application/json", f"Content-Length: {claimed}", "Expect:"]
    more = [one for line in lines for one in ("-H", line)]
    # Cut off, which curl may see before or after the answer.
    asked = ["sh", "-c", 'curl "$@"; true', "curl", "-sS", "--max-time", "30", "--cacert", str(proxy.WORK / "ca.pem")]
    asked += [
        "-w",
        "\n%{local_port}",
        version,
        *more,
        "-H",
        f"Authorization: Bearer {proxy.MASTER}",
        "--data-binary",
        f"@{body}",
    ]
    began = time.monotonic()
    said, _newline, port = lab("run", *asked, f"https://{proxy.FRONT}/v1/chat/completions").rpartition("\n")
    assert time.monotonic() - began < 15
    lines = lab("exec", "role1", "journalctl", "--no-pager", "--output=cat", "-u", "onprem-vllm-haproxy", "-n", "20")
    [line] = [one.split() for one in lines.splitlines() if one.partition(" ")[0].endswith(f":{port}")]
    assert (line[4], line[-1]) == ("413", "clients/<NOSRV>"), said


@pytest.mark.parametrize(
    ("body", "header", "wanted"),
    [
        ('{"model":', "Content-Type: application/json", 400),
        ("[1]", "Content-Type: application/json", 400),
        ('{"model": "tiny"}', "Content-Type: application/json", 400),
        ('{"model": "tiny"}', "Content-Type: text/plain", 415),
        ('{"model": "tiny"}', "Transfer-Encoding: chunked", 411),
    ],
)
def test_what_is_no_request(lab, body, header, wanted):
    status, said = proxy.ask(lab, "/v1/chat/completions", "-H", header, "-d", body)
    assert status == wanted
    assert json.loads(said)["error"]["code"] == str(wanted)


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
@pytest.mark.parametrize(
    ("path", "more", "wanted"),
    [
        ("/v1/models", ["-X", "GET", "-H", "Transfer-Encoding: chunked", "-d", "{}"], 400),
        ("/v1/models", ["-X", "GET", "-d", "{}"], 400),
        ("/v1/chat/completions", ["-X", "PUT", "-H", "Transfer-Encoding: chunked", "-d", "{}"], 405),
        ("/v1/chat/completions", ["-X", "DELETE"], 405),
    ],
)
def test_no_other_method_and_no_body_with_get(lab, version, path, more, wanted):
    status, said = proxy.ask(lab, path, version, "-H", "Content-Type: application/json", *more)
    assert (status, json.loads(said)["error"]["code"]) == (wanted, str(wanted))


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_an_unknown_key_is_refused_by_haproxy_whatever_the_size_of_its_body(lab, at, version):
    body = proxy.WORK / "body"
    for size in (10, 1_000_000):
        body.write_text(json.dumps({"model": "tiny", "prompt": "x" * size}))
        more = [version, "-H", "Content-Type: application/json", "--data-binary", f"@{body}"]
        status, said = proxy.ask(lab, "/v1/completions", *more, key="sk-nobody-knows-this-one")
        assert (status, json.loads(said)["error"]["message"]) == (401, "this key is not known here")
    last = at("role1").check_output("journalctl --no-pager --output cat -u onprem-vllm-haproxy -n 20").splitlines()
    assert [line.split()[-1] for line in last if " 401 " in line][-2:] == ["clients/<lua.unknown_key>"] * 2


def test_an_instance_that_answers_500_harms_nobody_else(lab):
    proxy.mode(lab, 8003, "broken")
    status, said = proxy.chat(lab, "org/Lone")
    assert (status, "the engine is broken" in said) == (500, True)
    assert proxy.chat(lab)[0] == 200
    proxy.mode(lab, 8003, "ok")
    # LiteLLM alone would have taken the model out, and answered 429.
    assert proxy.chat(lab, "org/Lone")[0] == 200
