"""The scripts in tools/ for SLURM and Kubernetes: bash runs them here, SLURM's programs are stubs."""
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import resume
import trainer
from test_preempt import command, folder_of, its, newest, stopped_well, until, whole

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the process table in /proc")

TOOLS = trainer.ROOT / "tools"
KILL, TERM, USR1 = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1
PYTHON = f"#!{sys.executable} -S\n"
STEP = """import contextlib, os
def send(number, pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

def pids(of="SLURM_STEP_ID=", mark=os.environ.get("FEWSTEP_TEST")):
    '''The living processes of a job that have `of` in environment or name; by default those of its step,
    which srun has started.'''
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
        with contextlib.suppress(OSError):
            text = [open(f"/proc/{pid}/{file}", errors="replace").read() for file in ("environ", "cmdline")]
            if f"FEWSTEP_TEST={mark}" in text[0] and of in str(text):
                yield int(pid)
"""
step = ModuleType("step")
exec(STEP, vars(step))
STUBS = {
    "step.py": STEP,
    # requeue takes its time, then ends the job: a SIGTERM to the steps and to the shell of the batch script
    "scontrol": PYTHON + """import os, sys, time, step
if sys.argv[1] == "show":
    sys.exit(print("localhost"))
time.sleep(1.2 if "SLURM_STEP_ID" in os.environ else 0)
with open(os.environ["STUBS"] + "/calls", "a") as f:
    print(*sys.argv[1:], file=f)
step.send(15, {*step.pids(), *step.pids("/slurm_script")})
""",
    "squeue": '#!/bin/sh\necho "$@" > $STUBS/asked\ncat $STUBS/state\n',
    "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
    # passes USR1 on to the step, kills it after a TERM, returns the highest exit code
    "srun": PYTHON + """import os, signal, subprocess, sys, step
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[0]
signal.signal(signal.SIGUSR1, lambda *_: step.send(signal.SIGUSR1, step.pids()))
signal.signal(signal.SIGTERM, lambda *_: step.send(signal.SIGKILL, step.pids()))
tasks = [subprocess.Popen(words, env=os.environ | dict(SLURM_STEP_ID="0", SLURM_NODEID=str(n)))
         for n in range(int(os.environ["SLURM_NNODES"]))]
sys.exit(max(t.wait() for t in tasks))
"""}
# A torchrun that takes its time: no worker at first, then one that is deaf, then one that leaves when told
SLOW = PYTHON + """import os, signal, subprocess, sys, time
with open(os.environ["STUBS"] + "/words", "a") as f:
    f.write(repr(sys.argv[1:]) + "\\n")
if sys.argv[-1] == "--fail":
    sys.exit(3)
time.sleep(0.3)
sys.exit(subprocess.call([sys.executable, "-S", "-c", '''import os, signal, time
time.sleep(0.3)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
time.sleep(60)
os._exit(9)''']))
"""
jobs = []

@pytest.fixture(autouse=True)
def nothing_left():
    """A test that fails leaves processes; they end here."""
    yield
    for job in jobs:
        step.send(KILL, job.pids())
    jobs.clear()

def free_port():
    """Which a script chooses for the job of that number, as it is between 20000 and 40000."""
    for port in range(20000 + os.getpid() % 10000, 40000):
        with socket.socket() as s:
            if s.connect_ex(("localhost", port)):
                return port

def put(here, files):
    """Programs, and what they read."""
    for name, text in files.items():
        (here / name).write_text(text)
        (here / name).chmod(0o755)

