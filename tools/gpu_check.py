"""Does it work on this GPU, and how fast? One table, a row per case, at most four minutes on one device.

    python tools/gpu_check.py [--minutes 4] [--only WORD]     needs CUDA; without it, lists the cases
    python tools/gpu_check.py --quick                         rehearses them on the CPU with tiny nets

trainer.train itself runs DMD2 from random weights on random images, fake and student phase in turns. ms:
median of an iteration of either; GB: peak of torch's allocator; MFU: FLOPs of the calls of nets that the
phase makes (tools/bench.py) over time and the device's dense peak, of TF32 in fp32; syncs: calls in
one iteration that make the host wait (on a CPU from the end of step on). A failed case leaves its error, its
traceback on stderr and exit code 1. What matters most comes first; what there is no time for is skipped.
"""
import argparse
import contextlib
import gc
import io
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import bench, ckpt, common, shard, train, trainer  # noqa: E401, E402

PEAK = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312}   # bf16, fp16; TF32: half
BASE = dict(update_ratio=1, max_iter=1000, warmup=0, save_every=0, val_every=0, sample_every=0, log_every=0,
            timeout_s=0, wandb="disabled", log_level="warning", group="check")
COLUMNS = dict(ms=(".1f", 19, "ms fake / student"), gb=(".2f", 7, "GB"), mfu=(".0f", 9, "MFU %"),
               syncs=("d", 7, "syncs"))


class Late(BaseException):
    """A case's time is over. No Exception: the trainer saves on those, torch.compile rewrites them."""


class Timed:
    """A method as the trainer sees it, with a clock in the calls that it gets; ends after `total` iterations.
    Puts the FLOPs of each phase into `flops`, if that is a dict."""

    def __init__(self, method, at, total, flops, look=None):
        vars(self).update({k: v for k, v in vars(method).items() if k not in ("phase", "step")})
        self.method, self.at, self.total, self.flops, self.look = method, at, total, flops, look
        self.done, self.open, self.marks, self.turns, self.losses, self.syncs = -1, None, {}, {}, {}, {}
        self.calls = None

    def phase(self, it, cfg):
        """The trainer's first call in an iteration, so also the end of the one before."""
        if it == self.done + 1 and it not in self.marks and torch.is_grad_enabled():    # validation has none
            self.marks[it], before = time.perf_counter(), self.turns.get(self.done)
            if self.open:
                self.open = self.open.close()
                waits = (w for w in self.seen if "called a sync" in str(w.message)) if self.at.cuda else ()
                self.syncs[before] = ([f"{Path(w.filename).name}:{w.lineno}" for w in waits] if self.at.cuda
                                      else self.seen.n * [""])
            if before and self.flops is not None and before not in self.flops:
                self.flops[before] = self.count()
            if it == self.total:
                raise bench.Enough
            self.watch(it, self.at.cuda)
        return self.method.phase(it, cfg)

    def step(self, nets, batch, it, cfg):
        if self.look:
            self.look(nets, batch)
        if self.flops is not None:
            self.calls = self.calls or bench.Calls(nets)
            self.calls.take()
        loss, parts = self.method.step(nets, batch, it, cfg)
        if torch.is_grad_enabled():
            self.done, self.nets, self.batch, self.losses[it] = it, nets, batch, loss.detach()
            self.turns[it] = self.method.phase(it, cfg)
            self.watch(it, not self.at.cuda and not cfg["compile"])     # a mode would compile everything anew
        return loss, parts

    def watch(self, it, here):
        """What waits until the next phase(), in the last two iterations of the warm-up."""
        if here and self.at.warm - 2 <= it < self.at.warm:
            self.open = contextlib.ExitStack()
            record = warnings.catch_warnings(record=True) if self.at.cuda else bench.Syncs()
            self.seen = self.open.enter_context(record)
            if self.at.cuda:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                self.open.callback(torch.cuda.set_sync_debug_mode, "default")

    def count(self):
        """FLOPs of the last iteration's calls, made again."""
        with FlopCounterMode(display=False) as counter:
            for calls in self.calls.take().values():
                for call in calls:
                    call()
        for p in (p for net in self.nets.values() for p in net.parameters()):
            p.grad = None
        return counter.get_total_flops()


