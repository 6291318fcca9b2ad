"""Real processes, real signals: whatever ends a run, whole checkpoints stay and the same command goes on.
The scripts in tools/ for SLURM run here, too, with stubs in the place of SLURM's programs."""
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import ckpt
import resume
import trainer
from run import SFT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the process table in /proc")

KILL, TERM, USR1, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
PYTHON, TRAIN = ["env", "FEWSTEP_REQUEUE=1", sys.executable], str(trainer.ROOT / "train.py")
PLAIN = [*PYTHON, TRAIN]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TRAIN]
ONE, TWO = (["bash", f"{trainer.ROOT}/tools/{name}.sbatch"] for name in ("slurm", "slurm_nodes"))
COMMAND = [str(SFT), *"--net=toy:tiny --batch_size=8 --sample_every=0 --log_every=1 --wandb=disabled "
           "--device=cpu --name=run --log_level=debug".split()]

def until(condition, seconds=180):  # a busy machine is slow, not wrong
    """Waits for a condition and returns what it is; fails after so many seconds."""
    end = time.time() + seconds
    while not (value := condition()):
        assert time.time() < end, f"not within {seconds} s"
        time.sleep(0.005)
    return value

def kill(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(0.003)

@contextlib.contextmanager
def started(words, log, env):
    """-> (process, pids(of): all that it started and that live with `of` in their environment)."""
    mark = uuid.uuid4().hex.encode()
    def pids(of):
        for p in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                text = (p / "environ").read_bytes()
                if mark in text and of in text:
                    yield int(p.name)
    with open(log, "w") as out:
        process = subprocess.Popen(words, env=os.environ | env | {"TEST": mark}, stdout=out, stderr=out,
                                   cwd=trainer.ROOT)
    try:
        yield process, pids
    finally:                                            # a test that fails leaves processes
        kill(pids(b""), KILL)

def its(folder):
    """The iterations in metrics.jsonl; its last line may be half written."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    return [int(n) for n in re.findall(r'^\{"it": (\d+)[^\n]*\}$', text, re.M)]

def newest(folder):
    return max(ckpt.scan(folder / "checkpoints"), default=0)

def catches(pid):
    """Has a process a handler for SIGUSR1? train.py gets that before it imports torch, slurm.sbatch when
    torchrun is there."""
    mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(mask[1], 16) >> (USR1 - 1) & 1

# passes USR1 on to what it has started, returns the highest exit code
SRUN = f"""#!{sys.executable} -S
import os, signal, subprocess, sys
tasks = []
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
for node in range(int(os.environ["SLURM_NNODES"])):
    tasks.append(subprocess.Popen(sys.argv[sys.argv.index("bash"):], env=os.environ | dict(STEP="0")))
os._exit(max(task.wait() for task in tasks))    # python would lose its handler first
"""
SCONTROL = """#!/bin/sh
[ $1 = show ] && echo localhost || echo "$@" >> "$(dirname "$0")/calls"
"""

@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The folder in which the cases follow each other (the next one is the rerun of the last), with stubs;
    scontrol notes in `calls` what it is asked to do."""
    folder = tmp_path_factory.mktemp("shared")
    for name, text in dict(srun=SRUN, squeue="#!/bin/sh\necho RUNNING\n", scontrol=SCONTROL).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder

USUAL = "--val_every=0"
SHARDED = f"{USUAL} --parallel=fsdp --save_every=1 --keep_last=3"       # so that a signal mostly meets a save
ENDLESS = "--val_batches=1000000 --val_every={}"        # a validation that only the signal ends

@pytest.mark.parametrize("launch, at_start, whom, signals, code, args", [
    (PLAIN, True, "first", [USR1], 0, USUAL), (PLAIN, False, "first", [TERM], 0, USUAL),
    (PLAIN, False, "first", [INT], 0, USUAL), (TORCHRUN, False, "\0RANK=1\0", [USR1, USR1, TERM], 0, SHARDED),
    (TORCHRUN, False, "", [USR1], -USR1, USUAL), (TORCHRUN, False, "first", [TERM], 1, ENDLESS),
    (TORCHRUN, False, "first", [KILL], -KILL, f"{SHARDED} --async_save=true"),
    (ONE, True, "first", [USR1], 0, USUAL),             # the shell, before there are workers
    (TWO, False, "STEP=0", [USR1], 0, USUAL),           # all that srun has started
    (PLAIN, False, "first", [], 0, f"{USUAL} --stop_at={{}}")])         # ends, and is not to come back
def test_a_signal_leaves_one_whole_checkpoint_of_all_ranks_and_one_request_to_requeue(
        shared, launch, at_start, whom, signals, code, args):
    folder, log, job = shared / "out/fewstep/digits/run", shared / "log", str(20000 + os.getpid() % 10000)
    before, nodes, calls = newest(folder), 1 + (launch == TWO), shared / "calls"
    calls.write_text("")
    env = dict(PATH=f"{shared}:{Path(sys.executable).parent}:{os.environ['PATH']}", OMP_NUM_THREADS="1",
               FEWSTEP_OUTPUT_ROOT=f"{shared}/out", SLURM_CPUS_PER_TASK="1", SLURM_JOB_ID=job,
               SLURM_RESTART_COUNT="3", SLURM_NNODES=f"{nodes}", SLURM_JOB_NODELIST="some",
               SLURM_GPUS_ON_NODE=f"{2 // nodes}")
    with started([*launch, *COMMAND, *args.format(before + 5).split()], log, env) as (process, pids):
        until(lambda: catches(process.pid) if at_start else its(folder)[-1:] >= [before + 4]
              or process.poll() is not None)
        time.sleep(0.2 * (not at_start))
        for number in signals:
            kill([process.pid] if whom == "first" else [*pids(whom.encode())], number)
        assert process.wait(180) == code, log.read_text()       # negative: at once, its workers notice that
        until(lambda: not [*pids(b"")])
    text, at = log.read_text(), newest(folder)
    stops = re.findall(r"asked to stop: (\d+) iterations are in \S+/(\d{7})\.pth", text)
    assert stops == [(str(at), f"{at:07d}")] * (1 if launch == PLAIN else 2) * len(signals[:1]), text
    assert f"{'continuing' if before else 'starting'} at iteration {before}\n" in text
    assert f"SLURM job {job}, restart 3" in text and (launch != PLAIN or "Traceback" not in text)
    assert at == before + 5 if "{}" in args else at >= before + 4 * (not at_start)
    assert its(folder) == list(range(1, at + 1))        # none twice, none left out
    assert calls.read_text() == f"requeue {job}\n" * len(signals[:1])   # once: by rank 0 only
    found = ckpt.scan(folder / "checkpoints")
    assert {int(name.partition(".")[0]) for name in os.listdir(folder / "checkpoints")} == {*found}
    for n in found:                                     # whole, with the shards
        state = ckpt.load_checkpoint(ckpt.path(folder / "checkpoints", n))
        assert all(dict(held) for held in state["nets"].values())

def test_a_run_leaves_before_its_time_is_over_and_one_that_was_cancelled_does_not_come_back(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 100))
    monkeypatch.setenv("FEWSTEP_REQUEUE", "1")
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    for margin, state, leaves, calls in ("50", b"COMPLETING", False, 1), ("150", b"RUNNING", True, 2):
        monkeypatch.setenv("FEWSTEP_STOP_BEFORE_END_S", margin)
        called, scheduler = [], resume.Slurm()
        monkeypatch.setattr(subprocess, "run", lambda words, **_: called.append(words)
                            or subprocess.CompletedProcess(words, 0, state))
        scheduler.init()
        scheduler.request_resume()
        assert scheduler.termination_requested() == leaves and len(called) == calls     # squeue, scontrol