class Job:
    """One start of a job, as SLURM does it: a copy of the script, in the folder of the submission, its output
    appended to the job's log. state: what squeue says of the job."""

    def __init__(self, here, script, *args, nodes=1, gpus=1, state="RUNNING", torchrun=None, **env):
        here.mkdir(exist_ok=True)
        put(here, STUBS | dict(torchrun=torchrun or STUBS["torchrun"], state=state, calls=""))
        self.here, self.folder, self.log = here, folder_of(here), here / "log"
        self.mark, self.world = uuid.uuid4().hex, nodes * gpus
        (here / "slurm_script").write_bytes((TOOLS / script).read_bytes())
        self.log.touch()
        self.seen = self.log.stat().st_size
        self.job = str(free_port())
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FEWSTEP_"))} | dict(
            PATH=f"{here}:{os.environ['PATH']}", STUBS=str(here), FEWSTEP_OUTPUT_ROOT=str(here / "out"),
            OMP_NUM_THREADS="1", FEWSTEP_TEST=self.mark, SLURM_JOB_ID=self.job, SLURM_NNODES=str(nodes),
            SLURM_JOB_NODELIST=f"node[1-{nodes}]", SLURM_GPUS_ON_NODE=str(gpus), SLURM_CPUS_PER_TASK="1",
            SLURM_RESTART_COUNT="3", SLURM_JOB_END_TIME=str(int(time.time()) + 3600)) | env
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(["bash", here / "slurm_script", *args], cwd=trainer.ROOT, env=env,
                                            stdout=log, stderr=log)
        jobs.append(self)

    def text(self):
        """What this start has added to the log."""
        return self.log.read_bytes()[self.seen:].decode()

    def pids(self, of=""):
        return list(step.pids(of, self.mark))

    def reaches(self, it):
        until(lambda: it in its(self.folder) or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()
        return self

    def signal(self, number, where):
        """where: "shell", "steps" (what srun has started), or "all"."""
        step.send(number, [self.process.pid] if where == "shell" else
             self.pids("SLURM_STEP_ID=" if where == "steps" else ""))

    def end(self, requeues=0):
        """-> exit code, after a look that nothing is left and SLURM was asked so many times to requeue."""
        code = self.process.wait(180)
        assert self.pids() == [], self.text()
        assert (self.here / "calls").read_text() == f"requeue {self.job}\n" * requeues, self.text()
        return code

# ---- what the shell does, with a stub in torchrun's place
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)                             # noqa: E731
BOTH = pytest.mark.parametrize("script, nodes", [("slurm.sbatch", 1), ("slurm_nodes.sbatch", 2)])

def words(job):
    """torchrun's arguments, one list per node."""
    file = job.here / "words"
    return [eval(line) for line in file.read_text().splitlines()] if file.exists() else []

@pytest.mark.parametrize("script, nodes, number", [
    ("slurm.sbatch", 1, TERM), slow("slurm.sbatch", 1, USR1),
    slow("slurm_nodes.sbatch", 2, TERM), slow("slurm_nodes.sbatch", 2, USR1)])
def test_a_signal_to_the_shell_reaches_workers_that_do_not_exist_yet(tmp_path, script, nodes, number):
    job = Job(tmp_path, script, nodes=nodes, torchrun=SLOW)
    until(lambda: len(words(job)) == nodes)
    job.signal(number, "shell")
    assert job.end() == 0

@BOTH
def test_arguments_go_in_and_the_exit_code_comes_out_unchanged(tmp_path, script, nodes):
    job = Job(tmp_path, script, "my method.py", "--name=a b", "--fail", nodes=nodes, gpus=4, torchrun=SLOW)
    assert job.end() == 3
    meet = ["--standalone"] if nodes == 1 else ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                                                f"localhost:{job.job}", "--rdzv-id", job.job]
    assert words(job) == [[*meet, "--nproc_per_node", "4", "--shutdown-timeout", "150", "train.py",
                           "my method.py", "--name=a b", "--fail"]] * nodes

def test_a_job_that_slurm_is_ending_is_not_requeued(tmp_path, monkeypatch):
    """After scancel, requeue would bring back what was cancelled."""
    for key, value in dict(STUBS=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID=77).items():
        monkeypatch.setenv(key, str(value))
    calls = tmp_path / "calls"
    for state, requeue, called in (("RUNNING", "1", "requeue 77\n"), ("", "1", "requeue 77\n"),
                                   ("COMPLETING", "1", ""), ("RUNNING", "0", "")):
        put(tmp_path, STUBS | dict(state=state, calls=""))
        monkeypatch.setenv("FEWSTEP_REQUEUE", requeue)
        slurm, handlers = resume.Slurm(), [(n, signal.getsignal(n)) for n in (USR1, TERM)]
        slurm.init()
        slurm.request_resume()
        for number, handler in handlers:
            signal.signal(number, handler)
        assert calls.read_text() == called
    assert (tmp_path / "asked").read_text() == "-h -o %T -j 77\n"

