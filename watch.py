"""When a run goes wrong, or slow: which module, rank or line it is. Nothing here waits for the device or for
other ranks while all is well and its key is off.

    Anomaly         first module whose output, or the gradient of it, is not finite (--anomaly)
    blame           ranks whose own losses were not finite, when an update is left out
    Watchdog        a rank that makes no progress says where it stands and ends the run (--timeout_s)
    deterministic   (--deterministic)     Profile   trace, table and memory of some iterations (--profile)
    device_values   utilisation and memory of the GPU, for the log line
"""
import contextlib
import math
import os
import sys
import tempfile
import threading
import traceback
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import files
from common import BadInput, everyone

ROOT = Path(__file__).resolve().parent


# ---- numbers that are not finite ---------------------------------------------------------------------------

def unwrapped(x):
    """The plain tensor in what torch.func's transforms pass around, which is dead once they have ended."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def finite(x):
    """Bool scalar on x's device: all of x and, inside a jvp, all of its tangent; outside of any graph."""
    parts = [getattr(p, "_local_tensor", p).detach() for p in forward_ad.unpack_dual(x) if p is not None]
    return unwrapped(torch.stack([p.isfinite().all() for p in parts]).all())


class Anomaly:
    """Looks at every module of `nets` between start() and stop(), around each micro-step; `found` is then
    "student.layers.0.qkv (Linear): its output is not finite", or "" (the loss or a gradient of weights may
    still not be). A bad gradient comes from what uses that output. Made after EMAs and wrappers. Flags stay
    on the device until stop(): one sync per micro-step."""

    def __init__(self, nets):
        self.flags, self.on, self.found = [], False, ""         # flags: [(module, what, bool scalar)]
        for net_name, net in nets.items():
            net.register_forward_pre_hook(
                lambda module, args, kw, name=net_name: self.look(name, "its input", (args, kw)),
                with_kwargs=True)
            for path, module in net.named_modules():
                path = path.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
                kind = type(module).__name__.removeprefix("FSDP")
                name = f"{net_name}.{path} ({kind})" if path else f"{net_name} ({kind})"
                module.register_forward_hook(
                    lambda module, args, out, name=name: self.look(name, "its output", out, backward=True))

    def look(self, name, what, values, backward=False):
        for x in tree_leaves(values) if self.on else ():
            if torch.is_tensor(x) and x.is_floating_point() and x.dtype.itemsize > 1:   # float8 has none
                self.flags.append((name, what, finite(x)))
                x = unwrapped(x)
                if backward and x.requires_grad and not x.is_leaf:      # a hook on a leaf would stay for ever
                    x.register_hook(lambda grad: self.look(name, "the gradient of its output", grad))

    def start(self, first=True):
        self.on, self.found = True, "" if first else self.found

    def stop(self):
        flags, self.flags, self.on = self.flags, [], False
        if flags and not self.found:
            device = max((flag.device for _, _, flag in flags), key=lambda d: d.type != "cpu")
            fine = torch.stack([flag.all().to(device) for _, _, flag in flags]).tolist()
            bad = [f"{name}: {what} is not finite" for (name, what, _), ok in zip(flags, fine) if not ok]
            self.found = bad[0] if bad else ""


def detached(loss, parts):
    """{name: scalar} of one micro-step, kept for blame() without its graph."""
    return {k: v.detach() if torch.is_tensor(v) else v for k, v in (dict(loss=loss) | parts).items()}


def blame(own, gloo, found=""):
    """"rank 3: loss nan dm nan gan_g 1.4; ...", the ranks whose own losses were not finite. own: this rank's,
    a dict per micro-step; found: Anomaly's. Every rank must call it, when all know of a skipped update."""
    means = {k: sum(float(losses.get(k, 0.0)) for losses in own) / len(own) for k in own[0]}
    text = " ".join(f"{k} {v:.4g}" for k, v in means.items())
    ranks = everyone((all(map(math.isfinite, means.values())), text, found), gloo)
    bad = [f"rank {r}: {text}" for r, (ok, text, _) in enumerate(ranks) if not ok]
    seen = [f"rank {r}: {name}" for r, (_, _, name) in enumerate(ranks) if name]
    some = lambda a: "; ".join(a[:4] + [f"{len(a) - 4} more ranks"] * (len(a) > 4))     # noqa: E731
    return (some(bad) or f"all losses are finite, rank 0: {ranks[0][1]}") + (
        f"; first of all {some(seen)}" if seen else "")


