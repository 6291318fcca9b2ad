"""Real processes, real signals: whatever ends a run, it leaves whole checkpoints and the same command goes on there."""
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1

import pytest
import torch

import ckpt
import common
import resume
import train
import trainer
from run import SERVER, differing, ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the process table in /proc")

TRAIN, SFT = trainer.ROOT / "train.py", trainer.ROOT / "methods" / "sft.py"
COMMAND = [str(SFT), "--net=toy:tiny", "--batch_size=8", "--val_every=0", "--sample_every=0", "--save_every=0",
           "--log_every=1", "--wandb=disabled", "--device=cpu", "--name=run", "--log_level=debug"]


def until(condition, seconds=30):
    """Waits for a condition and returns what it is; fails after so many seconds."""
    end = time.time() + seconds
    while not (value := condition()):
        assert time.time() < end, f"not within {seconds} s"
        time.sleep(0.005)
    return value


class Run:
    """One start of the command in `here`: `python train.py` (world 0), or torchrun with `world` ranks.

    The launcher, or the plain process, is forked from a server that has imported torch (that saves seconds and changes
    nothing it does: the entry files run as __main__); torchrun's workers are programs of their own as always."""

    def __init__(self, here, *args, world=0, env={}, limit=0):
        self.folder, self.mark = here / "out" / "fewstep" / "digits" / "run", uuid.uuid4().hex
        self.world, self.log = world, here / f"log.{len(list(here.glob('log.*')))}"
        env = dict(FEWSTEP_OUTPUT_ROOT=str(here / "out"), OMP_NUM_THREADS="1", FEWSTEP_TEST=self.mark) | env
        self.process = SERVER.Process(target=entry, args=([*COMMAND, *args], world, env, str(self.log), limit))
        self.process.start()
        self.pid = self.process.pid

    def workers(self):
        """{rank: process id} of torchrun's workers."""
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
        """Waits until iteration `it` is in the log; returns the run."""
        until(lambda: it in its(self.folder) or not self.process.is_alive())
        assert self.process.is_alive(), self.text()
        return self

    def end(self, seconds=15):
        """Waits for every process of this run; returns the exit code of the first one."""
        self.process.join(seconds)
        assert not self.process.is_alive(), f"still there after {seconds} s:\n{self.text()}"
        until(lambda: not self.workers(), seconds)
        return self.process.exitcode


def entry(args, world, env, log, limit):
    """In the new process: torchrun train.py args, or python train.py args."""
    out = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(out, 1), os.dup2(out, 2)
    os.environ.update(env)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if world:
        from torch.distributed.run import main
        main(["--standalone", "--nproc_per_node", str(world), str(TRAIN), *args])
    else:
        torch.set_num_threads(1)
        importlib.reload(resume)                        # reads the environment
        sys.argv = [str(TRAIN), *args]
        runpy.run_path(str(TRAIN), run_name="__main__")


def its(folder):
    """The iterations in metrics.jsonl; the last line may be half written."""
    file = folder / "metrics.jsonl"
    return [int(n) for n in re.findall(r'^\{"it": (\d+)[^\n]*\}$', file.read_text() if file.exists() else "", re.M)]


def newest(folder):
    return max(ckpt.scan(folder / "checkpoints"), default=0)


def whole(folder):
    """Iterations of the checkpoints; each is whole and nothing else is there."""
    found = ckpt.scan(folder / "checkpoints")
    assert sorted(os.listdir(folder / "checkpoints")) == [f"{n:07d}.pth" for n in found]
    assert all(ckpt.load(ckpt.path(folder / "checkpoints", n))["it"] == n for n in found)
    return found


def catches(pid, number=SIGUSR1):
    """Is there a handler for the signal in process `pid` yet?"""
    with contextlib.suppress(OSError):
        mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return bool(int(mask[1], 16) >> (number - 1) & 1)


def stops_well(run, before):
    """What must hold after any request to stop a run that began at iteration `before`; returns where it stopped."""
    text, at = run.text(), newest(run.folder)
    stops = re.findall(r"asked to stop: (\d+) iterations are in \S+/(\d{7})\.pth", text)
    assert stops == [(str(at), f"{at:07d}")] * max(1, run.world), text
    assert ("continuing at iteration %d" % before if before else "starting at iteration 0") in text
    assert whole(run.folder)[-1] == at
    assert its(run.folder) == list(range(1, at + 1))    # none twice, none left out
    return at


# ---- torchrun ------------------------------------------------------------------------------------------------------

