"""Start a deployment's link: Flower's own on the loopback interface, and the door in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from fednorms.core.errors import BadInput, RunFailed
from fednorms.flower.certificates import FOLDER, check_certificates
from fednorms.flower.door import KIB, Door, impatient
from fednorms.flower.keys import FILE, Watched, claims
from fednorms.flower.lifeline import Lifeline, lifeline
from fednorms.flower.limits import Limits, listen
from fednorms.flower.processes import end, start, terminable
from fednorms.runs.store.atomic import write_atomic

LOOPBACK = "127.0.0.1"
LINES, SECONDS = 20, 10.0  # a flood of refused requests must not fill the disk: so many lines of the log in so long
log = logging.getLogger("fednorms.door")


@dataclass(frozen=True)
class Link:
    """Where a link listens and what it uses."""

    project: Path
    host: str
    port: int
    link_port: int
    database: Path
    limits: Limits = field(default_factory=Limits)


def run_link(link: Link, say: Callable[[str], None]) -> int:
    """Run the link and its door until one of them ends."""
    for warning in check_certificates(link.project / FOLDER):
        say(f"note: {warning}")
    if not (link.project / FILE).exists():  # a project of 0.1 has certificates, and no roster
        raise BadInput(f"{link.project} has no {FILE}. Write it: fednorms deploy certificates {link.project}")
    roster = Watched((link.project / FILE).resolve())
    if not roster.owners():
        raise BadInput(
            f"No site has a key in {roster.path}. Add one: fednorms deploy enroll PROJECT --site SITE --key FILE"
        )
    if unbounded := sorted(set(roster.owners().values()) - set(roster.images())):
        say(f"note: {claims(unbounded)}")
    if _listening(link.link_port):
        raise BadInput(f"Port {link.link_port} of {LOOPBACK} is in use. Choose another one with --link-port.")
    _log_to_stderr()
    os.umask(0o077)  # the database holds the sites' models
    terminable()
    listening = listen(link.host, link.port, link.limits)
    secret = _next_to(link.database, ".secret").resolve()  # whoever knows it can run the server's app
    with listening, lifeline(_next_to(link.database, ".lock"), str(secret)) as line:
        return _run(link, roster, listening, line, secret, say)


def _run(
    link: Link, roster: Watched, listening: socket.socket, line: Lifeline, secret: Path, say: Callable[[str], None]
) -> int:
    write_atomic(secret, secrets.token_bytes(32))
    environment = {**roster.environment(), **line.environment()}
    programs: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, options in (("flower-superlink", _options(link)), ("flower-superexec", _executor_options(link))):
            programs[name] = start(name, [*options, "--superexec-auth-secret-file", str(secret)], environment)
            line.note(programs[name])
            while name == "flower-superlink" and not _listening(link.link_port):
                _refuse_ended(programs)
                time.sleep(0.1)
        say(f"Flower's link: {LOOPBACK}:{link.link_port}. Whoever has a shell on this machine can start runs.")
        say(f"The door: {link.host}:{link.port}, open to {', '.join(sorted(roster.owners().values()))}.")
        asyncio.run(_serve(link, roster, listening, list(programs.values())))
        _refuse_ended(programs)
        return 0
    finally:
        for program in reversed(programs.values()):
            end(program)
        secret.unlink(missing_ok=True)


def _refuse_ended(programs: Mapping[str, subprocess.Popen[bytes]]) -> None:
    for name, program in programs.items():
        if program.poll() not in (None, 0):
            raise RunFailed(f"{name} ended with exit code {program.returncode}; its messages are above.")


def _next_to(database: Path, suffix: str) -> Path:
    return database.with_name(database.name + suffix)


def door_server(door: Door, host: str, port: int, certificates: Path) -> uvicorn.Server:
    """The server of a door: TLS, bounded headers, no other protocol, no words about itself."""
    config = uvicorn.Config(
        door,
        host=host,
        port=port,
        http=impatient(door.limits.header_seconds),
        ws="none",
        lifespan="off",
        ssl_certfile=certificates / "server.pem",
        ssl_keyfile=str(certificates / "server.key"),
        h11_max_incomplete_event_size=16 * KIB,
        limit_concurrency=door.limits.connections + 1,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,  # uvicorn would replace the handlers of the whole process
        log_level="warning",
    )
    return uvicorn.Server(config)


async def renew_certificates(server: uvicorn.Server, certificates: Path, every: float = 2.0) -> None:
    """Load the server's certificate again when its file changes; connections made from then on see the new one."""
    pem, key = certificates / "server.pem", certificates / "server.key"

    def marks() -> tuple[int, ...]:
        with contextlib.suppress(OSError):
            return tuple(path.stat().st_mtime_ns for path in (pem, key))
        return ()

    seen = marks()
    while True:
        await asyncio.sleep(every)
        if (found := marks()) and found != seen and server.config.ssl is not None:
            try:
                server.config.ssl.load_cert_chain(pem, key)
            except OSError as error:  # half of the pair is new: look again
                log.warning("the new certificate cannot be used yet (%s)", error)
            else:
                seen = found
                log.warning("the server's certificate was renewed")


class Sparse(logging.Filter):
    """Lets only some lines through in a while, and says how many it left out."""

    def __init__(self) -> None:
        super().__init__()
        self._since, self._lines = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if record.created - self._since > SECONDS:
            if (left_out := self._lines - LINES) > 0:
                record.msg, record.args = (
                    f"{record.getMessage()} ({left_out} lines before this one were left out)",
                    None,
                )
            self._since, self._lines = record.created, 0
        self._lines += 1
        return self._lines <= LINES


def _log_to_stderr() -> None:
    """Write what the door, its server and its connections say to stderr, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s door: %(message)s"))
    handler.addFilter(Sparse())
    for speaker in (log, logging.getLogger("uvicorn.error"), logging.getLogger("asyncio")):
        speaker.handlers, speaker.propagate = [handler], False


async def _serve(
    link: Link, roster: Watched, listening: socket.socket, programs: Sequence[subprocess.Popen[bytes]]
) -> None:
    certificates = link.project / FOLDER
    door = Door(f"http://{LOOPBACK}:{link.link_port}", roster, limits=link.limits)
    server = door_server(door, link.host, link.port, certificates)

    async def watch() -> None:
        while all(program.poll() is None for program in programs):
            await asyncio.sleep(0.5)
        server.should_exit = True

    tasks = [asyncio.create_task(watch()), asyncio.create_task(renew_certificates(server, certificates))]
    try:
        await server.serve([listening])
    finally:
        for task in tasks:
            task.cancel()
        await door.close()


def _options(link: Link) -> list[str]:
    return [
        "--insecure",  # on the loopback interface; the door has TLS
        "--host", LOOPBACK,
        "--port", str(link.link_port),
        "--database", str(link.database.resolve()),
        "--isolation", "process",  # the program that runs apps has to know a secret, and is a child of this process
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def _executor_options(link: Link) -> list[str]:
    return ["--insecure", "--runtime-api-address", f"{LOOPBACK}:{link.link_port}", "--parent-pid", str(os.getpid())]


def _listening(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex((LOOPBACK, port)) == 0
