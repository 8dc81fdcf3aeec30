# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keys of teams that lie in PostgreSQL: issued and removed by a person, and known to the proxy within a second.

``sudo python3 /opt/vllm/libexec/team_keys.py ...`` on a proxy host:
  add TEAM [--model NAME]... [--per-minute NUMBER] [--expires 2027-06-30]
                     prints a new key, once: the database has its sha256 alone
  list               every key by the first digits of its sha256
  remove TEAM|ID     all keys of a team, or the one whose sha256 begins so

The unit onprem-vllm-keys runs ``team_keys.py follow``: it writes the keys where LiteLLM and HAProxy read them, and
changes what HAProxy has in memory. While the database does not answer, the keys that were known before count. The
role's teardown runs ``team_keys.py drop`` where it is asked to.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pwd
import re
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2.extensions import ISOLATION_LEVEL_AUTOCOMMIT, connection

SETTINGS = Path("/etc/vllm-proxy/database.json")
STATE = Path("/var/lib/onprem-vllm-keys")
SAID = Path("/run/onprem-vllm-keys/said.json")
HAPROXY = Path("/run/onprem-vllm-haproxy/admin.sock")
CLUSTERS, PROGRAMS = Path("/etc/postgresql"), Path("/usr/lib/postgresql")
PORT, DEFAULT_PORT = re.compile(r"\s*port\s*=\s*'?(\d+)"), 5432
TEAMS, LIMITS, KEYS, FOLLOWED = "teams.map", "limits.map", "keys.json", "followed.json"
CHANNEL = "onprem_vllm_team_key"
# A notification may be lost with its connection, and HAProxy may have started anew.
LOOK_AGAIN_S = 15.0
TRY_AGAIN_S = 3.0
SHORTEST_ID = 6
ANEW = "the table onprem_vllm.team_key was made anew"
LINES_AT_ONCE = 200  # of a map; HAProxy reads an order of 64 KiB at most
# A server that is gone without a word is noticed within seconds, too.
WAY_IN = {
    "application_name": "onprem-vllm-keys",
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
OPTIONS = "-c statement_timeout=10s -c lock_timeout=10s"
TEAM = "[A-Za-z0-9][A-Za-z0-9._@-]{0,62}"
# What stands in a row becomes a line of HAProxy's maps: the table refuses what would become more than one.
# Two proxies that find no table make it one after the other, and the second one changes nothing. A table that is made
# anew has another identity, by which those who followed the one before know that it lost their keys.
SCHEMA = f"""
SELECT pg_advisory_xact_lock(7402);
CREATE SCHEMA IF NOT EXISTS onprem_vllm;
DO $$ BEGIN IF to_regclass('onprem_vllm.team_key') IS NULL THEN
    DROP TABLE IF EXISTS onprem_vllm.identity;
    CREATE TABLE onprem_vllm.identity AS SELECT gen_random_uuid() AS id;
    CREATE TABLE onprem_vllm.team_key (
        hash text PRIMARY KEY CHECK (hash ~ '^[0-9a-f]{{64}}$'),
        team text NOT NULL CHECK (team ~ '^{TEAM}$' AND team <> 'master'),
        models text[] NOT NULL DEFAULT '{{}}',
        requests_per_minute integer CHECK (requests_per_minute > 0),
        expires timestamptz CHECK (isfinite(expires)),
        created timestamptz NOT NULL DEFAULT now()
    );
END IF; END $$;
CREATE OR REPLACE FUNCTION onprem_vllm.tell() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_notify('{CHANNEL}', ''); RETURN NULL; END $$;
CREATE OR REPLACE TRIGGER tell AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON onprem_vllm.team_key
    FOR EACH STATEMENT EXECUTE FUNCTION onprem_vllm.tell();
"""
NEW_ROW = """
INSERT INTO onprem_vllm.team_key (hash, team, models, requests_per_minute, expires) VALUES (%s, %s, %s, %s, %s)
"""
ROWS = """
SELECT hash, team, models, requests_per_minute, extract(epoch FROM expires)::float8, created
FROM onprem_vllm.team_key ORDER BY created, hash
"""


def main(words: list[str]) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("add")
    new.add_argument("team", type=team)
    new.add_argument("--model", action="append", default=[], help="a model it may use; all where none is named")
    new.add_argument("--per-minute", type=number, help="requests per minute; no limit where none is set")
    new.add_argument("--expires", type=moment, help="a date, whose first moment in UTC counts, or a time")
    commands.add_parser("list")
    commands.add_parser("remove").add_argument("key")
    commands.add_parser("follow")
    commands.add_parser("drop")
    given = parser.parse_args(words)
    if given.command == "follow":
        return follow(json.loads(SETTINGS.read_text(encoding="utf-8")))
    try:
        settings = json.loads(SETTINGS.read_text(encoding="utf-8"))
        if given.command == "drop":
            return drop(settings)
        with contextlib.closing(opened(settings)) as database:
            if given.command == "add":
                return add(database, given, settings["models"])
            return show(database) if given.command == "list" else remove(database, given.key)
    except (psycopg2.Error, OSError, LookupError) as error:
        print(f"team_keys.py: {_said(error)}", file=sys.stderr)
        return 1


def team(text: str) -> str:
    """A team's name, as it may stand in HAProxy's maps."""
    if text == "master" or not re.fullmatch(TEAM, text):
        raise ValueError(text)
    return text


def number(text: str) -> int:
    """A whole number above 0."""
    if not 0 < int(text) < 1 << 31:
        raise ValueError(text)
    return int(text)


def moment(text: str) -> datetime:
    """A date or a time, UTC where it names no zone."""
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)