def test_a_signal_to_a_worker_that_is_leaving_does_not_make_it_fail(tmp_path):
    """The shell repeats its signal; by then the interpreter may have taken the handlers away."""
    code = ("import resume, ctypes; resume.install(); c = ctypes.CDLL(None); "
            "c.__cxa_atexit(c.pause, None, None); "                     # its last moment, which does not end
            "c.__cxa_atexit(c.close, ctypes.c_void_p(1), None)")        # the one before
    process = subprocess.Popen([sys.executable, "-c", code], cwd=trainer.ROOT, stdout=subprocess.PIPE)
    assert process.stdout.read() == b""
    process.send_signal(USR1)
    process.send_signal(TERM)
    time.sleep(0.1)
    process.kill()
    assert process.wait() == -KILL

@pytest.mark.parametrize("script, warned", [("slurm.sbatch", "B:USR1"), ("slurm_nodes.sbatch", "USR1")])
def test_what_the_scripts_ask_slurm_for(script, warned):
    head = (TOOLS / script).read_text().partition("\ntrap")[0]
    asked = [word for line in re.findall(r"^#SBATCH (.*)", head, re.M) for word in shlex.split(line)]
    options = dict(word.lstrip("-").partition("=")[::2] for word in asked)
    assert options["signal"].partition("@")[0] == warned and int(options["signal"].partition("@")[2]) > 150
    assert options["open-mode"] == "append" and "%j" in options["output"] and "requeue" in options
    assert options["ntasks-per-node"] == "1"            # torchrun starts the ranks of a node
    commands = head.splitlines()
    first = next(n for n, line in enumerate(commands) if line and line[0] != "#")
    assert not [line for line in commands[first:] if line.startswith("#SBATCH")]   # SLURM stops reading there

