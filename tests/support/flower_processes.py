"""SuperLink, SuperNodes and apps as real processes on the loopback interface, bounded and always ended."""

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
from pathlib import Path

from fednorms.flower.project import write_project
from fednorms.flower.settings import read

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    """A SuperLink and its nodes; as a context manager it ends every process it started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.started: list[subprocess.Popen] = []
        self.nodes: dict[str, subprocess.Popen] = {}
        self.certificates: Path | None = None
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")} | {
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
            "NO_COLOR": "1",
        }

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.started):
            self.kill(process)

    def kill(self, process: subprocess.Popen) -> None:
        """End a process and the children that it started (they share its group)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)

    def _start(self, name: str, *command: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.started.append(process)
        return process

    def secured(self) -> list[str]:
        if self.certificates is None:
            return ["--insecure"]
        return ["--root-certificates", str(self.certificates / "ca.crt")]

    def link(self, *options: str) -> subprocess.Popen:
        here = self.certificates
        tls = (
            ["--insecure"]
            if here is None
            else [
                "--ssl-ca-certfile", str(here / "ca.crt"),
                "--ssl-certfile", str(here / "server.pem"),
                "--ssl-keyfile", str(here / "server.key"),
            ]
        )  # fmt: skip
        command = [str(BIN / "flower-superlink"), *tls, "--host", "127.0.0.1", "--port", str(self.port)]
        process = self._start("link", *command, "--disable-runtime-dependency-installation", *options)
        self.wait(lambda: self._listening(), 60, "the SuperLink does not listen")
        self._configure()
        return process

    def _listening(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def _configure(self) -> None:
        home = self.folder / "flwr"
        home.mkdir(exist_ok=True)
        how = (
            "insecure = true"
            if self.certificates is None
            else f"root-certificates = {json.dumps(str(self.certificates / 'ca.crt'))}"
        )
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{how}\n'
        (home / "config.toml").write_text(text)

    def node(
        self, site: str, *options: str, tls: list[str] | None = None, name: str = "", **config
    ) -> subprocess.Popen:
        settings = {"site": site, "state": str(self.folder / "state" / site), **config}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        command = [str(BIN / "flower-supernode"), *(self.secured() if tls is None else tls)]
        command += ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port())]
        process = self._start(name or f"node-{site}", *command, "--node-config", text, *options)
        self.nodes[site] = process
        return process

    def project(self, config: dict) -> Path:
        """The project that `fednorms deploy init` writes, for a run config."""
        folder = self.folder / f"project-{len(list(self.folder.glob('project-*')))}"
        recipe, deployment = read(config)
        write_project(folder, recipe, deployment)
        return folder

    def flwr(self, *arguments: str, timeout: float = 60) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, config: dict, *options: str) -> str:
        """Start a run; its number."""
        said = self.flwr("run", str(self.project(config)), *options)
        return re.search(r"started run (\d+)", said).group(1)

    def said(self, run: str) -> str:
        """What the ServerApp of a run has logged."""
        return self.flwr("log", run, "--show")

    def finish(self, config: dict, timeout: float = 240, *options: str) -> Path:
        """Run a config to its end; the run's directory."""
        out = Path(config["deploy.out"])
        run = self.submit(config, *options)
        self.wait_for_run(run, out, timeout)
        return out

    def wait_for_run(self, run: str, out: Path, timeout: float = 240) -> None:
        def ended() -> bool:
            if (out / "summary.json").exists():
                return True
            over = re.search(rf"Finished task \d+ of run {run}", (self.folder / "link.log").read_text(errors="replace"))
            assert not over or (out / "summary.json").exists(), self.said(run) + self.logs()
            return False

        self.wait(ended, timeout, f"run {run} did not end")

    def wait(self, done, timeout: float, what: str) -> None:
        end = time.monotonic() + timeout
        while not done():
            assert time.monotonic() < end, what + "\n" + self.logs()
            time.sleep(0.25)

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-2500:]}" for p in self.folder.glob("*.log"))