# ---- ranks that make no progress ---------------------------------------------------------------------------

FIRST = 2       # a stage's first time may take so many times as long: compilation, reading weights, caches
AGAIN = 75      # exit code of a hung rank, "try again" in sysexits.h
pause = threading.Event().wait      # as time.sleep, which a method or a test may have replaced


def group_timeout(timeout_s):
    """For init_process_group and every new_group: the back-ends give up later than the watchdog, whose line
    says more. gloo raises in the call that waits, NCCL's own watchdog aborts the process."""
    return timedelta(seconds=FIRST * timeout_s + 120) if timeout_s > 0 else timedelta(days=7)


class Watchdog:
    """A thread that says where this rank stands and ends it when mark() was not called for timeout_s. All
    ranks of a hung run get to say it: torchrun, which ends all after the first that leaves, waits 30 s."""

    def __init__(self, timeout_s, rank=0, world=1, files=()):
        self.rank, self.world, self.files = rank, world, [os.path.abspath(f) for f in files]
        self.last, self.seen, self.main = None, set(), threading.get_ident()
        if timeout_s > 0:                               # a weak reference: it ends when the run does, however
            threading.Thread(target=patrol, args=(weakref.ref(self), timeout_s), daemon=True).start()

    def mark(self, it, phase, what):
        """A stage of iteration `it` begins; phase "" outside of iterations."""
        times = 1 if (phase, what) in self.seen else FIRST
        self.seen.add((phase, what))
        self.last = it, phase, what, times

    def stop(self):
        self.last = None

    def where(self):
        """The innermost three lines of the main thread in this repository or the method file, inner first."""
        frames = list(traceback.walk_stack(sys._current_frames()[self.main]))
        files = [os.path.abspath(f.f_code.co_filename) for f, _ in frames]
        spots = [f"{os.path.basename(file)}:{n} {f.f_code.co_name}" for file, (f, n) in zip(files, frames)]
        ours = [i for i, file in enumerate(files) if file in self.files
                or Path(file).is_relative_to(ROOT) and "site-packages" not in file]
        text = "in " + (" < ".join(spots[i] for i in ours[:3]) or "no file of this repository")
        return text + ("" if 0 in ours else f", waiting in {spots[0]}")

    def end(self, seconds, moment):
        """One line, a moment for those of the other ranks, the end; unless the main thread moves again: where
        another rank has left, gloo raises an error there, on which the trainer saves."""
        it, phase, what, _ = last = self.last
        stage = f"phase {phase!r}, {what}" if phase else what
        line = f"rank {self.rank} made no progress for {seconds:.0f} s at it {it} ({stage}): {self.where()}"
        threading.Thread(target=self.speak, args=(line, moment), daemon=True).start()   # which may hang, too
        pause(moment)
        if self.last is last:
            os._exit(AGAIN)

    def speak(self, line, moment):
        os.write(2, f"{line}\n".encode())               # the main thread may be inside print, with its lock
        if self.world > 1 and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            store.set(f"hung/{self.rank}", "")
            pause(moment * 0.7)
            silent = [r for r in range(self.world) if not store.check([f"hung/{r}"])]
            if silent and self.rank == min({*range(self.world)} - {*silent}):
                os.write(2, f"no word from rank {', '.join(map(str, silent))}: stopped or dead\n".encode())


def patrol(watchdog, timeout_s):
    """What the thread does. It counts its own naps, so that a job that was suspended as a whole goes on."""
    nap, idle, seen = min(5.0, timeout_s / 20), 0.0, None
    while dog := watchdog():
        if dog.last is not seen:
            idle, seen = 0.0, dog.last
        elif seen is not None and idle >= timeout_s * seen[3]:
            dog.end(idle, min(30.0, timeout_s / 2))
        dog = None
        pause(nap)
        idle += nap


