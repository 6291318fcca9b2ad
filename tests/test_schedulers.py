"""The scripts in tools/ for SLURM and Kubernetes: bash runs them here, SLURM's programs are stubs."""
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from types import ModuleType

import pytest
import yaml

import resume
import trainer
from test_preempt import (Run, command, folder_of, newest, nothing_left, shared,        # noqa: F401
                          stopped_well, until)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the process table in /proc")
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)    # noqa: E731
ONE, TWO, TOOLS = "slurm.sbatch", "slurm_nodes.sbatch", trainer.ROOT / "tools"      # on one node, on two
KILL, TERM, USR1 = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1

PYTHON = f"#!{sys.executable} -S\n"
STEP = """import contextlib, os
def pids(of="SLURM_STEP_ID=", mark=os.environ.get("FEWSTEP_TEST")):
    '''The living processes of a job with `of` in environment or name; by default those that srun started.'''
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
        with contextlib.suppress(OSError):
            text = [open(f"/proc/{pid}/{file}", errors="replace").read() for file in ("environ", "cmdline")]
            if f"FEWSTEP_TEST={mark}" in text[0] and of in str(text):
                yield int(pid)
def send(number, *which):
    for pid in list(pids(*which)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
"""
step = ModuleType("step")
exec(STEP, vars(step))
# requeue takes its time, then ends the job: a SIGTERM to the steps and to the shell of the batch script
SCONTROL = PYTHON + """import os, sys, time, step
if sys.argv[1] == "show":
    sys.exit(print("localhost"))
time.sleep(1.2 if "SLURM_STEP_ID" in os.environ else 0)
print("scontrol", *sys.argv[1:], flush=True)
step.send(15)
step.send(15, "/slurm_script")
"""
# passes USR1 on to the step, kills it after a TERM, returns the highest exit code
SRUN = PYTHON + """import os, signal, subprocess, sys, step
signal.signal(signal.SIGUSR1, lambda *_: step.send(signal.SIGUSR1))
signal.signal(signal.SIGTERM, lambda *_: step.send(signal.SIGKILL))
tasks = [subprocess.Popen(sys.argv[sys.argv.index("bash"):], env=os.environ | dict(SLURM_STEP_ID="0"))
         for n in range(int(os.environ["SLURM_NNODES"]))]
os._exit(max(t.wait() for t in tasks))      # the shell repeats USR1, and python loses its handlers at the end
"""
TORCHRUN = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
# one that takes its time: no worker at first, then one that is deaf, then one that leaves when told
SLOW = PYTHON + """import os, subprocess, sys, time
print([os.environ["FEWSTEP_REQUEUE"], *sys.argv[1:]], flush=True)
time.sleep(0.3)
sys.exit(subprocess.call([sys.executable, "-S", "-c", '''import os, signal, time
time.sleep(0.3)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
time.sleep(60)''']))
"""

def put(here, **programs):
    for name, text in programs.items():
        (here / name).write_text(text)
        (here / name).chmod(0o755)

def bash(script, args, env):
    os.chdir(trainer.ROOT)
    os.execvpe("bash", ["bash", script, *args], env)

class Job(Run):
    """One start of a job, as SLURM does it, of 2 ranks: a copy of the script runs in the folder of the
    submission."""

    def __init__(self, here, script, *args, torchrun=TORCHRUN, **env):
        put(here, torchrun=torchrun, scontrol=SCONTROL, srun=SRUN, squeue="#!/bin/sh\necho RUNNING\n",
            slurm_script=(TOOLS / script).read_text(), **{"step.py": STEP})
        self.folder, self.log, self.mark, self.world = folder_of(here), here / "log", uuid.uuid4().hex, 2
        self.job, nodes = str(uuid.uuid4().int % 12000 + 20000), 1 + (script == TWO)    # a port, too
        self.log.write_text("")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FEWSTEP_"))} | dict(
            PATH=f"{here}:{os.environ['PATH']}", FEWSTEP_OUTPUT_ROOT=str(here / "out"), OMP_NUM_THREADS="1",
            FEWSTEP_TEST=self.mark, SLURM_JOB_ID=self.job, SLURM_NNODES=str(nodes), SLURM_CPUS_PER_TASK="1",
            SLURM_JOB_NODELIST=f"node[1-{nodes}]", SLURM_GPUS_ON_NODE=str(2 // nodes),
            SLURM_RESTART_COUNT="3", SLURM_JOB_END_TIME=str(int(time.time()) + 3600)) | env
        self.start(bash, here / "slurm_script", args, env)

    def signal(self, signals):
        """[(number, to whom)]: "shell", "steps" (what srun has started), or "all"."""
        for number, whom in signals:
            step.send(number, dict(shell="/slurm_script", steps="SLURM_STEP_ID=", all="")[whom], self.mark)
            time.sleep(0.02)

    def end(self, requeues=0):
        """-> exit code, after a look that nothing is left and SLURM was asked so many times to requeue."""
        code = super().end()
        assert [*step.pids("", self.mark)] == [], self.text()
        assert re.findall("^scontrol .*", self.text(), re.M) == [f"scontrol requeue {self.job}"] * requeues
        return code