def loop(at, name, total, random=True, look=None, **changes):
    """(Timed, config, run folder) of a run of DMD2; not `random`: from its teacher. look(nets, batch) comes
    before each step."""
    method = train.load_method(ROOT / "methods" / "dmd2.py")
    if random:
        method.init = lambda cfg: {}
    timed = Timed(method, at, total, at.flops if random and changes.keys() <= {"amp"} else None, look)
    cfg = train.resolve(method, [])[0] | BASE | at.cfg | changes | dict(name=name.replace(" ", "_"))
    try:
        trainer.train(timed, cfg)
    except bench.Enough:
        pass
    finally:
        timed.open and timed.open.close()
    return timed, cfg, Path(os.environ["FEWSTEP_OUTPUT_ROOT"], cfg["project"], cfg["group"], cfg["name"])


def clean():
    """Nets, the folder's lock and the process group hang in the frames that a run ended in."""
    gc.collect()
    torch.use_deterministic_algorithms(False)
    if dist.is_initialized():
        dist.destroy_process_group()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# ---- the cases: (cells of the table, verdict) --------------------------------------------------------------

def speed(at, name, **changes):
    """A run; its first loss must be that of the first case with its net and weights, to 3 %."""
    compilers = ["gcc", "cc", "clang"] if at.cuda else [os.environ.get("CXX", "g++")]
    if changes.get("compile") and not any(map(shutil.which, compilers)):
        return {}, f"skipped: torch.compile needs {' or '.join(compilers)}"
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    timed, cfg, folder = loop(at, name, -1 if "stop_at" in changes else at.total, **changes)
    marks, spent = timed.marks, {p: [] for p in sorted({*timed.turns.values()})}
    for it in range(at.warm, max(marks)):
        spent[timed.turns[it]].append((marks[it + 1] - marks[it]) * 1e3)
    losses, first = {timed.turns[it]: x.item() for it, x in timed.losses.items()}, timed.losses[0].item()
    off = abs(first / at.first.setdefault((cfg["net"], "random" in changes), first) - 1)
    assert np.isfinite([*losses.values()]).all() and off < 0.03, f"loss {losses}, the first off by {off:.2g}"
    cells = dict(ms=[median(ms or [np.nan]) for ms in spent.values()],
                 syncs=[len(timed.syncs[p]) for p in spent if p in timed.syncs])
    peak = next((tflops * (1e12 if cfg["amp"] else 5e11) for n, tflops in PEAK.items() if n in at.name), None)
    if peak and at.flops.keys() >= spent.keys() and "net" not in changes:
        cells["mfu"] = [100 * at.flops[p] / (ms / 1e3 * peak) for p, ms in zip(spent, cells["ms"])]
    text = ", ".join(f"loss of {p} {losses[p]:.4g}" for p in spent) + f", first off by {off:.0e}"
    if cfg["compile"]:
        assert not counters["unimplemented"], f"in part not compiled: {[*counters['unimplemented']][0]}"
        text += f", {counters['stats']['unique_graphs']} graphs"
    if cfg["stop_at"]:
        done, state = ckpt.newest(folder / "checkpoints", print)
        assert state and done == cfg["stop_at"], f"newest checkpoint {done}"
        assert not cfg["sample_every"] or (folder / f"samples/{done:07d}.png").exists(), "no sample grid"
        text += f", checkpoint {done}, slowest iteration {max(map(max, spent.values())):.0f} ms"
    extra = sorted({where for found in timed.syncs.values() if len(found) > 1 for where in found if where})
    return cells, text + (f", waits in {' '.join(extra[:8])}" if extra else "")


