"""Start a deployment's link: Flower's own on the loopback interface, and the door in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from fednorms.core.errors import BadInput, RunFailed
from fednorms.flower.certificates import FOLDER, check_certificates
from fednorms.flower.door import KIB, Door, Impatient
from fednorms.flower.keys import FILE, Watched
from fednorms.flower.processes import end, start, terminable

LOOPBACK = "127.0.0.1"
CONNECTIONS = 512
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


def run_link(link: Link, say: Callable[[str], None]) -> int:
    """Run the link and its door until one of them ends."""
    certificates = link.project / FOLDER
    for warning in check_certificates(certificates):
        say(f"note: {warning}")
    roster = Watched((link.project / FILE).resolve())
    sites = sorted(roster.owners().values())
    if not sites:
        raise BadInput(
            f"No site has a key in {roster.path}. Add one: fednorms deploy enroll PROJECT --site SITE --key FILE"
        )
    if _listening(link.link_port):
        raise BadInput(f"Port {link.link_port} of {LOOPBACK} is in use. Choose another one with --link-port.")
    _log_to_stderr()
    os.umask(0o077)  # the database holds the sites' models
    terminable()
    flower = start("flower-superlink", _options(link), roster.environment())
    try:
        while not _listening(link.link_port):
            if flower.poll() is not None:
                raise RunFailed(f"Flower's link ended with exit code {flower.returncode}; its messages are above.")
            time.sleep(0.1)
        say(f"Flower's link: {LOOPBACK}:{link.link_port}. Whoever has a shell on this machine can start runs.")
        say(f"The door: {link.host}:{link.port}, open to {', '.join(sites)}.")
        asyncio.run(_serve(link, roster, flower, certificates))
        if flower.poll() not in (None, 0):
            raise RunFailed(f"Flower's link ended with exit code {flower.returncode}; its messages are above.")
        return 0
    finally:
        end(flower)


def door_server(door: Door, host: str, port: int, certificates: Path) -> uvicorn.Server:
    """The server of a door: TLS, bounded headers, no other protocol, no words about itself."""
    config = uvicorn.Config(
        door,
        host=host,
        port=port,
        http=Impatient,
        ws="none",
        lifespan="off",
        ssl_certfile=certificates / "server.pem",
        ssl_keyfile=str(certificates / "server.key"),
        h11_max_incomplete_event_size=16 * KIB,
        limit_concurrency=CONNECTIONS,
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
    """Write what the door refuses to stderr, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s door: %(message)s"))
    handler.addFilter(Sparse())
    log.handlers, log.propagate = [handler], False


async def _serve(link: Link, roster: Watched, flower: subprocess.Popen[bytes], certificates: Path) -> None:
    door = Door(f"http://{LOOPBACK}:{link.link_port}", roster)
    server = door_server(door, link.host, link.port, certificates)

    async def watch() -> None:
        while flower.poll() is None:
            await asyncio.sleep(0.5)
        server.should_exit = True

    tasks = [asyncio.create_task(watch()), asyncio.create_task(renew_certificates(server, certificates))]
    try:
        await server.serve()
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
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def _listening(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex((LOOPBACK, port)) == 0