# -- what a person does --------------------------------------------------------------------------------------------


def add(database: connection, given: argparse.Namespace, models: list[str]) -> int:
    """A new key of a team, on standard output."""
    if unknown := sorted({*given.model} - {*models}):
        print(f"team_keys.py: {', '.join(unknown)} is not served here (served: {', '.join(models)})", file=sys.stderr)
        return 1
    key = f"sk-{secrets.token_urlsafe(32)}"
    row = (hashlib.sha256(key.encode()).hexdigest(), given.team, given.model, given.per_minute, given.expires)
    with database.cursor() as cursor:
        cursor.execute(NEW_ROW, row)
    print(key)
    print(f"team_keys.py: a key of {given.team}, {row[0][:12]}; it is shown here alone", file=sys.stderr)
    return 0


def show(database: connection) -> int:
    """One line a key."""
    with database.cursor() as cursor:
        cursor.execute(ROWS)
        for digest, team, models, limit, expires, created in cursor.fetchall():
            until = datetime.fromtimestamp(expires, UTC).strftime("until %Y-%m-%d %H:%M UTC") if expires else "no end"
            about = (", ".join(models) or "all models", f"{limit} a minute" if limit else "no limit", until)
            print(f"{digest[:12]}  {team:<20}  {'; '.join(about)}; since {created:%Y-%m-%d}")
    return 0


def remove(database: connection, key: str) -> int:
    """The keys of a team, or one by the beginning of its sha256."""
    with database.cursor() as cursor:
        cursor.execute("SELECT hash, team FROM onprem_vllm.team_key")
        rows = cursor.fetchall()
        digests = [digest for digest, team in rows if team == key]
        if not digests and len(key) >= SHORTEST_ID:
            digests = [digest for digest, _team in rows if digest.startswith(key)]
            digests = digests if len(digests) == 1 else []
        cursor.execute("DELETE FROM onprem_vllm.team_key WHERE hash = ANY(%s)", (digests,))
    if not digests:
        print(f"team_keys.py: {key} is no team with a key, and no one key's sha256 begins so", file=sys.stderr)
        return 1
    print(f"team_keys.py: removed {', '.join(digest[:12] for digest in digests)}", file=sys.stderr)
    return 0


def drop(settings: Mapping[str, Any]) -> int:
    """Every key, and with a database of ours the database; in one of others the empty table tells further proxies."""
    if settings["local"]:
        with contextlib.closing(_connected(settings, "postgres")) as server, server.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {settings['local']} WITH (FORCE)")
    else:
        with contextlib.closing(_connected(settings)) as database, database.cursor() as cursor:
            if has_table(cursor):
                cursor.execute("DELETE FROM onprem_vllm.team_key")
    return 0


# -- the database --------------------------------------------------------------------------------------------------


