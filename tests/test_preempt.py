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

TRAIN, TOOLS = str(trainer.ROOT / "train.py"), trainer.ROOT / "tools"
COMMAND = [str(SFT), "--net=toy:tiny", "--batch_size=8", "--val_every=0", "--sample_every=0",
           "--save_every=0", "--log_every=1", "--wandb=disabled", "--device=cpu",
           "--name=run", "--log_level=debug"]
KILL, TERM, USR1, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
runs = []

@pytest.fixture(autouse=True)
def nothing_left():
    """A test that fails leaves processes; they end here."""
    yield
    for pid in [pid for run in runs for pid in run.pids()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, KILL)
    runs.clear()

def folder_of(here):
    return here / "out" / "fewstep" / "digits" / "run"

def until(condition, seconds=180):  # a busy machine is slow, not wrong
    """Waits for a condition and returns what it is; fails after so many seconds."""
    end = time.time() + seconds
    while not (value := condition()):
        assert time.time() < end, f"not within {seconds} s"
        time.sleep(0.005)
    return value

class Run:
    """One start of the command, output below `here`: python train.py (world 0), torchrun of some ranks, or by
    the words of `launch`."""
    def __init__(self, here, *args, world=0, launch=(), **env):
        here.mkdir(exist_ok=True)
        self.folder, self.mark, self.world = folder_of(here), uuid.uuid4().hex, world
        self.log = here / f"log.{self.mark}"
        env = dict(FEWSTEP_OUTPUT_ROOT=str(here / "out"), OMP_NUM_THREADS="1", FEWSTEP_TEST=self.mark) | env
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"][:4 * world]
        words = {arg.partition("=")[0]: arg for arg in (*COMMAND, *args)}      # the last of a key counts
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*(launch or [sys.executable, *torchrun, TRAIN]), *words.values()],
                env=os.environ | env, stdout=log, stderr=log, cwd=trainer.ROOT)
        runs.append(self)

    def pids(self, of=b""):
        """The living processes of this run with `of` in their environment."""
        found = []
        for p in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                env = (p / "environ").read_bytes()
                if self.mark.encode() in env and of in env:
                    found.append(int(p.name))
        return found

    def reaches(self, it):
        """Waits until iteration `it` is logged; returns the run."""
        until(lambda: it in its(self.folder) or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def end(self):
        """Waits for every process of this run; returns the exit code of the first one."""
        code = self.process.wait(180)
        until(lambda: not self.pids())
        return code

# ---- what must hold
def its(folder):
    """The iterations in metrics.jsonl; its last line may be half written."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    return [int(n) for n in re.findall(r'^\{"it": (\d+)[^\n]*\}$', text, re.M)]

def newest(folder):
    return max(ckpt.scan(folder / "checkpoints"), default=0)

def whole(folder):
    """Iterations of the checkpoints, after a look that each is whole and nothing else is there."""
    found = ckpt.scan(folder / "checkpoints")
    assert {int(name.partition(".")[0]) for name in os.listdir(folder / "checkpoints")} == {*found}
    for n in found:
        state = ckpt.load_checkpoint(ckpt.path(folder / "checkpoints", n))
        assert all(dict(held) for held in state["nets"].values())       # reads the shards
    return found

def stopped_well(run, before):
    """What must hold after a request to stop a run that began at iteration `before`; -> where it stopped."""
    text, at = run.log.read_text(), newest(run.folder)
    stops = re.findall(r"asked to stop: (\d+) iterations are in \S+/(\d{7})\.pth", text)
    assert stops == [(str(at), f"{at:07d}")] * max(1, run.world), text
    assert (f"continuing at iteration {before}" if before else "starting at iteration 0") in text
    assert whole(run.folder)[-1] == at
    assert its(run.folder) == list(range(1, at + 1))    # none twice, none left out
    return at

PYTHON = f"#!{sys.executable} -S\n"
# passes USR1 on to what it has started, returns the highest exit code
SRUN = PYTHON + """import os, signal, subprocess, sys
tasks = []
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
for node in range(int(os.environ["SLURM_NNODES"])):
    tasks.append(subprocess.Popen(sys.argv[sys.argv.index("bash"):], env=os.environ | dict(STEP="0")))
os._exit(max(task.wait() for task in tasks))    # python would lose its handler first
"""

def slurm(folder, nodes=1):
    """Environment of a SLURM job of 2 ranks; its scontrol notes in folder/calls what it is asked to do."""
    (folder / "calls").write_text("")
    stubs = dict(srun=SRUN, squeue="#!/bin/sh\necho RUNNING\n", scontrol=PYTHON + (
        f"import sys\nprint('localhost') if sys.argv[1] == 'show' else print(*sys.argv[1:], "
        f"file=open({str(folder / 'calls')!r}, 'a'))\n"))
    for name, text in stubs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return dict(PATH=f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", SLURM_CPUS_PER_TASK="1",
                SLURM_JOB_ID=str(20000 + os.getpid() % 10000), SLURM_RESTART_COUNT="3",
                SLURM_NNODES=str(nodes), SLURM_JOB_NODELIST="some", SLURM_GPUS_ON_NODE=str(2 // nodes))

def requeued(run, env, folder):
    assert f"SLURM job {env['SLURM_JOB_ID']}, restart 3" in run.log.read_text()
    return (folder / "calls").read_text() == f"requeue {env['SLURM_JOB_ID']}\n"         # once: by rank 0 only

# ---- torchrun, and SLURM's scripts, on one node and on two
@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The folder in which the cases follow each other: the next one is the rerun of the last."""
    return tmp_path_factory.mktemp("shared")

SHARDED = ("--parallel=fsdp", "--save_every=1", "--keep_last=3")    # so that a signal mostly meets a save
ENDLESS = "--val_batches=1000000"                       # a validation that only the signal ends
ONE, TWO = "slurm.sbatch", "slurm_nodes.sbatch"

@pytest.mark.parametrize("script, whom, signals, code, args", [         # signals: 3 ms apart
    ("", "\0RANK=1\0", [USR1, USR1, TERM], 0, SHARDED), ("", "", [USR1], -USR1, ("--workers=0",)),
    ("", "first", [KILL], -KILL, (*SHARDED, "--async_save=true")), ("", "first", [TERM], 1, (ENDLESS,)),
    (ONE, "first", [USR1], 0, ()),                      # the shell, before there are workers
    (TWO, "STEP=0", [USR1], 0, ())])                    # all that srun has started
def test_a_signal_leaves_one_whole_checkpoint_of_all_ranks_and_one_request_to_requeue(
        shared, script, whom, signals, code, args):
    before, env = newest(folder_of(shared)), slurm(shared, nodes=1 + (script == TWO))
    if ENDLESS in args:
        args += (f"--val_every={before + 5}",)
    if not script:
        env["FEWSTEP_REQUEUE"] = "1"
    run = Run(shared, *args, world=2, launch=["bash", str(TOOLS / script)] if script else (), **env)
    if script == ONE:
        until(lambda: run.pids(b"FEWSTEP_REQUEUE=1"))   # torchrun is there
    else:
        run.reaches(before + 4)
    time.sleep(0.2)
    pids = [run.process.pid] if whom == "first" else run.pids(whom.encode())
    for number in signals:
        for pid in pids:
            os.kill(pid, number)
            time.sleep(0.003)
    assert run.end() == code                            # negative: at once, its workers have to notice that
    at = stopped_well(run, before)
    assert at == before + 5 if ENDLESS in args else at >= before + 4 * (script != ONE)
    assert requeued(run, env, shared)

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

# ---- python train.py
def catches(pid):
    """Has process `pid` a handler for SIGUSR1 yet? It gets that before it imports torch."""
    mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(mask[1], 16) >> (USR1 - 1) & 1

@pytest.mark.parametrize("number, after", [(USR1, 0), (TERM, 3), (INT, 3)])
def test_one_signal_to_a_plain_process_saves_and_exits_with_0(tmp_path, number, after):
    env = slurm(tmp_path) | dict(FEWSTEP_REQUEUE="1")
    run = Run(tmp_path, **env)
    until(lambda: catches(run.process.pid)) if after == 0 else run.reaches(after)
    os.kill(run.process.pid, number)
    assert run.end() == 0 and requeued(run, env, tmp_path)
    at = stopped_well(run, 0)
    assert at >= after and whole(run.folder) == [at] and "Traceback" not in run.log.read_text()
    again = Run(tmp_path, f"--stop_at={at + 2}", **env)
    assert again.end() == 0 and "config differs from the checkpoint: stop_at" in again.log.read_text()
    assert whole(run.folder) == [at, at + 2] and its(run.folder) == list(range(1, at + 3))
    assert requeued(again, env, tmp_path)               # as before: it was not asked to leave