# ---- what the shells do, with a stub in torchrun's place
@pytest.mark.parametrize("script, signals", [
    (ONE, [(TERM, "shell")]), (ONE, [(USR1, "all")]), (TWO, [(USR1, "shell")]), slow(TWO, [(TERM, "shell")])])
def test_a_signal_reaches_workers_that_do_not_exist_yet_whose_exit_code_comes_out(tmp_path, script, signals):
    nodes, job = 1 + (script == TWO), Job(tmp_path, script, "my method.py", "--name=a b", torchrun=SLOW)
    until(lambda: job.text().count("train.py") == nodes)
    job.signal(signals)
    assert job.end() == 3
    meet = ["--standalone"] if nodes == 1 else ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                                                f"localhost:{job.job}", "--rdzv-id", job.job]
    words = ["1", *meet, "--nproc_per_node", str(2 // nodes), "--shutdown-timeout", "150", "train.py",
             "my method.py", "--name=a b"]
    found = job.text()                                  # in which the nodes' lines may run together
    assert found.count(str(words)) == found.count("'train.py'") == nodes, found

@pytest.mark.parametrize("script, to", [(ONE, "B:USR1"), (TWO, "USR1")])
def test_what_the_scripts_ask_slurm_for(script, to):
    head, _, rest = (TOOLS / script).read_text().partition("\n\n")      # SLURM reads up to the first command
    assert re.search(rf"^#SBATCH --signal={to}@180$", head, re.M) and "#SBATCH --requeue\n" in head
    assert "--open-mode=append" in head and "--ntasks-per-node=1 " in head      # torchrun starts the ranks
    assert "#SBATCH" not in rest and not re.search("^[^#]", head, re.M)

def test_a_job_that_slurm_is_ending_is_not_requeued(monkeypatch):
    """After scancel, requeue would bring back what was cancelled."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    for state, on, n in (b"RUNNING", "1", 2), (b"", "1", 2), (b"COMPLETING", "1", 1), (b"RUNNING", "0", 0):
        monkeypatch.setenv("FEWSTEP_REQUEUE", on)
        called, slurm = [], resume.Slurm()
        monkeypatch.setattr(subprocess, "run", lambda words, **_: called.append(" ".join(words))
                            or subprocess.CompletedProcess(words, 0, state))
        slurm.init()
        slurm.request_resume()
        assert called == ["squeue -h -o %T -j 77", "scontrol requeue 77"][:n]

def test_a_signal_to_a_worker_that_is_leaving_does_not_make_it_fail():
    """The shell repeats its signal; by then the interpreter may have taken the handlers away."""
    code = ("import resume, ctypes; resume.install(); c = ctypes.CDLL(None); "
            "c.__cxa_atexit(c.pause, None, None); "                     # its last moment, which does not end
            "c.__cxa_atexit(c.close, ctypes.c_void_p(1), None)")        # the one before
    process = subprocess.Popen([sys.executable, "-c", code], cwd=trainer.ROOT, stdout=subprocess.PIPE)
    assert process.stdout.read() == b""
    for number in (USR1, TERM):
        process.send_signal(number)
    time.sleep(0.1)
    process.kill()
    assert process.wait() == -KILL

# ---- real runs
@pytest.mark.parametrize("script, signals, codes", [    # no signal: the end of the time
    (TWO, [(USR1, "shell")], (0, 1)),                   # the shell has srun repeat it; 1: requeue's SIGTERM
    slow(TWO, [(USR1, "steps")] * 2, (0, 1)), slow(TWO, [(USR1, "all")], (0, 1)),
    slow(TWO, [(TERM, "steps")], (1,)), slow(TWO, [], (0, 1)), slow(ONE, [], (0,)),
    slow(ONE, [(USR1, "all")] * 2, (0,)), slow(ONE, [(TERM, "all")], (1,)),
    slow(ONE, [(USR1, "shell"), (USR1, "shell"), (TERM, "shell")], (0,))])
def test_a_signal_leaves_one_checkpoint_and_one_request_to_requeue(shared, script, signals, codes):
    before, end = newest(folder_of(shared)), time.time() + 20
    limit = dict(SLURM_JOB_END_TIME=str(end + 100), FEWSTEP_STOP_BEFORE_END_S="100")
    job = Job(shared, script, *command(), **({} if signals else limit))
    if signals:
        job.reaches(before + 4).signal(signals)
    assert job.end(requeues=1) in codes and (signals or time.time() > end)
    assert stopped_well(job, before) >= before + 4 * bool(signals)
    assert f"SLURM job {job.job}, restart 3" in job.text()

# ---- Kubernetes
def test_the_kubernetes_job_gives_a_save_its_time_and_ends_with_the_run():
    job = yaml.safe_load((TOOLS / "kubernetes.yaml").read_text())["spec"]
    pod = job["template"]["spec"]
    box, = pod["containers"]
    launcher, _, ranks, timeout, program = box["command"]               # no shell in between
    assert launcher == "torchrun" and program == "train.py"
    assert 30 < int(timeout.removeprefix("--shutdown-timeout=")) < pod["terminationGracePeriodSeconds"] - 20
    assert pod["restartPolicy"] == "Never" and "DisruptionTarget" in str(job["podFailurePolicy"])
    assert ranks == f"--nproc_per_node={box['resources']['limits']['nvidia.com/gpu']}"
