# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which instance is tried, what it is given, and what decides; the log is what HAProxy 2.6 writes."""

from __future__ import annotations

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import canary
from ansible_collections.onprem.vllm.plugins.module_utils.backend_keys import Asked
from ansible_collections.onprem.vllm.plugins.module_utils.canary import (
    CanaryUnseen,
    CanaryWorse,
    Thresholds,
    Verdict,
    read_answers,
    tried,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.canaries import canaries, first_hosts

from .test_backend_keys import instance
from .test_drain import HAProxy, listening_port, running, unused_port

MAP = "/etc/vllm-proxy/canary.map"
BRIEF = Thresholds(share=10, seconds=0.1, requests=10)


def line(server, status=200, milliseconds=200, end="----", backend="model-m"):
    times = f"0/0/1/{milliseconds - 1}/{milliseconds}"
    return f"/m/v1/chat/completions {status} 612 {times} {end} {backend}/{server} 0\n"


def log(*lines):
    return lambda _since: "<NOTICE> haproxy version is 2.6.12\n" + "".join(lines)


def test_it_gets_its_share_alone_for_the_time_and_as_good_as_the_others_it_passes(tmp_path):
    haproxy = HAProxy(a="DRAIN", b="UP", c="UP")
    same = log(*[line("a")] * 10, *[line("b")] * 60, *[line("c")] * 30)
    with running(haproxy, tmp_path / "s") as path:
        (told,) = tried(["a"], BRIEF, path=path, log=same)
    assert told == Verdict(
        "a: 10 requests, 0.0 % failed, 0.0 % refused, 0.0 % given up, median 0.200 s; "
        "the others of m: 90 requests, 0.0 % failed, 0.0 % refused, 0.0 % given up, median 0.200 s"
    )
    drained, *shares, cleared = haproxy.orders
    assert drained == "set server model-m/a state drain"
    assert shares == [f"clear map {MAP}", f"add map {MAP} a 10"]
    assert cleared == f"clear map {MAP}"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line("a", 500)] * 2 + [line("a")] * 98 + [line("b")] * 100, "2.0 % failed"),
        ([line("a", 200, 200, "SD--")] * 2 + [line("a")] * 98 + [line("b")] * 100, "2.0 % failed"),
        ([line("a", -1, 200, "sH--")] * 2 + [line("a")] * 98 + [line("b")] * 100, "2.0 % failed"),
        ([line("a", milliseconds=310)] * 20 + [line("b")] * 100, "at most 1.5 times as long"),
        ([line("a", 503)] * 6 + [line("a")] * 4 + [line("b")] * 100, "It was not tried any longer"),
        # A lost chat template, or a wrong key, whose answers are quick.
        ([line("a", 400, 2)] * 30 + [line("b")] * 300, "It was not tried any longer"),
        ([line("a", 401, 2)] * 8 + [line("a")] * 42 + [line("b")] * 450, "At most 1 % more may fail"),
        (
            [line("a", 400, 2)] * 30
            + [line("a", milliseconds=310)] * 20
            + [line("b", 400, 2)] * 180
            + [line("b")] * 120,
            "at most 1.5 times as long",
        ),
        # It hangs: clients give up before HAProxy does.
        ([line("a", -1, 30000, "CH--")] * 30 + [line("b")] * 300, "It was not tried any longer"),
        ([line("a", 200, 30000, "CD--")] * 8 + [line("a")] * 42 + [line("b")] * 450, "At most 1 % more may fail"),
    ],
)
def test_one_that_fails_more_or_takes_longer_is_worse_and_keeps_no_share(tmp_path, lines, said):
    haproxy = HAProxy(a="DRAIN", b="UP")
    with running(haproxy, tmp_path / "s") as path, pytest.raises(CanaryWorse) as caught:
        tried(["a"], BRIEF, path=path, log=log(*lines))
    assert said in str(caught.value)
    assert haproxy.orders[-1] == f"clear map {MAP}"


@pytest.mark.parametrize(
    "lines",
    [
        [line("a", 500)] + [line("a")] * 99 + [line("b")] * 100,  # 1 % is allowed
        [line("a", 500)] * 5 + [line("a")] * 95 + [line("b", 500)] * 5 + [line("b")] * 95,  # all are like that
        # What clients did wrong, and what they gave up, is drawn by lot.
        [line("a", 400)] * 8 + [line("a")] * 42 + [line("b", 400)] * 22 + [line("b")] * 428,
        [line("a", -1, 200, "CH--")] * 8 + [line("a")] * 42 + [line("b", 200, 200, "CD--")] * 22 + [line("b")] * 428,
        [line("a", -1, 200, "CH--")] * 3 + [line("a")] * 47 + [line("b")] * 450,
        [line("a", -1, 200, "CH--")] + [line("a")] * 9 + [line("b")] * 10,
        [line("a", 500)] * 9 + [line("b")] * 100,  # too few to decide, before and after the end
        [line("a", milliseconds=290)] * 20 + [line("b")] * 100,
    ],
)
def test_what_is_no_worse_passes(tmp_path, lines):
    with running(HAProxy(a="DRAIN", b="UP"), tmp_path / "s") as path:
        (told,) = tried(["a"], BRIEF, path=path, log=log(*lines))
    few = len(lines) == 109
    assert (told.worse, told.decided, told.text.endswith("decide nothing.")) == (False, not few, few)


def test_requests_that_another_answered_in_its_place_are_its_own_errors():
    answers = read_answers("".join([line("a")] * 95), "model-m", lambda server: server == "a", lost=5)
    assert (answers.requests, answers.errors_percent) == (100, 5.0)