def opened(settings: Mapping[str, Any]) -> connection:
    """A connection to the database, which is made where there is none.

    Raises:
        psycopg2.Error: it does not answer, or refuses.
        LookupError: it had keys and has their table no more, which must not take anybody's away.
    """
    if settings["local"]:
        with contextlib.closing(_connected(settings, "postgres")) as server, server.cursor() as cursor:
            cursor.execute("SELECT FROM pg_database WHERE datname = %s", (settings["local"],))
            if not cursor.fetchall():
                _known(settings, f"the database {settings['local']} is gone")
                cursor.execute(f"CREATE DATABASE {settings['local']} TEMPLATE template0 ENCODING 'UTF8'")
    database = _connected(settings, settings["local"])
    try:
        with database.cursor() as cursor:
            if not has_table(cursor):
                _known(settings, "the table onprem_vllm.team_key is gone")
                cursor.execute(SCHEMA)
            _known(settings, ANEW, identity(cursor))
            cursor.execute(f"LISTEN {CHANNEL}")
    except (psycopg2.Error, LookupError):
        database.close()
        raise
    return database


def has_table(cursor: Any) -> bool:
    """Whether the database has the table of the keys."""
    cursor.execute("SELECT to_regclass('onprem_vllm.team_key') IS NOT NULL")
    (found,) = cursor.fetchone()
    return bool(found)


def identity(cursor: Any) -> str:
    """Which table of keys the database has."""
    cursor.execute("SELECT id::text FROM onprem_vllm.identity")
    (found,) = cursor.fetchone()
    return str(found)


def follow_this(settings: Mapping[str, Any], followed: str) -> None:
    """Remember which table's keys count from now on.

    Raises:
        LookupError: another table's did until now, in just this database.
    """
    _known(settings, ANEW, followed)
    _write(STATE / FOLLOWED, json.dumps([settings["local"], settings["connection"], followed]).encode(), 0o400)


def _known(settings: Mapping[str, Any], what: str, now: str = "") -> None:
    """Refuse a database that is not what it was when its keys were followed."""
    path = STATE / FOLLOWED
    *database, followed = json.loads(path.read_bytes()) if path.is_file() else (None,)
    if database == [settings["local"], settings["connection"]] and now != followed:
        raise LookupError(f"{what}: restore it, or remove {path} and take what it has")


def _connected(settings: Mapping[str, Any], name: str = "") -> connection:
    """Each statement a transaction of its own; ``name`` is a database of this host's server."""
    where = f"dbname={name} user=postgres port={port()}" if name else settings["connection"]
    known = {"password": settings["password"]} if settings["password"] else {}
    with _acting_as("postgres" if name else ""):  # by its user a server knows who comes through its socket
        database = psycopg2.connect(_joined(where), **known)
    database.set_isolation_level(ISOLATION_LEVEL_AUTOCOMMIT)
    return database


def port() -> int:
    """That of Debian's clusters on this host: the lowest, which is the one that its own tools take."""
    found = []
    for cluster in CLUSTERS.glob("*/*"):
        if (PROGRAMS / cluster.parent.name / "bin" / "postgres").exists():  # else it was removed and not purged
            files = [cluster / "postgresql.conf", *sorted(cluster.glob("conf.d/*.conf"))]
            lines = [line for file in files if file.is_file() for line in file.read_text().splitlines()]
            ports = [int(line[1]) for line in map(PORT.match, lines) if line]
            found.append(ports[-1] if ports else DEFAULT_PORT)
    return min(found, default=DEFAULT_PORT)


def _joined(where: str) -> str:
    """An address of either form with our settings of a connection, of which its own count more."""
    given = psycopg2.extensions.parse_dsn(where)
    options = " ".join(filter(None, (OPTIONS, given.get("options"))))
    dsn: str = psycopg2.extensions.make_dsn(**{**WAY_IN, **given, "options": options})
    return dsn


@contextlib.contextmanager
def _acting_as(user: str) -> Iterator[None]:
    before = os.geteuid()
    if user and pwd.getpwuid(before).pw_name != user:
        os.seteuid(pwd.getpwnam(user).pw_uid)
    try:
        yield
    finally:
        os.seteuid(before)


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# -- the proxy -----------------------------------------------------------------------------------------------------


