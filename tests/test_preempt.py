"""Real processes, real signals: whatever ends a run, whole checkpoints stay and the same command goes on."""
import contextlib
import importlib
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

import ckpt
import resume
import trainer
from run import SERVER, SFT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the process table in /proc")

TRAIN = trainer.ROOT / "train.py"
COMMAND = [str(SFT), "--net=toy:tiny", "--batch_size=8", "--val_every=0", "--sample_every=0",
           "--save_every=0", "--log_every=1", "--wandb=disabled", "--device=cpu",
           "--name=run", "--log_level=debug"]
KILL, TERM, USR1, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
runs = []

@pytest.fixture(autouse=True)
def nothing_left():
    """A test that fails leaves processes; they end here."""
    yield
    for run in runs:
        run.process.kill()
        for pid in run.workers().values():
            os.kill(pid, KILL)
    runs.clear()

def command(*args):
    """COMMAND with keys replaced or added."""
    keys = {a.partition("=")[0] for a in args}
    return [a for a in COMMAND if a.partition("=")[0] not in keys] + list(args)

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
    """One start of the command, output below `here`: `python train.py` (world 0), or torchrun, `world` ranks.

    The launcher, or the plain process, is forked from a server that has imported torch, which saves seconds;
    the entry files then run as they always do. Torchrun's workers are programs of their own."""

    def __init__(self, here, *args, world=0, env={}, limit=0):
        here.mkdir(exist_ok=True)
        self.folder, self.mark, self.world = folder_of(here), uuid.uuid4().hex, world
        self.log = here / f"log.{len(list(here.glob('log.*')))}"
        env = dict(FEWSTEP_OUTPUT_ROOT=str(here / "out"), OMP_NUM_THREADS="1", FEWSTEP_TEST=self.mark) | env
        self.start(entry, command(*args), world, env, limit)

    def start(self, target, *args):
        self.log.touch()
        self.process = SERVER.Process(target=logged, args=(self.log, target, *args))
        self.process.start()
        self.pid = self.process.pid
        runs.append(self)

    def workers(self):
        """{rank: process id} of torchrun's workers, dead or alive launcher."""
        found = {}
        for p in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                env = (p / "environ").read_bytes()
                if self.mark.encode() in env and (rank := re.search(rb"\0RANK=(\d+)", env)):
                    found[int(rank[1])] = int(p.name)
        return found

    def text(self):
        return self.log.read_text()

    def reaches(self, it):
        """Waits until iteration `it` is logged; returns the run."""
        until(lambda: it in its(self.folder) or not self.process.is_alive())
        assert self.process.is_alive(), self.text()
        return self

    def end(self):
        """Waits for every process of this run; returns the exit code of the first one."""
        self.process.join(180)
        assert not self.process.is_alive(), f"still there:\n{self.text()[-2000:]}"
        until(lambda: not self.workers())
        return self.process.exitcode