# ---- real runs
@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The folder in which the cases follow each other: the next one is the rerun of the last."""
    return tmp_path_factory.mktemp("shared")

@pytest.mark.parametrize("script, ranks, signals, where, state, code", [
    ("slurm.sbatch", 1, [USR1, USR1], "all", "RUNNING", 0),
    slow("slurm.sbatch", 2, [USR1], "all", "RUNNING", 0),
    slow("slurm.sbatch", 2, [USR1, USR1, TERM], "shell", "RUNNING", 0),
    slow("slurm.sbatch", 2, [TERM], "shell", "COMPLETING", 0),
    slow("slurm.sbatch", 2, [TERM], "all", "RUNNING", 1),       # torchrun's
    ("slurm_nodes.sbatch", 2, [USR1], "shell", "RUNNING", None),    # the shell has srun repeat it
    slow("slurm_nodes.sbatch", 2, [USR1, USR1], "steps", "RUNNING", None),
    slow("slurm_nodes.sbatch", 2, [USR1], "all", "RUNNING", None),
    slow("slurm_nodes.sbatch", 2, [USR1], "steps", "COMPLETING", 0),
    slow("slurm_nodes.sbatch", 2, [TERM], "steps", "RUNNING", 1),
])
def test_a_signal_leaves_one_whole_checkpoint_and_one_request_to_requeue(
        shared, script, ranks, signals, where, state, code):
    before, shape = newest(folder_of(shared)), dict(gpus=ranks)
    if "nodes" in script:
        shape = dict(nodes=ranks)
    job = Job(shared, script, *command(), state=state, **shape).reaches(before + 4)
    for number in signals:
        job.signal(number, where)
        time.sleep(0.02)
    ended = job.end(requeues=int(state == "RUNNING"))
    assert ended == code or code is None and ended in (0, 1)    # 1: torchrun got the SIGTERM of requeue
    assert stopped_well(job, before) >= before + 4
    assert f"SLURM job {job.job}, restart 3" in job.text()

@pytest.mark.parametrize("script", ["slurm.sbatch", slow("slurm_nodes.sbatch")])
def test_a_finished_run_is_not_requeued_nor_does_it_go_on(shared, script):
    done = newest(folder_of(shared)) + 3
    for says in ("done: ", "nothing to do: ") if "nodes" in script else ("done: ",):
        job = Job(shared, script, *command(f"--max_iter={done}"), nodes=1 + ("nodes" in script))
        assert job.end() == 0 and says in job.text()
    assert whole(job.folder)[-1] == done and its(job.folder) == list(range(1, done + 1))
    log = job.log.read_text()                           # one for all starts
    assert log.count("asked to stop") and log.count("restart 3") > 1

@pytest.mark.slow
@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_nodes.sbatch"])
def test_a_run_that_fails_is_not_requeued(tmp_path, script):
    method = tmp_path / "fails.py"
    method.write_text((trainer.ROOT / "methods/sft.py").read_text().replace(
        "def step(nets, batch, it, cfg):", "def step(nets, batch, it, cfg):\n    assert it < 5, 'broken'"))
    for args, says in (([str(method), *command()[1:]], "broken"),
                       (command("--lr=much"), "'much' does not fit")):
        shape = dict(nodes=2) if "nodes" in script else dict(gpus=2)
        job = Job(tmp_path, script, *args, **shape)
        assert job.end() == 1 and says in job.text()

@pytest.mark.slow
@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_nodes.sbatch"])
def test_the_end_of_the_time_stops_without_a_signal_and_with_one_requeues_once(tmp_path, script):
    for warned in (False, True):
        before, end = newest(folder_of(tmp_path)), int(time.time()) + 120
        job = Job(tmp_path, script, *command(), nodes=1 + ("nodes" in script), SLURM_JOB_END_TIME=str(end),
                  FEWSTEP_STOP_BEFORE_END_S="100")
        if warned:
            job.reaches(before + 4)
            time.sleep(max(0, end - 100 - time.time()))
            job.signal(USR1, "shell")
        assert job.end(requeues=1) in (0, "nodes" in script) and time.time() > end - 100
        assert stopped_well(job, before) >= before

# ---- Kubernetes
def manifest():
    job = yaml.safe_load((TOOLS / "kubernetes.yaml").read_text())
    return job["spec"], job["spec"]["template"]["spec"]

def test_the_kubernetes_job_gives_a_save_its_time_and_ends_with_the_run():
    spec, pod = manifest()
    box, = pod["containers"]
    timeout = int(re.search(r"--shutdown-timeout=(\d+)", " ".join(box["command"]))[1])
    assert 30 < timeout < pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Never" and 0 < spec["backoffLimit"] < 10
    assert spec["podFailurePolicy"]["rules"] == [
        dict(action="Ignore", onPodConditions=[dict(type="DisruptionTarget")])]
    assert box["command"][0] == "torchrun" and box["command"][-1] == "train.py"       # no shell in between
    ranks = int(re.search(r"--nproc_per_node=(\d+)", " ".join(box["command"]))[1])
    assert box["resources"]["limits"]["nvidia.com/gpu"] == ranks
    mounts = {m["mountPath"]: m["name"] for m in box["volumeMounts"]}
    claims = {v["name"]: v for v in pod["volumes"]}
    root, = [e["value"] for e in box["env"] if e["name"] == "FEWSTEP_OUTPUT_ROOT"]
    assert "persistentVolumeClaim" in claims[mounts[root]] and "emptyDir" in claims[mounts["/dev/shm"]]

@pytest.mark.slow
def test_the_kubernetes_command_as_process_1_saves_at_sigterm_and_goes_on(tmp_path):
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no process number 1 to be had: unshare --pid is not allowed")
    _, pod = manifest()
    launch = [word.replace("_node=8", "_node=2") for word in pod["containers"][0]["command"]]
    launch = [sys.executable, "-m", "torch.distributed.run", *launch[1:]]
    def start(*args):
        """The container's runtime: a shell that waits for process 1."""
        put(tmp_path, dict(pod=shlex.join([*apart, *launch, *command(*args)])))
        return Job(tmp_path, tmp_path / "pod", gpus=2)
    job = start().reaches(4)
    first, = [pid for pid in job.pids() if inside(pid) == ["1"]]
    os.kill(first, TERM)
    assert job.process.wait(180) == 1                   # as after an error
    at = stopped_well(job, 0)
    job = start(f"--max_iter={at + 2}")
    assert job.process.wait(180) == 0 and whole(job.folder) == [at, at + 2] and job.pids() == []

def inside(pid):
    """Number of a process in its own name space, if that is not this one."""
    return re.findall(r"^NSpid:\s+\d+\s+(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