def follow(settings: Mapping[str, Any]) -> int:
    """Bring the proxy what the database has, now and whenever it changes; does not return."""
    database = None
    told = None
    while True:
        try:
            if database is None:
                database = opened(settings)
            database.notifies.clear()  # what they tell of is read now
            followed, keys = read(database)
            follow_this(settings, followed)
            publish(keys, settings["reader"])
            said = ""
        except (psycopg2.Error, LookupError) as error:
            said = _said(error)
            if database is not None:
                database.close()
            database = None
        except (OSError, ValueError) as error:  # HAProxy
            said = _said(error)
        if said != told:
            words = f"{said}; the keys that were known go on" if said else "the proxy has the keys of the database"
            print(f"team_keys.py: {words}", file=sys.stderr, flush=True)
            _write(SAID, json.dumps({"error": said}).encode(), 0o644)
            told = said
            notify("READY=1")
        if said or database is None:
            time.sleep(TRY_AGAIN_S)
        elif not database.notifies:
            with contextlib.suppress(psycopg2.Error, OSError, ValueError):  # the next look finds out
                select.select([database], [], [], LOOK_AGAIN_S)
                database.poll()


def read(database: connection) -> tuple[str, dict[str, dict[str, Any]]]:
    """The table's identity, and its keys by their sha256."""
    with database.cursor() as cursor:
        followed = identity(cursor)
        cursor.execute(ROWS)
        return followed, {
            digest: {"team": team, "models": models, "requests_per_minute": limit or 0, "expires": expires}
            for digest, team, models, limit, expires, _created in cursor.fetchall()
        }


def publish(keys: Mapping[str, Mapping[str, Any]], reader: str) -> None:
    """Put keys where LiteLLM reads them, and where HAProxy has them, in its memory too."""
    known = {key: {name: entry[name] for name in ("team", "models", "expires")} for key, entry in keys.items()}
    content = json.dumps(known, indent=1, sort_keys=True).encode()
    _write(STATE / KEYS, content, 0o440, pwd.getpwnam(reader).pw_gid)
    maps = {  # the limits first: no key lets in before its own is known
        LIMITS: {key: str(entry["requests_per_minute"]) for key, entry in keys.items() if entry["requests_per_minute"]},
        TEAMS: {key: str(entry["team"]) for key, entry in keys.items()},
    }
    for name, lines in maps.items():
        text = "".join(f"{key} {value}\n" for key, value in sorted(lines.items()))
        _write(STATE / name, text.encode(), 0o400)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # it reads the file when it starts
            remember(STATE / name, lines)


def _write(path: Path, content: bytes, mode: int, group: int = 0) -> None:
    """A file of root's at once, unless it is just so."""
    if path.is_file() and path.read_bytes() == content and path.stat().st_gid == group:
        return
    beside = path.with_suffix(".new")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.chown(beside, 0, group)
    beside.replace(path)


def remember(path: Path, lines: Mapping[str, str], haproxy: Path = HAPROXY) -> None:
    """Give HAProxy a map of keys, all of it at one moment.

    Raises:
        OSError: HAProxy does not answer.
        ValueError: it has no such map, or refuses.
    """
    shown = ask(haproxy, f"show map {path}").splitlines()
    if {line.split()[1]: line.split()[2] for line in shown if len(line.split()) == 3} == lines:
        return
    answer = ask(haproxy, f"prepare map {path}")
    prepared = re.search(r"New version created: (\d+)", answer)
    if prepared is None:
        raise ValueError(f"HAProxy takes no keys into {path}, and says {answer or 'nothing'!r}")
    whole = [f"{key} {value}" for key, value in sorted(lines.items())]
    for first in range(0, len(whole), LINES_AT_ONCE):
        part = "\n".join(whole[first : first + LINES_AT_ONCE])
        if said := ask(haproxy, f"add map @{prepared[1]} {path} <<\n{part}\n"):
            raise ValueError(f"HAProxy refused keys: {said}")
    if said := ask(haproxy, f"commit map @{prepared[1]} {path}"):
        raise ValueError(f"HAProxy refused keys: {said}")


def ask(path: Path, order: str) -> str:
    """HAProxy's answer to one order."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as haproxy:
        haproxy.settimeout(10)
        haproxy.connect(str(path))
        haproxy.sendall(f"{order}\n".encode())
        answer = b""
        while piece := haproxy.recv(1 << 16):
            answer += piece
    return answer.decode().strip()


def notify(state: str) -> None:
    """Tell systemd, where it listens (sd_notify(3))."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            systemd.sendall(state.encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
