"""Preemption: a signal sets a flag, the ranks agree on it once an iteration, the trainer saves and exits 0.

    install()    handlers for SIGUSR1, SIGTERM, SIGINT and SIGHUP (a closed terminal), in the first lines of
                 train.py, before torch is imported (that takes seconds; the default action is death)
    requested()  was this process told to stop: by a signal, by its launcher's death, or by the scheduler
    agreed()     was any rank told to stop: one small MAX all-reduce on the CPU, no device sync

A scheduler is a class with the four functions of `NoScheduler`. Nothing here imports torch on import.
"""
import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import time

received = []        # signal numbers, appended by the handler; nothing else happens inside it
parent = None        # process id of the launcher, as it was at install()


def install():
    """Set the handlers. A second Ctrl-C kills at once; a second of the others changes nothing, not even while
    the interpreter ends, which takes the handlers away first."""
    global parent

    def note(number, frame):
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:   # nohup means it
            signal.signal(number, note)
    atexit.register(lambda: [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGUSR1, signal.SIGTERM)])
    parent = os.getppid()


def orphaned():
    """True once the launcher that started this worker is dead (only torchrun's workers have one)."""
    return parent is not None and "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent


@contextlib.contextmanager
def orphans_leave():
    """Around what needs the launcher's store (a process group comes or goes): a worker whose launcher is dead
    ends here with 0, it could neither join nor leave the others."""
    try:
        if orphaned():
            os._exit(0)
        yield
    except RuntimeError:                                # the store went away in between
        if orphaned():
            os._exit(0)
        raise


def requested():
    return bool(received) or orphaned() or scheduler.termination_requested()


def agreed(group, *flags):
    """[is it true on any rank?] of each flag, alike on every rank. `group`: a gloo group, or None for one
    process."""
    if group is None:
        return [bool(flag) for flag in flags]
    import torch
    import torch.distributed as dist
    any_rank = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(any_rank, dist.ReduceOp.MAX, group=group)
    return [flag > 0 for flag in any_rank.tolist()]


class NoScheduler:
    """No cluster: nothing to ask and nobody to tell."""

    def init(self):
        """Called once, at import."""

    def resume_details(self):
        """One line for the start of the log, "" if there is nothing to say."""
        return ""

    def termination_requested(self):
        """True when the allocation is about to end; called every iteration, so it must be cheap."""
        return False

    def request_resume(self):
        """Ask for the job to be started again; called by rank 0 after the checkpoint is written."""


class Slurm(NoScheduler):
    """SLURM, from its environment variables. FEWSTEP_REQUEUE=1 lets rank 0 call `scontrol requeue` after a
    preemption (tools/slurm.sbatch sets it; leave it unset where a batch script requeues by itself);
    FEWSTEP_STOP_BEFORE_END_S=N stops N seconds before SLURM_JOB_END_TIME."""

    def init(self):
        self.job = os.environ["SLURM_JOB_ID"]
        margin, end = map(seconds, ("FEWSTEP_STOP_BEFORE_END_S", "SLURM_JOB_END_TIME"))
        self.stop_time = end - margin if margin and end else float("inf")

    def resume_details(self):
        return f"SLURM job {self.job}, restart {os.environ.get('SLURM_RESTART_COUNT', 0)}"

    def termination_requested(self):
        return time.time() > self.stop_time

    def request_resume(self):
        if os.environ.get("FEWSTEP_REQUEUE") != "1":
            return
        for number in (signal.SIGUSR1, signal.SIGTERM):     # heard already; SLURM may send more, to every
            signal.signal(number, signal.SIG_IGN)           # process: scontrol must survive them
        with contextlib.suppress(OSError):                  # requeue would bring back what scancel has ended
            if b"COMPLETING" in subprocess.run(["squeue", "-h", "-o", "%T", "-j", self.job],
                                               stdout=subprocess.PIPE).stdout:
                return
        try:
            subprocess.run(["scontrol", "requeue", self.job], check=False)
        except OSError as e:
            print(f"WARNING: scontrol cannot be run ({e.strerror}), so FEWSTEP_REQUEUE=1 does nothing; "
                  f"start job {self.job} again yourself", flush=True)


def seconds(key):
    """The number in an environment variable, 0 if absent. Without BadInput: torch is not imported yet."""
    text = os.environ.get(key) or "0"
    if not re.fullmatch(r"\d+(\.\d*)?", text):
        if os.environ.get("RANK", "0") == "0":
            print(f"{key}={text} is not a number of seconds, such as 120", file=sys.stderr)
        sys.exit(2)
    return float(text)


scheduler = Slurm() if "SLURM_JOB_ID" in os.environ else NoScheduler()
scheduler.init()
