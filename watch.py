"""When a run goes wrong, or slow: which module, rank or line it is. While all is well nothing here waits."""
import os
import sys
import threading
import traceback
import weakref

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import files
from common import BadInput, everyone


class Anomaly:
    """Looks at every module of `nets` (EMAs and shards are made) in each micro-step, from start() to stop(),
    the only sync. `found` is then "student.layers.0.qkv (Linear): its output is not finite", or "" (the loss
    or a gradient of weights may still not be). A bad gradient comes from what uses that output."""

    def __init__(self, nets):
        self.flags, self.on, self.found = [], False, ""         # flags: [(what, bools)]
        for root, net in nets.items():
            for path, module in net.named_modules():
                name = f"{root}.{path}".rstrip(".") + f" ({type(module).__name__.removeprefix('FSDP')})"
                module.register_forward_hook(lambda module, given, out, name=name: self.look(
                    f"{name}: its output", out, f"{name}: the gradient of its output"))

    def look(self, what, values, backward=""):
        for x in tree_leaves(values) if self.on else ():
            if torch.is_tensor(x) and x.is_floating_point():
                parts = [p.detach() for p in forward_ad.unpack_dual(x) if p is not None]    # jvp: tangent
                self.flags.append((what, plain(torch.stack([p.isfinite().all() for p in parts])).all()))
                x = plain(x)
                if backward and x.requires_grad and not x.is_leaf:      # a hook on a leaf would stay for ever
                    x.register_hook(lambda grad: self.look(backward, grad))

    def start(self, first=True):
        self.on, self.found = True, "" if first else self.found

    def stop(self):
        flags, self.flags, self.on = self.flags, [], False
        if flags and not self.found:
            fine = torch.stack([flag.to(flags[0][1].device) for _, flag in flags]).tolist()
            self.found = next((f"{what} is not finite" for (what, _), ok in zip(flags, fine) if not ok), "")


def plain(x):
    """The tensor in what torch.func's transforms pass around, which is dead once they have ended."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def blame(own, gloo, found=""):
    """"rank 3: loss nan dm 1.4 (first WHAT ANOMALY FOUND); ...", the ranks where something was not finite, of
    an update that is left out. own: this rank's losses, a dict per micro-step. Every rank must call it."""
    means = {k: sum(float(losses.get(k, 0.0)) for losses in own) / len(own) for k in own[0]}
    text = " ".join(f"{k} {v:.4g}" for k, v in means.items()) + f" (first {found})" * bool(found)
    ranks = everyone((text, not found and all(abs(v) < float("inf") for v in means.values())), gloo)
    bad = [f"rank {r}: {text}" for r, (text, fine) in enumerate(ranks) if not fine]
    bad[4:] = [f"{len(bad) - 4} more ranks"] * (len(bad) > 4)
    return "; ".join(bad) or f"all losses are finite, rank 0: {ranks[0][0]}"


def count_calls(nets):
    """A list that grows by a net's name whenever one is called."""
    calls = []
    for name, net in nets.items():
        net.register_forward_pre_hook(lambda module, args, name=name: calls.append(name))
    return calls


def compare_calls(calls, it, gloo):
    """BadInput on every rank if one has called nets in another order; empties the list."""
    ranks = everyone(list(calls), gloo)
    calls.clear()
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            raise BadInput(f"at it {it} rank {rank} calls nets in another order than rank 0: {other} against "
                           f"{ranks[0]}; draw what decides it from common.shared_generator(seed, it)")


class Watchdog:
    """A thread that says where this rank stands and ends it when mark() was not called for timeout_s. All
    ranks of a hung run get to say it: torchrun, which ends all after the first that leaves, waits 30 s."""

    def __init__(self, timeout_s, rank=0):
        self.rank, self.last, self.main = rank, None, threading.get_ident()
        if timeout_s > 0:                               # a weak reference: it ends when the run does, however
            threading.Thread(target=patrol, args=(weakref.ref(self), timeout_s), daemon=True).start()

    def mark(self, it, phase, what):
        """A stage of iteration `it` begins; phase "" outside of iterations."""
        self.last = it, f"phase {phase!r}, {what}" if phase else what

    def stop(self):
        self.last = None

    def end(self, seconds, moment):
        """Speak, give the others a moment to, leave; unless the main thread moves, as where gloo raises."""
        it, stage = last = self.last
        frames = [(f.f_code, n) for f, n in traceback.walk_stack(sys._current_frames()[self.main])]
        ours = [f"{os.path.basename(code.co_filename)}:{n} {code.co_name}" for code, n in frames
                if "/lib/python" not in code.co_filename]               # the innermost lines, of no package
        line = f"rank {self.rank} made no progress for {seconds:.0f} s at it {it} ({stage}): in "
        os.write(2, f"{line}{' < '.join(ours[:3])}\n".encode())         # print's lock may be taken
        threading.Event().wait(moment)
        if self.last is last:
            os._exit(75)                                # EX_TEMPFAIL


def patrol(watchdog, timeout_s):
    """What the thread does. It counts its own naps, so that a job that was suspended as a whole goes on."""
    nap, idle, seen = min(5.0, timeout_s / 20), 0.0, None
    while dog := watchdog():
        idle, seen = idle + nap if dog.last is seen else 0.0, dog.last
        if seen and idle >= timeout_s:
            dog.end(idle, min(30.0, timeout_s / 2))
        del dog
        threading.Event().wait(nap)     # time.sleep may be somebody else's


class Profile:
    """torch.profiler around the iterations of --profile: a trace (.json, for ui.perfetto.dev), a table (.txt)
    and on CUDA memory (.pickle, for pytorch.org/memory_viz) in profile/ of the run folder, named by
    iterations and rank; of rank 0, or with log_level debug of all."""

    def __init__(self, cfg, folder, rank, device, say):
        self.first, self.last = cfg["profile"] or (0, -1)
        if rank and cfg["log_level"] != "debug":
            self.last = -1
        self.folder, self.rank, self.kind, self.say = folder / "profile", rank, device.type, say
        self.prof = None

    def begin(self, it, phase):
        if self.first <= it <= self.last:
            if self.prof is None:
                self.first, self.prof = it, torch.profiler.profile(profile_memory=True).__enter__()
                if self.kind == "cuda":
                    torch.cuda.memory._record_memory_history(max_entries=200_000)
            self.it, self.span = it, torch.profiler.record_function(f"it {it} {phase}").__enter__()

    def end(self):
        if self.prof is not None:
            self.span.__exit__(None, None, None)
            if self.it == self.last:
                self.close()

    def close(self):
        """Write what was recorded, if anything was and is not written yet."""
        if self.prof is None:
            return
        prof, self.prof = self.prof, None
        file = self.folder / f"{self.first:07d}-{self.it:07d}.rank{self.rank}.json"
        try:
            prof.stop()
            by = f"self_{'cuda' if self.kind == 'cuda' else 'cpu'}_time_total"
            table = prof.key_averages().table(by, row_limit=40).encode()
            files.write(file, lambda f: prof.export_chrome_trace(f.name))
            files.write(file.with_suffix(".txt"), lambda f: f.write(table))
            if self.kind == "cuda":
                files.write(file.with_suffix(".pickle"), lambda f: torch.cuda.memory._dump_snapshot(f.name))
                torch.cuda.memory._record_memory_history(enabled=None)
            self.say.warn(f"profile of it {self.first} to {self.it}: {file}")
        except (BadInput, OSError, RuntimeError) as e:          # not worth a run
            self.say.warn(f"WARNING: no profile {file} ({e})")