def resume(at, name, **changes):
    """Six iterations on end against three and three: the same weights and loss, bit for bit."""
    runs = []
    for part, stop in ("straight", 0), ("half", 3), ("half", 0):
        timed = loop(at, f"{name} {part}", 6, deterministic=True, stop_at=stop, **changes)[0]
        runs.append({f"{n}.{k}": shard.local(p).clone() for n, net in timed.nets.items()
                     for k, p in net.state_dict().items()} | dict(loss=timed.losses[max(timed.losses)]))
        timed = None
        clean()
    moved, apart = ([k for k in runs[0] if not torch.equal(runs[0][k], other[k])] for other in runs[1:])
    assert moved and not apart, f"{len(apart)} of {len(runs[0])} tensors differ, as {apart[-1:]}"
    return {}, f"{len(runs[0])} tensors bit for bit"


def derivative(f, point, tangent, h=1e-2):
    """torch.func.jvp's relative distance from the central difference."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        ours = torch.func.jvp(f, point, tangent)[1]
        up, down = (f(*(p + s * h * v for p, v in zip(point, tangent))) for s in (1, -1))
        error = (((up - down) / (2 * h) - ours).norm() / ours.norm()).item()
    assert error < 1e-2, f"jvp and central difference differ by {error:.1e}"
    return f"off the central difference by {error:.0e}"


def jvp(at, name, **changes):
    """Through the teacher of a run, with no layer at zero, where some start."""
    def look(nets, batch):
        for p in map(shard.local, nets["teacher"].parameters()):
            p += 0.02 * torch.randn_like(p)
        x, t = batch["x0"], common.t_like(0.7, batch["x0"])
        found.append(derivative(lambda x, t: nets["teacher"](x, t, batch["cond"]), (x, t),
                                (torch.randn_like(x), torch.ones_like(t))))
    found = []
    try:
        loop(at, name, 1, look=look, batch_size=4, **changes)
    except NotImplementedError as e:                    # before 2.13 FSDP2's units cannot
        if "parallel" not in changes or torch.__version__ >= "2.13":
            raise
        found.append(f"refused by torch {torch.__version__}: {first_line(e)}")
    return {}, found[0]


def fused(at, name):
    """Attention by torch's own function: its fused kernels have no forward mode, its MATH backend has."""
    (q, v), said = torch.randn(2, 2, 4, 64, 32, device=at.device), []
    attend = lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)        # noqa: E731
    for dtype in torch.float32, torch.bfloat16:
        try:
            torch.func.jvp(attend, (q.to(dtype),), (v.to(dtype),))
            said.append(f"works in {dtype}")
        except Exception as e:
            said.append(f"raises {type(e).__name__} in {dtype}")
    with sdpa_kernel(SDPBackend.MATH):
        return {}, f"MATH {derivative(attend, (q,), (v,))}; the default {', '.join(said)}"


