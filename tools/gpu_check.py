"""Does it work on this GPU, and how fast? One table, a row per case, at most four minutes on one device.

    python tools/gpu_check.py [--minutes 4] [--only WORD]     needs CUDA; without it, lists the cases
    python tools/gpu_check.py --quick                         rehearses them on the CPU with tiny nets

tools/bench.py's clock around trainer.train, random weights, random images. ms: median of an iteration of
each phase; GB: peak of torch's allocator; MFU: FLOPs of the calls of nets that the phase makes over time and
the device's dense peak, of TF32 in fp32; syncs: calls after `step` that make the host wait. On CUDA a row
also names the lines at which CUDA saw the host wait, with times per iteration. A failed case leaves its
error, its traceback on stderr and exit code 1. What matters most comes first.
"""
import argparse
import contextlib
import gc
import io
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import bench, ckpt, common, shard, train, trainer  # noqa: E401, E402

PEAK = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312}   # bf16, fp16; TF32: half
BASE = dict(update_ratio=1, max_iter=6, warmup=0, val_every=0, sample_every=0, log_every=0, wandb="disabled",
            log_level="warning", group="check")


class Timed(bench.Clocked):
    """Notes losses, from weights of which none is 0, and the FLOPs of each phase's first bare calls."""

    def __init__(self, *args, flops):
        super().__init__(*args, parts=False)
        self.flops, self.losses = flops, []

    def step(self, nets, batch, it, cfg):
        for p in (shard.local(p.detach()) for net in nets.values() for p in net.parameters() if it == 0):
            p.add_(0.02 * torch.randn_like(p))
        loss, logged = super().step(nets, batch, it, cfg)
        self.losses.append(loss.detach())
        return loss, logged

    def end(self, phase):
        if phase in self.flops:
            return super().end(phase)
        with FlopCounterMode(display=False) as counter:
            super().end(phase)
        self.flops[phase] = counter.get_total_flops() / self.iters


def config(at, method, **changes):
    cfg = train.resolve(method, [])[0] | at.cfg
    return cfg | {k: v for k, v in (BASE | changes).items() if k in cfg}


def speed(at, name="dmd2", **changes):
    """Cells and verdict of a run; its first loss must be that of the first case with its method and net."""
    method = train.load_method(ROOT / "methods" / f"{name}.py")
    cfg = config(at, method, **changes)
    first, flops = at.known.setdefault((name, cfg["net"]), ([], {}))
    timed = Timed(method, cfg, flops=flops)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        timed.run()
    losses = [x.item() for x in timed.losses]
    first.append(losses[0])
    off = abs(losses[0] / first[0] - 1)
    assert np.isfinite(losses).all() and off < 0.03, f"losses {losses[:4]} ..., the first off by {off:.2g}"
    ms = [median(sum(block["iteration"].values()) / timed.iters for block in blocks[1:])
          for blocks in timed.blocks.values()]
    peak = next((tflops for name, tflops in PEAK.items() if name in at.name), np.nan) * 1e12
    peak = peak if cfg["amp"] else peak / 2
    mfu = [100 * flops[phase] / (t / 1e3 * peak) for phase, t in zip(timed.blocks, ms)]
    waits = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in seen if "called a sync" in str(w.message))
    often = [f", waits in {place} {n / len(losses):.1f}" for place, n in waits.items() if n > len(losses) / 3]
    cells = (" / ".join(format(v, how) for v in values) for values, how in (
        (ms, ".1f"), (mfu, ".0f"), ([counter.n for counter in timed.syncs.values()], "d")))
    return *cells, f"loss {losses[-1]:.4g}, the first off by {off:.0e}{''.join(often)}"


def resume(at, **changes):
    """Six iterations on end against three and three: the same weights, bit for bit."""
    method, found = train.load_method(ROOT / "methods" / "dmd2.py"), []
    method.init = lambda cfg: {}
    for name, stops in dict(straight=(0,), halves=(3, 0)).items():
        for stop in stops:
            cfg = config(at, method, deterministic=True, stop_at=stop, name=name, **changes)
            trainer.train(method, cfg)
        folder = Path(os.environ["FEWSTEP_OUTPUT_ROOT"], cfg["project"], cfg["group"], name)
        found.append({f"{entry}.{k}": v for entry in ("student", "ema", "fake_score", "discriminator")
                      for k, v in ckpt.read(ckpt.resolve(f"{folder}#{entry}")).items()})
    apart = [k for k, v in found[0].items() if not torch.equal(v, found[1][k])]
    assert not apart, f"{len(apart)} of {len(found[0])} tensors differ, as {apart[-1]}"
    return "", "", "", f"{len(found[0])} tensors bit for bit"