@pytest.fixture
def orphans():
    """Processes that lose their parent become this one's children, so that it learns their exit codes."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)                               # PR_SET_CHILD_SUBREAPER
    yield lambda pids: [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    prctl(36, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The folder in which the cases of torchrun follow each other: the next one is the rerun of the last."""
    return tmp_path_factory.mktemp("shared")


def to_launcher(number):
    return lambda run, workers: os.kill(run.pid, number)


def to_one_twice(run, workers):
    os.kill(workers[1], SIGUSR1)
    time.sleep(0.003)
    os.kill(workers[1], SIGUSR1)
    os.kill(workers[1], SIGTERM)


def to_all(run, workers):
    for pid in (run.pid, *workers.values()):
        os.kill(pid, SIGUSR1)


@pytest.mark.parametrize("send, launcher_exit, args", [
    pytest.param(to_launcher(SIGUSR1), -SIGUSR1, (), id="SIGUSR1 to the launcher"),
    pytest.param(to_one_twice, 0, (), id="three signals within 10 ms to one worker"),
    pytest.param(to_all, -SIGUSR1, ("--workers=0",), id="SIGUSR1 to every process of the tree"),
    pytest.param(to_launcher(SIGTERM), 1, (), id="SIGTERM to the launcher"),
    pytest.param(to_launcher(SIGKILL), -SIGKILL, (), id="SIGKILL to the launcher"),
    pytest.param(to_launcher(SIGTERM), 1, ("--val_batches=1000000",), id="SIGTERM during an endless validation"),
])
def test_a_signal_under_torchrun_stops_all_ranks_at_one_whole_checkpoint(shared, orphans, send, launcher_exit, args):
    before = newest(shared / "out" / "fewstep" / "digits" / "run")
    scontrol, calls = shared / "bin" / "scontrol", shared / "calls"
    scontrol.parent.mkdir(exist_ok=True)
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(0o755)
    calls.write_text("")
    if "--val_batches=1000000" in args:
        args = (*args, f"--val_every={before + 5}")
    run = Run(shared, *args, world=2, env=dict(SLURM_JOB_ID="77", FEWSTEP_REQUEUE="1",
                                               PATH=f"{scontrol.parent}:{os.environ['PATH']}"))
    run.reaches(before + 4)
    time.sleep(0.2)
    workers = run.workers()
    assert sorted(workers) == [0, 1]
    began = time.time()
    send(run, workers)
    if launcher_exit in (-SIGUSR1, -SIGKILL):           # it died at once; its workers have to notice that
        assert orphans(workers.values()) == [0, 0]
    assert run.end() == launcher_exit
    assert time.time() - began < 5                      # the shortest grace there is: 30 s
    at = stops_well(run, before)
    assert at == before + 5 if "--val_batches=1000000" in args else at >= before + 4
    assert run.text().count("Traceback") == (launcher_exit == 1)        # torchrun's own, of the SIGTERM
    assert calls.read_text() == "requeue 77\n"          # by rank 0 only


def test_the_interrupted_iterations_are_those_of_an_uninterrupted_run(shared, tmp_path):
    """Two ranks, stopped several times, against one process with two micro-steps: each iteration once, same losses."""
    folder = shared / "out" / "fewstep" / "digits" / "run"
    if not newest(folder):
        pytest.skip("needs the runs of the test above")
    run = Run(tmp_path, "--accum=2", f"--stop_at={newest(folder)}")
    assert run.end(60) == 0
    losses = [[json.loads(line)["loss"] for line in (f / "metrics.jsonl").read_text().splitlines()]
              for f in (folder, run.folder)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert len(set(losses[0])) == len(losses[0]) == newest(folder)


def test_a_signal_to_one_worker_that_still_imports_torch_saves_0000000(tmp_path):
    run = Run(tmp_path, world=2)
    until(lambda: sorted(run.workers()) == [0, 1] and all(map(catches, run.workers().values())))
    os.kill(run.workers()[1], SIGUSR1)
    assert run.end() == 0 and stops_well(run, 0) == 0 and whole(run.folder) == [0]
    run = Run(tmp_path, "--stop_at=2")
    assert run.end() == 0 and "starting at iteration 0" in run.text() and whole(run.folder) == [0, 2]


def test_workers_whose_launcher_dies_before_they_have_met_leave_without_a_trace(tmp_path, orphans):
    run = Run(tmp_path, world=2)
    workers = until(lambda: len(found := run.workers()) == 2 and all(map(catches, found.values())) and found)
    os.kill(run.pid, SIGUSR1)
    assert orphans(workers.values()) == [0, 0] and run.end() == -SIGUSR1
    assert "Traceback" not in run.text() and whole(run.folder) == [] == its(run.folder)


# ---- python train.py -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [SIGUSR1, SIGTERM, SIGINT], ids=lambda n: n.name)
def test_one_signal_to_a_plain_process_saves_and_exits_with_0(tmp_path, number):
    run = Run(tmp_path).reaches(3)
    os.kill(run.pid, number)
    assert run.end() == 0
    at = stops_well(run, 0)
    assert at >= 3 and whole(run.folder) == [at] and "Traceback" not in run.text()
    run = Run(tmp_path, f"--stop_at={at + 2}")
    assert run.end() == 0 and f"continuing at iteration {at}" in run.text()
    assert whole(run.folder) == [at, at + 2] and its(run.folder) == list(range(1, at + 3))


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path):
    run = Run(tmp_path, "--val_every=3", "--val_batches=1000000").reaches(2)
    time.sleep(0.2)
    os.kill(run.pid, SIGINT)
    until(lambda: not catches(run.pid, SIGUSR1) or "asked to stop" in run.text() or not run.process.is_alive(), 5)
    assert run.end() in (0, 1) and whole(run.folder) == [3]


