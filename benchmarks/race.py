"""The same federated job in fednorms and in every peer that installs: seconds per round, memory, lines, and the result.

Jobs: (a) 10 clients x 500 images, LeNet+GN, batch 50; (b) 50 x 100, LeNet+GN, batch 4; (n) 5 clients of 120 to 600
images, a small network with batch normalization, batch 20. All clients train one epoch of plain SGD per round, on the
same normalized images, from the same weights, with batches in the same order in the first round. So all must have the
same model after that round, up to rounding; a table says which have. A time is the median over the rounds after the
first. Memory is the largest sum of the resident memory of all processes. Lines are those of the driver in
benchmarks/race/ that have code.

Some peers train a client with one thread, others with --threads; on a GPU, some let cuDNN choose its algorithms. torch
then rounds differently, which can grow to a hundredth of the way within a round, so a model may equal either of two
references.

Each peer has its own virtual environment under --envs, made by uv from the pins below. Finished results in --out are
kept; --again repeats them. --gpu trains more rounds on a GPU, with those peers that this environment has, and with
fednorms' graph engine.

    python benchmarks/race.py [--envs DIR] [--out DIR] [--jobs abn] [--peers NAME ...] [--threads 2] [--again] [--gpu]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import tokenize
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent / "race"
sys.path.insert(0, str(HERE))
from job import MODELS, Job  # noqa: E402

TORCH = "torch==2.15.0"
# Name: driver, Python, packages, and environment variables of the driver. Without packages, this environment is used.
PEERS: dict[str, tuple[str, str, list[str], dict[str, str]]] = {
    "plain loop": ("plain.py", "", [], {}),
    "fednorms": ("fednorms_.py", "", [], {"ENGINE": "loop"}),
    "fednorms, workers": ("fednorms_.py", "", [], {"ENGINE": "workers"}),
    "pfl": ("pfl_.py", "3.11", ["pfl[pytorch]==0.6.0", TORCH], {}),
    "flower": ("flower_.py", "3.11", ["flwr[simulation]==1.41.0", TORCH], {"RAY_DEDUP_LOGS": "0"}),
    "fluke": ("fluke_.py", "3.11", ["fluke-fl==0.8.1", TORCH], {}),
    "flgo": ("flgo_.py", "3.11", ["flgo==0.4.4", TORCH], {}),
    "nvflare": ("nvflare_.py", "3.11", ["nvflare==2.9.0", TORCH], {}),
    "fedjax": (
        "fedjax_.py",
        "3.11",
        [
            "fedjax==0.0.17",
            "jax==0.4.13",
            "jaxlib==0.4.13",
            "dm-haiku==0.0.10",
            "chex==0.1.82",
            "optax==0.1.7",
            "scipy==1.10.1",
            "numpy<2",
            TORCH,
        ],
        {},
    ),
}
JOBS = {
    "a": {"net": "lenet-gn", "sizes": [500] * 10, "batch": 50, "rounds": 4, "size": 32, "lr": 0.02},
    "b": {"net": "lenet-gn", "sizes": [100] * 50, "batch": 4, "rounds": 4, "size": 32, "lr": 0.01},
    "n": {"net": "small-bn", "sizes": [120, 240, 360, 480, 600], "batch": 20, "rounds": 5, "size": 32, "lr": 0.02},
}
CLOSE = 1e-3  # errors of a model after a round, as a share of the way from its start; 1e-5 are rounding
ON_GPU = {"a": 20, "b": 8, "n": 20}  # rounds
LIMIT = 240  # seconds for a driver
MARK = "FEDNORMS_RACE"


def write_job(key: str, folder: Path, rounds: int) -> Job:
    """Write a job's files: images that are a pattern of their class under noise, and first weights."""
    folder.mkdir(parents=True, exist_ok=True)
    spec, generator = JOBS[key], torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, spec["size"], spec["size"], generator=generator)

    def some(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = torch.randint(10, (n,), generator=generator)
        x = 0.5 * patterns[y] + torch.randn(n, 3, spec["size"], spec["size"], generator=generator)
        return x.numpy(), y.numpy()

    arrays = dict(zip(("x", "y"), some(1000), strict=True))
    for k, n in enumerate(spec["sizes"]):
        arrays[f"x{k}"], arrays[f"y{k}"] = some(n)
    np.savez(folder / "data.npz", **arrays)
    torch.manual_seed(0)
    start = MODELS[spec["net"]]().state_dict()
    np.savez(folder / "start.npz", **{k: v.numpy() for k, v in start.items()})
    settings = {
        "net": spec["net"],
        "n": len(spec["sizes"]),
        "batch": spec["batch"],
        "rounds": rounds,
        "lr": spec["lr"],
    }
    (folder / "job.json").write_text(json.dumps(settings))
    return Job(folder)


def references(job: Job, threads: int, deterministic: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The model before and after the first round, with clients weighted by their images and with equal weights."""
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic = deterministic
    sizes = [len(y) for _, y in job.clients]
    found: dict[str, dict[str, torch.Tensor]] = {"size": {}, "equal": {}}
    found["start"] = {k: v.double().cpu() for k, v in job.model().state_dict().items()}
    for k, n in enumerate(sizes):
        model = job.model()
        job.train(model, k)
        for name, v in model.state_dict().items():
            for how, share in (("size", n / sum(sizes)), ("equal", 1 / len(sizes))):
                found[how][name] = found[how].get(name, 0) + v.double().cpu() * share
    return found


def verdict(folder: Path, expected: list[dict[str, dict[str, torch.Tensor]]]) -> str:
    """What is right about a model after the first round, next to the nearest of the references."""
    said = [compared(folder, reference) for reference in expected]
    return next((words for words in said if words.startswith("yes")), said[0])


def compared(folder: Path, expected: dict[str, dict[str, torch.Tensor]]) -> str:
    """What is right about a model after the first round."""
    with np.load(folder / "first.npz") as stored:
        ours = {k: torch.from_numpy(stored[k]).double() for k in stored}

    def off(how: str, statistics_: bool) -> float:
        names = [k for k in ours if ("running" in k) == statistics_ and "num_batches" not in k]
        error = sum(float((ours[k] - expected[how][k]).square().sum()) for k in names)
        way = sum(float((expected[how][k] - expected["start"][k]).square().sum()) for k in names)
        return (error / way) ** 0.5 if way else 0.0

    def word(statistics_: bool) -> str:
        how = next((how for how in ("size", "equal") if off(how, statistics_) <= CLOSE), "")
        off_by = f"off by {off('size', statistics_):.0e}"
        return {"size": "right", "equal": "as if clients had equally many images"}.get(how, off_by)

    missing = [k for k in expected["size"] if k not in ours and "num_batches" not in k]
    if missing:
        return f"no: {len(missing)} tensors are missing, such as {missing[0]}"
    if word(False) == word(True) == "right":
        return f"yes ({max(off('size', False), off('size', True)):.0e})"
    return f"no: weights {word(False)}, statistics {word(True)}"


def accuracy(job: Job, folder: Path) -> float:
    """Accuracy of the last model on the test set."""
    model = job.model()
    with np.load(folder / "last.npz") as stored:
        model.load_state_dict({k: torch.from_numpy(stored[k]) for k in stored}, strict=False)
    model.eval()
    with torch.no_grad():
        return float((model(job.test[0]).argmax(1) == job.test[1]).float().mean())


def environment(name: str, envs: Path | None) -> tuple[str, str]:
    """The Python of a peer's environment, which is made if it is missing, and the versions in it."""
    _, version, packages, _ = PEERS[name]
    if not packages or envs is None:
        return sys.executable, f"torch {torch.__version__}"
    python, uv = envs / name / "bin" / "python", shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    if not (envs / name / "made").exists():
        shutil.rmtree(envs / name, ignore_errors=True)
        make = [uv, "venv", "--quiet", "--python", version, str(envs / name)]
        install = [uv, "pip", "install", "--quiet", "--python", str(python), *packages]
        for command in (make, install):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"does not install: {done.stderr.strip().splitlines()[-1][:200]}")
        (envs / name / "made").write_text("\n".join(packages))
    return str(python), ", ".join(packages)


def lines_of(path: Path) -> int:
    """The lines of a file that have code: no comments, blank lines or docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    found: set[int] = set()
    fresh = True  # at the start of a statement, where a string is a docstring
    for token in tokens:
        if token.type not in skipped and not (token.type == tokenize.STRING and fresh):
            found.update(range(token.start[0], token.end[0] + 1))
        if token.type != tokenize.NL and token.type != tokenize.COMMENT:
            fresh = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return len(found)


def marked(mark: str) -> list[int]:
    """The processes that have this mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def resident(pids: list[int]) -> int:
    """Bytes of resident memory of processes."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total


def drive(name: str, job: Job, out: Path, python: str, threads: int, on_gpu: bool) -> int:
    """Run a driver; returns the peak memory of the host. Raises RuntimeError with the last line of its errors."""
    driver, _, _, extra = PEERS[name]
    mark, peak, ended = f"{os.getpid()}-{time.time_ns()}", 0, threading.Event()
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"  # for the tools of a peer
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(HERE), "PATH": path}
    home = {"HOME": str(out), "FLWR_HOME": str(out / "flwr"), "PYTHONWARNINGS": "ignore"}
    cores = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environ = {**os.environ, **quiet, **home, **cores, **extra, MARK: mark, "PFL_PYTORCH_DEVICE": "cpu"}
    if on_gpu:
        environ |= {"DEVICE": "cuda", "PFL_PYTORCH_DEVICE": "cuda", "ENGINE": "graphs"}
        here = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *here])  # a driver runs elsewhere

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.3):
            peak = max(peak, resident(marked(mark)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    log = out / "log.txt"
    try:
        with log.open("w") as file:
            command = [python, str(HERE / driver), str(job.folder), str(out)]
            try:
                code = subprocess.run(command, env=environ, stdout=file, stderr=file, cwd=out, timeout=LIMIT).returncode
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"did not end within {LIMIT} s") from None
    finally:
        ended.set()
        watcher.join()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    if code or not (out / "last.npz").exists():
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RuntimeError(f"failed: {said[-1][:200] if said else code}")
    return peak


def run(name: str, key: str, job: Job, expected: list, envs: Path | None, out: Path, threads: int) -> dict[str, object]:
    """One peer on one job: a row of the table, also written to its folder. Without `envs`, on the GPU of this one."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    row: dict[str, object] = {"peer": name, "job": key}
    try:
        python, row["versions"] = environment(name, envs)
        peak = drive(name, job, out, python, threads, envs is None)
        ends = json.loads((out / "ends.json").read_text())
        seconds = [b - a for a, b in itertools.pairwise(ends)]
        row |= {
            "seconds": statistics.median(seconds[1:]),
            "first": seconds[0],
            "peak_mb": peak / 2**20,
            "right": verdict(out, expected),
            "accuracy": accuracy(job, out),
        }
    except RuntimeError as problem:
        row["problem"] = str(problem)
    if (out / "gpu_mb.json").exists():
        row["gpu_mb"] = json.loads((out / "gpu_mb.json").read_text())
    row["lines"] = lines_of(HERE / PEERS[name][0])
    (out / "row.json").write_text(json.dumps(row))
    return row


def table(rows: list[dict[str, object]]) -> str:
    """The rows as Markdown; times are also ratios to fednorms in the same run."""
    said = ["| job | | s/round | vs. fednorms | first round | peak memory | lines | accuracy | same result |"]
    said.append("|---|---|---|---|---|---|---|---|---|")
    base = {row["job"]: row["seconds"] for row in rows if row["peer"] == "fednorms" and "seconds" in row}
    for row in rows:
        if "problem" in row:
            said.append(f"| {row['job']} | {row['peer']} | - | | | | {row['lines']} | | {row['problem']} |")
            continue
        ratio = f"{row['seconds'] / base[row['job']]:.2f}x" if row["job"] in base else ""
        said.append(
            f"| {row['job']} | {row['peer']} | {row['seconds']:.2f} | {ratio} | {row['first']:.1f} s | "
            f"{row.get('gpu_mb', row['peak_mb']) / 1024:.2f} GB | {row['lines']} | {100 * row['accuracy']:.1f} | "
            f"{row['right']} |"
        )
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, default=Path("race-envs"))
    parser.add_argument("--out", type=Path, default=Path("race-results"))
    parser.add_argument("--jobs", default="abn")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=2, help="threads of a driver's process")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    envs, out = None if given.gpu else given.envs.absolute(), given.out.absolute()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores", flush=True)
    rows = []
    for key in given.jobs:
        job = write_job(key, out / key / "job", ON_GPU[key] if given.gpu else JOBS[key]["rounds"])
        if given.gpu:
            expected = [references(Job(job.folder, "cuda"), given.threads, choice) for choice in (False, True)]
        else:
            expected = [references(job, threads, False) for threads in sorted({given.threads, 1}, reverse=True)]
        for name in given.peers:
            there = out / key / name / "row.json"
            if there.exists() and not given.again:
                rows.append(json.loads(there.read_text()))
                continue
            rows.append(run(name, key, job, expected, envs, there.parent, given.threads))
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    (out / "rows.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