def cases(quick):
    """(name, function, its settings), what matters most first."""
    small, n = ("toy:tiny", 16) if quick else ("edm:digits", 60)
    bf16, fp16, fsdp, few = (dict(amp="bf16"), dict(amp="fp16"), dict(parallel="fsdp"), dict(batch_size=8))
    small, compiled = dict(net=small, data="digits"), dict(compile=True)
    digits = dict(net="edm:digits", data="digits", batch_size=64, update_ratio=5, max_iter=3600, stop_at=n,
                  val_every=n // 2, sample_every=n // 2, log_every=n // 3, random=False)
    save = dict(async_save=True, stop_at=n // 2, save_every=n // 4)
    if quick:                                           # torch.compile takes long on a CPU
        compiled |= dict(net="toy:tiny,depth=1", data="digits", gan_weight=0.0)
    return [
        ("fp32", speed, {}), ("bf16", speed, bf16), ("fp16", speed, fp16),
        ("fsdp", speed, fsdp), ("fsdp bf16", speed, fsdp | bf16),
        ("resume", resume, few), ("resume bf16", resume, few | bf16),
        ("resume fsdp", resume, small | fsdp), ("resume fsdp bf16", resume, small | fsdp | bf16),
        ("jvp", jvp, {}), ("jvp toy", jvp, dict(net="toy:tiny", data="digits")), ("jvp fsdp", jvp, fsdp),
        ("jvp fused attention", fused, {}),
        ("digits default", speed, digits), ("compiled bf16", speed, compiled | bf16),
        ("recompute bf16", speed, bf16 | dict(recompute=True)), ("async save bf16", speed, bf16 | save),
        ("fsdp offload recompute", speed, fsdp | bf16 | dict(offload=True, recompute=True)),
        *((f"compiled {'+'.join(c)}", speed, compiled | c) for c in ({}, fsdp | bf16, fp16) if not quick)]


# ---- the table ---------------------------------------------------------------------------------------------

def first_line(e):
    """Of an error, and where in this repository it came from."""
    lines = traceback.format_exception_only(type(e), e)[-1].splitlines()
    ours = [f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).is_relative_to(ROOT)]
    return lines[0][:150] + (f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else "")


def attempt(at, name, run, settings, seconds):
    """(cells, verdict) of one case, which has so long. Leaves nothing behind."""
    def ring(*_):
        raise Late
    if seconds < 0.03 * 60 * at.minutes:
        return {}, "skipped: no time left"
    before = signal.signal(signal.SIGALRM, ring)
    try:
        if at.cuda:
            torch.cuda.reset_peak_memory_stats()
        signal.setitimer(signal.ITIMER_REAL, seconds, 5)        # again, should one be lost in a destructor
        with contextlib.redirect_stdout(io.StringIO()):
            cells, verdict = run(at, name, **settings)
        return cells | (dict(gb=[torch.cuda.max_memory_allocated() / 2 ** 30]) if at.cuda else {}), verdict
    except Late:
        return {}, f"stopped: {seconds:.0f} s are over"
    except Exception as e:
        traceback.print_exc()
        return {}, f"FAILED: {first_line(e)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        clean()


def main(argv=None):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--quick", action="store_true")
    at = parser.parse_args(argv)
    todo, at.cuda = [case for case in cases(at.quick) if at.only in case[0]], not at.quick
    if at.cuda and not torch.cuda.is_available():
        print("no CUDA device; on one, `python tools/gpu_check.py` would run, with edm:cifar10, batch 128:")
        for name, run, settings in todo:
            print(f"  {name:<24}{run.__name__:<8}{' '.join(f'{k}={v}' for k, v in settings.items())}")
        print("`python tools/gpu_check.py --quick` rehearses them on this CPU")
        return 0
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")     # for `resume`; read when cuBLAS starts
    at.device, at.flops, at.first = torch.device("cuda" if at.cuda else "cpu"), {}, {}
    at.warm, at.total, shape, net, size = ((6, 36, (32, 32, 3), "edm:cifar10", 128) if at.cuda else
                                           (2, 8, (8, 8, 1), "edm:digits", 8))
    at.name, began = torch.cuda.get_device_name() if at.cuda else "cpu", time.monotonic()
    draw, verdicts = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as root:
        os.environ["FEWSTEP_OUTPUT_ROOT"] = root
        np.savez(f"{root}/random.npz", image=draw.integers(0, 256, (1024, *shape), np.uint8),
                 label=draw.integers(0, 10, 1024))
        at.cfg = dict(net=net, data=f"{root}/random.npz", device=at.device.type, batch_size=size)
        print(f"{at.name}, torch {torch.__version__}, {net}, batch {size}, TF32 on\n{'case':<24}{'s':>4}",
              *(f"{title:>{width}}" for _, width, title in COLUMNS.values()), " verdict", flush=True)
        for name, run, settings in todo:
            start, part = time.monotonic(), 0.45 if settings.get("compile") else 0.15
            seconds = 60 * at.minutes * part, 60 * at.minutes + began - start
            cells, verdict = attempt(at, name, run, settings, min(seconds))
            verdicts.append(verdict)
            print(f"{name:<24}{time.monotonic() - start:>4.0f}", *(
                f"{' / '.join(format(v, how) for v in cells.get(key, ())) or '-':>{width}}"
                for key, (how, width, _) in COLUMNS.items()), "", verdict, flush=True)
    failed, left = (sum(v.startswith(w) for v in verdicts) for w in ("FAILED", ("skipped", "stopped")))
    print(f"{len(todo)} cases, {time.monotonic() - began:.0f} s: {failed} failed, {left} skipped or stopped")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