def test_a_signal_while_torch_is_imported_saves_0000000(tmp_path):
    env = os.environ | dict(FEWSTEP_OUTPUT_ROOT=str(tmp_path / "out"), OMP_NUM_THREADS="1")
    with open(tmp_path / "log.0", "w") as log:
        process = subprocess.Popen([sys.executable, str(TRAIN), *COMMAND], env=env, stdout=log, stderr=log)
    until(lambda: catches(process.pid))
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.terminate()
    assert process.wait(30) == 0, (tmp_path / "log.0").read_text()
    run = Run(tmp_path, "--stop_at=1")
    assert run.end() == 0 and whole(run.folder) == [0, 1] and its(run.folder) == [1]


def test_a_validation_that_was_interrupted_is_made_up_for(tmp_path):
    run = Run(tmp_path, "--val_every=4", "--val_batches=1000000").reaches(3)
    time.sleep(0.1)
    os.kill(run.pid, SIGTERM)
    assert run.end() == 0 and whole(run.folder) == [4] and "val/" not in (run.folder / "metrics.jsonl").read_text()
    for _ in (0, 1):                                    # owed once
        run = Run(tmp_path, "--val_every=4", "--val_batches=1", "--stop_at=6", "--sample_every=4", "--steps=1")
        assert run.end() == 0
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["it"] for line in lines if "val/student/loss" in line] == [4]
        assert [line["it"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
        assert os.listdir(run.folder / "samples") == ["0000004.png"]


def test_a_closed_output_pipe_does_not_end_a_run(tmp_path):
    env = os.environ | dict(FEWSTEP_OUTPUT_ROOT=str(tmp_path), OMP_NUM_THREADS="1")
    process = subprocess.Popen([sys.executable, str(TRAIN), *COMMAND, "--max_iter=20"], env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith("[rank 0] config")                  # | head -1
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(30) == 0
    assert whole(tmp_path / "fewstep" / "digits" / "run") == [20]


def test_slurm_stops_before_the_end_of_the_allocation_and_requeues(tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    (tmp_path / "scontrol").chmod(0o755)
    env = dict(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="77", SLURM_RESTART_COUNT="3",
               FEWSTEP_STOP_BEFORE_END_S="100")
    for requeue, calls in (("0", ""), ("1", "requeue 77\n")):
        before = newest(tmp_path / "out" / "fewstep" / "digits" / "run")
        run = Run(tmp_path, env=env | dict(FEWSTEP_REQUEUE=requeue, SLURM_JOB_END_TIME=str(time.time() + 101.5)))
        assert run.end() == 0 and "SLURM job 77, restart 3" in run.text()
        assert stops_well(run, before) >= before
        assert ((tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else "") == calls
    (tmp_path / "calls").unlink()
    run = Run(tmp_path, f"--stop_at={newest(run.folder) + 1}",
              env=env | dict(FEWSTEP_REQUEUE="1", SLURM_JOB_END_TIME=str(time.time() + 1000)))
    assert run.end() == 0 and "stopped at --stop_at" in run.text()
    assert not (tmp_path / "calls").exists()            # only a run that was asked to leave wants to come back


# ---- kills, full disks, predecessors -------------------------------------------------------------------------------

@pytest.mark.parametrize("kills", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_sigkill_at_any_moment_loses_no_checkpoint_but_the_one_being_written(tmp_path, kills):
    """A run that saves every iteration. At the end it is bit for bit what a run without kills is."""
    draw, at = random.Random(0), 0
    saving = ("--save_every=1", "--keep_last=4")
    for _ in range(kills):
        run = Run(tmp_path, *saving)
        until(lambda: catches(run.pid))
        time.sleep(draw.uniform(0.05, 0.8))
        os.kill(run.pid, SIGKILL)
        assert run.end() == -SIGKILL
        text, found = run.text(), ckpt.scan(run.folder / "checkpoints")
        began = re.search(r"(?:starting|continuing) at iteration (\d+)", text)
        assert not began or int(began[1]) == at, text
        assert "WARNING" not in text and max(found, default=0) >= max(at, *its(run.folder), 1) - 1
        for n in found:
            ckpt.load(ckpt.path(run.folder / "checkpoints", n))
        at = max(found, default=0)
    run = Run(tmp_path, *saving, f"--stop_at={at + 2}")
    assert run.end() == 0 and whole(run.folder) == [at - 1, at, at + 1, at + 2]
    assert its(run.folder) == list(range(1, at + 3))
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other", f"--stop_at={at + 2}")
    assert other.end(60) == 0
    assert (other.folder / "metrics.jsonl").read_text().count("\n") == at + 2
    states = [ckpt.load(ckpt.path(f / "checkpoints", at + 2)) for f in (run.folder, other.folder)]
    assert differing(*({k: s[k] for k in ("nets", "emas", "optims", "counts")} for s in states)) == []


def test_a_full_disk_leaves_the_last_checkpoint_and_names_the_file(tmp_path):
    run = Run(tmp_path, "--stop_at=4")
    assert run.end() == 0
    size = ckpt.path(run.folder / "checkpoints", 4).stat().st_size
    run = Run(tmp_path, "--stop_at=6", limit=size // 2)
    assert run.end() == 2
    assert re.search(rf"train.py: could not write \S+/0000006\.pth \(.+\); .*free some space[^\n]*\n$", run.text())
    assert "Traceback" not in run.text() and whole(run.folder) == [4]
    run = Run(tmp_path, "--stop_at=6")
    assert run.end() == 0 and whole(run.folder) == [4, 6] and its(run.folder) == list(range(1, 7))


def full_disk(root):
    """On one of two ranks: the sentence with which the run ends."""
    os.environ["FEWSTEP_OUTPUT_ROOT"] = root
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    method = train.load_method(SFT)
    with pytest.raises(common.BadInput) as error:
        trainer.train(method, train.resolve(method, [*COMMAND[1:], "--max_iter=2"])[0])
    return str(error.value)


def test_a_full_disk_ends_every_rank(tmp_path):
    said = ranks(2, full_disk, str(tmp_path))
    assert said[0] == said[1] and "0000002.pth" in said[0]


def test_metrics_that_cannot_be_written_do_not_end_a_run(tmp_path):
    run = Run(tmp_path, "--stop_at=1")
    assert run.end() == 0
    (run.folder / "metrics.jsonl").unlink()
    recorder = importlib.import_module("logs").Recorder(run.folder, None, 0, None, lambda *said: said_.append(said))
    said_ = []
    (run.folder / "metrics.jsonl").mkdir()
    recorder(2, dict(loss=1.0))
    assert len(said_) == 1 and "could not write" in said_[0][0] and said_[0][1] == "warning"


def test_a_run_that_waits_for_its_predecessor_continues_from_what_that_one_saves(tmp_path):
    """The launcher died, its workers still save, and the command is already running again."""
    old = Run(tmp_path / "old" if (tmp_path / "old").mkdir() is None else None, "--stop_at=3")
    assert old.end() == 0
    folder = tmp_path / "out" / "fewstep" / "digits" / "run"
    folder.mkdir(parents=True)
    with open(folder / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        run = Run(tmp_path, "--stop_at=5")
        until(lambda: any(os.path.realpath(f) == str(folder / ".lock") for f in Path(f"/proc/{run.pid}/fd").iterdir()))
        shutil.copy(ckpt.path(old.folder / "checkpoints", 3), folder / "checkpoints")
    assert run.end() == 0 and "continuing at iteration 3" in run.text() and whole(folder) == [3, 5]