# ---- determinism, profile, device --------------------------------------------------------------------------

def deterministic(on):
    """Before anything runs on CUDA: cuBLAS reads the variable when it starts. Operations without a
    deterministic kernel raise an error that names them."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = on
    torch.use_deterministic_algorithms(on)


def profile_window(cfg):
    """First and last iteration of --profile; (0, -1) if it is off. Raises BadInput."""
    window = cfg["profile"] or (0, -1)
    if cfg["profile"] and not (len(window) == 2 and all(type(n) is int for n in window)
                               and 0 <= window[0] <= window[1]):
        raise BadInput(f"--profile {window} is not first,last: two iterations, such as 10,14")
    return window


class Profile:
    """torch.profiler around the iterations of --profile: begin() and end() of each, close() at the end of the
    run, in the window or not. Writes to profile/ of the run folder, named by iterations and rank: .json.gz
    (for ui.perfetto.dev), .txt (top operations), on CUDA .pickle (for pytorch.org/memory_viz). Of rank 0, or
    of all with log_level debug."""

    def __init__(self, cfg, folder, rank, device, say):
        self.first, self.last = profile_window(cfg) if rank == 0 or cfg["log_level"] == "debug" else (0, -1)
        self.folder, self.rank, self.cuda, self.say = folder / "profile", rank, device.type == "cuda", say
        self.prof = self.span = None

    def begin(self, it, phase):
        if not self.first <= it <= self.last:
            return
        if self.prof is None:
            if self.cuda:
                torch.cuda.memory._record_memory_history(max_entries=200_000)
            self.prof, self.began = torch.profiler.profile(profile_memory=True), it
            self.prof.start()
        self.it, self.span = it, torch.profiler.record_function(f"it {it} {phase}")
        self.span.__enter__()

    def end(self):
        if self.span is not None:
            self.span = self.span.__exit__(None, None, None)
            if self.it == self.last:
                self.close()

    def close(self):
        if self.prof is None:
            return
        self.last = -1
        self.end()
        name = f"{self.began:07d}-{self.it:07d}.rank{self.rank}"
        try:
            if self.cuda:
                torch.cuda.synchronize()
            self.prof.stop()
            self.put(name + ".json.gz", self.prof.export_chrome_trace)
            table = self.prof.key_averages().table(
                f"self_{'cuda' if self.cuda else 'cpu'}_time_total", row_limit=40) + "\n"
            self.put(name + ".txt", lambda file: Path(file).write_text(table))
            if self.cuda:
                self.put(name + ".pickle", torch.cuda.memory._dump_snapshot)
            self.say(f"profile of it {self.began} to {self.it}: {self.folder / name}.*", "warning")
        except (BadInput, OSError, RuntimeError) as e:  # not worth a run
            self.say(f"WARNING: no profile {name} ({e})", "warning")
        if self.cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
        self.prof = None

    def put(self, name, make):
        """make(path), moved to the run folder, which may be in an object store."""
        with tempfile.TemporaryDirectory() as here:
            make(f"{here}/{name}")
            if isinstance(self.folder, Path):
                self.folder.mkdir(parents=True, exist_ok=True)
            files.write(self.folder / name, lambda f: f.write(Path(here, name).read_bytes()))


def device_values(device):
    """On CUDA {gpu_util: percent of the last moment (at most 1 s) in which a kernel ran, reserved_gb: peak of
    the allocator}, {} elsewhere. gpu_util needs nvidia-ml-py and is left out without it."""
    values = {}
    if device.type == "cuda":
        with contextlib.suppress(Exception):            # not installed, or NVML refuses (MIG, containers)
            values["gpu_util"] = torch.cuda.utilization(device)
        values["reserved_gb"] = torch.cuda.max_memory_reserved(device) / 2 ** 30
    return values