def cases(quick):
    """{name: (function, its settings)}, what matters most first. torch.compile takes long on a CPU."""
    bf16, fp16, fsdp = dict(amp="bf16"), dict(amp="fp16"), dict(parallel="fsdp")
    scm, compiled = dict(name="scm", tangent="none", tangent_warmup=0), dict(compile=True)
    short = compiled | dict(net="toy:tiny,depth=1", gan_weight=0.0, data="digits")
    return {
        "fp32": (speed, {}), "bf16": (speed, bf16), "fp16": (speed, fp16),
        "fsdp": (speed, fsdp), "fsdp bf16": (speed, fsdp | bf16),
        "resume": (resume, {}), "resume fsdp bf16 async": (resume, fsdp | bf16 | dict(async_save=True)),
        "jvp": (speed, scm), "jvp fused": (speed, scm | dict(jvp="fused")), "jvp bf16": (speed, scm | bf16),
        "jvp as difference": (speed, scm | dict(jvp="difference")), "jvp fsdp": (speed, scm | fsdp),
        "fsdp offload recompute": (speed, fsdp | bf16 | dict(offload=True, recompute=True)),
        **({"compiled bf16": (speed, short | bf16)} if quick else {
            "compiled": (speed, compiled), "compiled bf16": (speed, compiled | bf16),
            "compiled fp16": (speed, compiled | fp16),
            "compiled fsdp bf16": (speed, compiled | fsdp | bf16)})}


def attempt(at, run, settings):
    """(ms, MFU, syncs, verdict) of one case, which leaves nothing behind."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as root:
            os.environ["FEWSTEP_OUTPUT_ROOT"] = root
            return run(at, **settings)
    except common.BadInput as e:                        # as JVP under FSDP2 before torch 2.13
        return "", "", "", f"refused: {e}"
    except Exception as e:
        traceback.print_exc()
        return "", "", "", f"FAILED: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:150]}"
    finally:                                            # nets, lock and process group hang in a run's frames
        gc.collect()
        torch._dynamo.reset()
        torch.use_deterministic_algorithms(False)
        if dist.is_initialized():
            dist.destroy_process_group()


def main(argv=None):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--quick", action="store_true")
    at = parser.parse_args(argv)
    todo, cuda = {name: case for name, case in cases(at.quick).items() if at.only in name}, not at.quick
    if cuda and not torch.cuda.is_available():
        print("no CUDA device; on one, `python tools/gpu_check.py` would run, with edm:cifar10, batch 128:")
        for name, (run, settings) in todo.items():
            print(f"  {name:<24}{run.__name__:<8}{' '.join(f'{k}={v}' for k, v in settings.items())}")
        print("`python tools/gpu_check.py --quick` rehearses them on this CPU")
        return 0
    net, batch, shape, blocks, iters = (("edm:cifar10", 128, (32, 32, 3), 3, 5) if cuda else
                                        ("edm:digits", 8, (8, 8, 1), 2, 2))
    at.name, at.known = torch.cuda.get_device_name() if cuda else "cpu", {}
    began, verdicts = time.monotonic(), []
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")     # for `resume`; read when cuBLAS starts
    if cuda:
        signal.alarm(int(60 * at.minutes) + 1)          # ends the program, also in a case that hangs
        torch.cuda.set_sync_debug_mode("warn")
    with tempfile.TemporaryDirectory() as root:
        draw = np.random.default_rng(0)
        np.savez(f"{root}/random.npz", image=draw.integers(0, 256, (1024, *shape), np.uint8),
                 label=draw.integers(0, 10, 1024))
        at.cfg = dict(net=net, data=f"{root}/random.npz", device="cuda" if cuda else "cpu", batch_size=batch,
                      blocks=blocks, iters=iters)
        print(f"{at.name}, torch {torch.__version__}, {net}, batch {batch}, TF32 on")
        line = "{:<24}{:>4}{:>19}{:>8}{:>11}{:>8}  {}".format
        print(line("case", "s", "ms", "GB", "MFU %", "syncs", "verdict"), flush=True)
        for name, (run, settings) in todo.items():
            start, gb = time.monotonic(), "-"
            ms, mfu, syncs, verdict = attempt(at, run, settings)
            if cuda:
                gb = f"{torch.cuda.max_memory_allocated() / 2 ** 30:.2f}"
                torch.cuda.reset_peak_memory_stats()
            print(line(name, round(time.monotonic() - start), ms, gb, mfu, syncs, verdict), flush=True)
            verdicts.append(verdict)
    signal.alarm(0)
    failed, refused = (sum(v.startswith(word) for v in verdicts) for word in ("FAILED", "refused"))
    print(f"{len(todo)} cases, {time.monotonic() - began:.0f} s: {failed} failed, {refused} refused")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