def logged(log, target, *args):
    """In the new process."""
    out = os.open(log, os.O_APPEND | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    target(*args)

def entry(args, world, env, limit):
    """torchrun train.py args, or python train.py args. limit: bytes a file may have."""
    os.environ.update(env)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if world:
        from torch.distributed.run import main
        main(["--standalone", "--nproc_per_node", str(world), str(TRAIN), *args])
    else:
        torch.set_num_threads(1)
        importlib.reload(resume)                        # it reads the environment
        sys.argv = [str(TRAIN), *args]
        runpy.run_path(str(TRAIN), run_name="__main__")

def catches(pid):
    """Has process `pid` a handler for SIGUSR1 yet?"""
    with contextlib.suppress(OSError):
        mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return bool(int(mask[1], 16) >> (USR1 - 1) & 1)

def importing(run):
    """Waits until both workers have their handlers, which is before they import torch: {rank: process id}."""
    found = until(lambda: len(pids := run.workers()) == 2 and all(map(catches, pids.values())) and pids)
    assert any("libtorch" not in Path(f"/proc/{pid}/maps").read_text() for pid in found.values())
    return found

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

def goes_on(here, stop_at, checkpoints, *args, says=""):
    """The same command runs to `stop_at`; then every iteration is there once."""
    run = Run(here, *args, f"--stop_at={stop_at}")
    assert run.end() == 0 and says in run.text(), run.text()
    assert whole(run.folder) == checkpoints and its(run.folder) == list(range(1, stop_at + 1))
    return run

def stopped_well(run, before):
    """What must hold after a request to stop a run that began at iteration `before`; -> where it stopped."""
    text, at = run.text(), newest(run.folder)
    stops = re.findall(r"asked to stop: (\d+) iterations are in \S+/(\d{7})\.pth", text)
    assert stops == [(str(at), f"{at:07d}")] * max(1, run.world), text
    assert (f"continuing at iteration {before}" if before else "starting at iteration 0") in text
    assert whole(run.folder)[-1] == at
    assert its(run.folder) == list(range(1, at + 1))    # none twice, none left out
    return at

# ---- torchrun
@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The folder in which the cases of torchrun follow each other: the next one is the rerun of the last."""
    return tmp_path_factory.mktemp("shared")

def stub_scontrol(folder):
    """Environment of a SLURM job whose scontrol writes its arguments to folder/calls; that file, empty."""
    scontrol, calls = folder / "scontrol", folder / "calls"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(0o755)
    calls.write_text("")
    return dict(PATH=f"{folder}:{os.environ['PATH']}", SLURM_JOB_ID="77", SLURM_RESTART_COUNT="3",
                FEWSTEP_REQUEUE="1"), calls

SHARDED = ("--parallel=fsdp", "--save_every=1", "--keep_last=3")    # so that a signal mostly meets a save

@pytest.mark.parametrize("whom, signals, launcher_exit, args", [        # signals: 3 ms apart
    ("launcher", [USR1], -USR1, ()), ("worker 1", [USR1, USR1, TERM], 0, SHARDED),
    ("all", [USR1], -USR1, ("--workers=0",)), ("launcher", [TERM], 1, ()),
    ("launcher", [KILL], -KILL, (*SHARDED, "--async_save=true")),
    ("launcher", [TERM], 1, ("--val_batches=1000000",))])               # in an endless validation
def test_a_signal_under_torchrun_stops_all_ranks_at_one_whole_checkpoint(
        shared, whom, signals, launcher_exit, args):
    before, endless = newest(folder_of(shared)), "--val_batches=1000000" in args
    env, calls = stub_scontrol(shared)
    run = Run(shared, *args, *([f"--val_every={before + 5}"] if endless else []), world=2, env=env)
    run.reaches(before + 4)
    time.sleep(0.2)
    workers, began = run.workers(), time.time()
    for number in signals:
        for pid in dict(launcher=[run.pid], all=[run.pid, *workers.values()]).get(whom, [workers[1]]):
            os.kill(pid, number)
            time.sleep(0.003)
    assert run.end() == launcher_exit                   # negative: at once, its workers have to notice that
    assert time.time() - began < 25                     # the shortest grace there is: 30 s
    at = stopped_well(run, before)
    assert at == before + 5 if endless else at >= before + 4
    assert run.text().count("Traceback") == (launcher_exit == 1)        # torchrun's own, of the SIGTERM
    assert calls.read_text() == "requeue 77\n"          # by rank 0 only

def test_a_signal_to_one_worker_that_still_imports_torch_saves_0000000(tmp_path):
    run = Run(tmp_path, world=2)
    os.kill(importing(run)[1], USR1)
    assert run.end() == 0 and stopped_well(run, 0) == 0 and whole(run.folder) == [0]
    goes_on(tmp_path, 2, [0, 2])

def test_workers_whose_launcher_dies_before_they_have_met_leave_without_a_trace(tmp_path):
    run = Run(tmp_path, world=2)
    importing(run)
    os.kill(run.pid, USR1)
    assert run.end() == -USR1
    assert "Traceback" not in run.text() and whole(run.folder) == [] == its(run.folder)

# ---- python train.py
@pytest.mark.parametrize("number", [USR1, TERM, INT], ids=lambda n: n.name)
def test_one_signal_to_a_plain_process_saves_and_exits_with_0(tmp_path, number):
    run = Run(tmp_path).reaches(3)
    os.kill(run.pid, number)
    assert run.end() == 0
    at = stopped_well(run, 0)
    assert at >= 3 and whole(run.folder) == [at] and "Traceback" not in run.text()
    goes_on(tmp_path, at + 2, [at, at + 2], says=f"continuing at iteration {at}")

def test_a_closed_output_pipe_does_not_end_a_run(tmp_path):
    env = os.environ | dict(FEWSTEP_OUTPUT_ROOT=str(tmp_path / "out"), OMP_NUM_THREADS="1")
    process = subprocess.Popen([sys.executable, str(TRAIN), *command("--max_iter=20")], env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith("[rank 0] config")                  # | head -1
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(180) == 0 and whole(folder_of(tmp_path)) == [20]

def test_a_second_ctrl_c_ends_a_process_at_once():
    code = "import os, resume; resume.install(); os.kill(os.getpid(), 2); print(1); os.kill(os.getpid(), 2)"
    done = subprocess.run([sys.executable, "-c", code], cwd=trainer.ROOT, capture_output=True, text=True)
    assert done.stdout == "1\n" and "KeyboardInterrupt" in done.stderr

def test_slurm_stops_before_the_end_of_the_allocation_and_requeues(tmp_path):
    env, calls = stub_scontrol(tmp_path)
    def ends_in(seconds, *args, **more):
        """A run so many seconds before FEWSTEP_STOP_BEFORE_END_S sets in."""
        end = dict(SLURM_JOB_END_TIME=str(time.time() + 100 + seconds), FEWSTEP_STOP_BEFORE_END_S="100")
        run = Run(tmp_path, *args, env=env | end | more)
        assert run.end() == 0
        return run
    for requeue, called in (("0", ""), ("1", "requeue 77\n")):
        before = newest(folder_of(tmp_path))
        run = ends_in(0.8, FEWSTEP_REQUEUE=requeue)
        assert "SLURM job 77, restart 3" in run.text()
        assert stopped_well(run, before) >= before and calls.read_text() == called
    assert "stopped at --stop_at" in ends_in(900, f"--stop_at={newest(run.folder) + 1}").text()
    assert calls.read_text() == called          # only a run that was asked to leave wants to come back

def test_a_full_disk_leaves_the_last_checkpoint_and_names_the_file(tmp_path):
    run = goes_on(tmp_path, 4, [4])
    size = ckpt.path(run.folder / "checkpoints", 4).stat().st_size
    run = Run(tmp_path, "--stop_at=6", limit=size // 2)
    assert run.end() == 2 and whole(run.folder) == [4] and "Traceback" not in run.text()
    assert re.match(r"train.py: could not write \S+/0000006\.pth \(.+\); .*free some space",
                    run.text().splitlines()[-1])
    goes_on(tmp_path, 6, [4, 6])
