"""SuperLink, SuperNodes and apps as real processes on the loopback interface, watched and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fednorms.flower.project import write_project
from fednorms.flower.settings import read
from tests.support.flower_in_process import open_policy
from tests.support.waiting import HANG

BIN = Path(sys.executable).parent
HERE = Path(__file__).parent
DEPLOY = [sys.executable, "-m", "fednorms", "deploy"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    """A SuperLink and its nodes; as a context manager it ends every process it started.

    A patient cluster never treats a process as dead, however long it is silent.
    """

    def __init__(self, folder: Path, *, patient: bool = True) -> None:
        self.folder, self.port, self.door_port = folder, free_port(), free_port()
        self.started: list[subprocess.Popen] = []
        self.needed: dict[str, subprocess.Popen] = {}  # "link" and the sites: without them a run cannot continue
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")} | {
            "FEDNORMS_POLICY": str(open_policy(folder)),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, [HERE / "patient"] * patient + [HERE.parents[1] / "src"])),
            "NO_COLOR": "1",
        }

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started[::-1]:
            self.kill(process)

    def kill(self, process: subprocess.Popen) -> None:
        """End a process and the children that it started (they share its group)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG)
        self.started.remove(process)  # its number may be reused by another group
        self.needed = {name: other for name, other in self.needed.items() if other is not process}

    def _start(self, name: str, *command: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.started.append(process)
        return process

    def link(self, *options: str) -> subprocess.Popen:
        """Flower's link without a door, as Flower's own tools start it."""
        command = [str(BIN / "flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        process = self._start("link", *command, "--disable-runtime-dependency-installation", *options)
        self.needed["link"] = process
        self.wait(lambda: self._listening(self.port), "the SuperLink does not listen")
        self._configure()
        return process

    def door(self, project: Path) -> subprocess.Popen:
        """The link of a project, behind its door, as `fednorms deploy link` starts it."""
        ports = ["--port", str(self.door_port), "--link-port", str(self.port)]
        process = self._start("link", *DEPLOY, "link", str(project), "--host", "127.0.0.1", *ports)
        self.needed["link"] = process
        self.wait(lambda: self._listening(self.door_port), "the door does not listen")
        self._configure()
        return process

    def site(
        self, project: Path, site: str, *options: str, ca: Path | None = None, key: Path | None = None, name: str = ""
    ) -> subprocess.Popen:
        """A site's node, as `fednorms deploy node` starts it; one that is called otherwise is not needed for a run."""
        made = project / "certificates"
        trust = ["--ca", str(ca or made / "ca.crt"), "--key", str(key or made / f"{site}.key")]
        here = ["--server", f"127.0.0.1:{self.door_port}", "--state", str(self.folder / "state" / site)]
        command = [*DEPLOY, "node", str(project), "--site", site, *trust, *here, *options]
        process = self._start(name or f"node-{site}", *command)
        if not name:
            self.needed[site] = process
        return process

    def deploy(self, *arguments: str) -> subprocess.CompletedProcess:
        """Another command of `fednorms deploy`."""
        return subprocess.run(
            [*DEPLOY, *arguments],
            env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=HANG, check=False,
        )  # fmt: skip

    def _listening(self, port: int) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", port)) == 0

    def _configure(self) -> None:
        home = self.folder / "flwr"
        home.mkdir(exist_ok=True)
        text = (
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        (home / "config.toml").write_text(text)

    def node(self, site: str, *options: str, **config) -> subprocess.Popen:
        """A node of Flower's own, for a link without a door."""
        settings = {"site": site, "state": str(self.folder / "state" / site), **config}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        command = [str(BIN / "flower-supernode"), "--insecure"]
        command += ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port())]
        process = self._start(f"node-{site}", *command, "--node-config", text, *options)
        self.needed[site] = process
        return process

    def project(self, config: dict) -> Path:
        """The project that `fednorms deploy init` writes, for a run config."""
        folder = self.folder / f"project-{len(list(self.folder.glob('project-*')))}"
        recipe, deployment = read(config)
        write_project(folder, recipe, deployment, "127.0.0.1", self.door_port)
        return folder

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=HANG, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, config: dict, *options: str) -> str:
        """Start a run and return its number."""
        said = self.flwr("run", str(self.project(config)), *options)
        return re.search(r"started run (\d+)", said).group(1)

    def said(self, run: str) -> str:
        """What the ServerApp of a run has logged."""
        return self.flwr("log", run, "--show")

    def finish(self, config: dict, *options: str) -> Path:
        """Run a config to its end and return the run's directory."""
        out = Path(config["deploy.out"])
        run = self.submit(config, *options)
        self.wait_in_run(run, (out / "summary.json").exists, f"run {run} did not end")
        return out

    def wait_in_run(self, run: str, happened: Callable[[], bool], what: str) -> None:
        """Wait for something that a run does; fail if it ends without."""
        link = self.folder / "link.log"

        def done() -> bool:
            over = re.search(rf"Finished task \d+ of run {run}", link.read_text(errors="replace"))
            if happened():
                return True
            assert not over, what + "\n" + self.said(run) + self.logs()
            return False

        self.wait(done, what)

    def wait(self, done: Callable[[], bool], what: str, hang: float = HANG) -> None:
        """Wait as long as the processes make progress; fail when a needed one ends, or when no log grows any more.

        Every step of a run is a line in a log. CPU time is no measure: idle processes of Flower poll and use some.
        """
        lines, moved = self._lines(), time.monotonic()
        while not done():
            ended = [name for name, process in self.needed.items() if process.poll() is not None]
            assert not ended or done(), f"{what}: {', '.join(ended)} ended\n{self.logs()}"
            before, lines = lines, self._lines()
            moved = moved if lines == before else time.monotonic()
            assert time.monotonic() - moved < hang, f"{what}: no news in any log for {hang:g} s\n{self.logs()}"
            time.sleep(0.25)

    def _lines(self) -> int:
        """How many lines there are in the logs; lines about a failed connection do not count."""
        logs = [log.read_text(errors="replace") for log in self.folder.glob("*.log")]
        return sum("retrying in" not in line for log in logs for line in log.splitlines())

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-2500:]}" for p in self.folder.glob("*.log"))