def test_what_hangs_is_waited_for_and_has_failed_where_it_has_no_end(tmp_path, monkeypatch):
    """Neither its client nor HAProxy has given it up yet, so the log has nothing of it."""
    monkeypatch.setattr(canary, "LOOK_S", 0.05)
    monkeypatch.setattr(canary, "UNDER_WAY_S", 0.3)
    haproxy = HAProxy(a="DRAIN", b="UP")
    text = log(*[line("a")] * 10, *[line("b")] * 100)
    with running(haproxy, tmp_path / "s") as path:
        haproxy.sessions["a"] = [9] * 6 + [0]
        (told,) = tried(["a"], BRIEF, path=path, log=text)
        assert haproxy.sessions["a"] == [0]
        assert "10 requests, 0.0 % failed, 0.0 % refused, 0.0 % given up" in told.text
        haproxy.sessions["a"] = [3]  # long streams
        tried(["a"], BRIEF, path=path, log=text)
        haproxy.sessions["a"] = [30]
        with pytest.raises(CanaryWorse, match=r"40 requests, 0.0 % failed, 0.0 % refused, 75.0 % given up") as caught:
            tried(["a"], BRIEF, path=path, log=text)
    assert caught.value.names == ["a"]


def test_one_that_serves_another_model_now_is_not_compared_with_the_former_s(tmp_path):
    """Every request of the former model's would be answered 404, and the change of its name taken back."""
    haproxy = HAProxy(a="DRAIN", b="UP")
    with running(haproxy, tmp_path / "s") as path, instance("key", models=("new",)) as port:
        haproxy.ports["a"] = port
        (told,) = tried(["a"], BRIEF, asked={"m": Asked("m", "key")}, path=path, log=log())
        assert told.text.startswith("a: serves new, and this proxy asks it for m")
        assert not told.decided, "the module warns of it"
        assert haproxy.orders == []
        tried(["a"], BRIEF, asked={"m": Asked("new", "key")}, path=path, log=log())
    assert f"add map {MAP} a 10" in haproxy.orders


def test_other_models_and_other_lines_are_not_read():
    text = "".join(
        [line("a", backend="model-other"), "no such line\n", "/m/v1 200 1 0/0/0/0/0 ---- models/<NOSRV> 0\n"]
    )
    assert read_answers(text, "model-m", bool).requests == 0


def test_one_without_others_that_are_up_is_not_tried_and_of_two_of_a_model_one(tmp_path):
    haproxy = HAProxy(a="DRAIN", b="DOWN")
    with running(haproxy, tmp_path / "s") as path:
        assert tried(["a"], BRIEF, path=path, log=log()) == []
        haproxy.status.update(b="DRAIN", c="UP")
        assert len(tried(["a", "b"], BRIEF, path=path, log=log())) == 1
    assert [one for one in haproxy.orders if one.startswith("add")] == [f"add map {MAP} a 10"]


def test_one_that_moved_to_another_port_is_tried_there(tmp_path):
    haproxy = HAProxy(a="DRAIN", b="UP")
    with running(haproxy, tmp_path / "s") as path, listening_port() as port:
        haproxy.ports["a"] = unused_port()
        tried(["a"], BRIEF, ports={"a": port, "c": 9}, path=path, log=log())
    assert haproxy.orders[0] == f"set server model-m/a addr 127.0.0.1 port {port}"


def test_a_log_that_cannot_be_read_is_no_pass(tmp_path, monkeypatch):
    program = tmp_path / "journalctl"
    program.write_text("#!/bin/sh\necho no journal here >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    haproxy = HAProxy(a="DRAIN", b="UP")
    with running(haproxy, tmp_path / "s") as path, pytest.raises(CanaryUnseen, match="no journal here"):
        tried(["a"], BRIEF, path=path)
    assert haproxy.orders[-1] == f"clear map {MAP}"


def test_one_that_goes_down_is_worse(tmp_path):
    class Falls(HAProxy):
        def answer(self, command):
            if command.startswith("add map"):
                self.status["a"] = "DOWN"
            return super().answer(command)

    haproxy = Falls(a="DRAIN", b="UP")
    with running(haproxy, tmp_path / "s") as path, pytest.raises(CanaryWorse, match="It went down"):
        tried(["a"], Thresholds(seconds=60), path=path, log=log())


def test_the_first_of_each_model_that_changes_is_tried():
    def serving(**models):
        return {"instances": [{"name": name, "served_model_name": model} for name, model in models.items()]}

    plans = {"h1": serving(one="m", two="n"), "h2": serving(one="m", two="k"), "h3": serving(one="m", two="n")}
    interrupted = {"h1": ["h1-one"], "h2": ["h2-one", "h2-two"], "h3": ["h3-two", "h3-gone"]}
    assert [canaries(interrupted, plans, host) for host in plans] == [["one"], ["two"], ["two"]]
    assert canaries({"h1": []}, plans, "h1") == []


def test_the_first_host_of_each_model_goes_first():
    serves = {"h1": ["a"], "h2": ["a"], "h3": ["b", "a"], "h4": ["b"], "h5": [], "h6": ["c"]}
    plans = {host: {"instances": [{"served_model_name": model} for model in models]} for host, models in serves.items()}
    assert first_hosts(plans, plans) == ["h1", "h3", "h6"]
    assert first_hosts(plans, ["h4", "h3", "h2"]) == ["h4", "h3"]
    assert first_hosts(plans, []) == []
