"""What an iteration of the trainer costs over the network passes that its method cannot do without.

    python tools/bench.py methods/dmd2.py [--net edm:digits --key value ...] [--blocks 10] [--iters 10]
    python tools/bench.py --overhead                    clipping, guard and EMA of 400 tensors, and host-device syncs
    python tools/bench.py methods/dmd2.py --startup     from process start to the end of the first iteration

The first form runs trainer.train itself and reads the clock in the calls that a method gets anyway. Blocks of --iters
iterations of one phase alternate with as many runs of the bare passes of that phase: calls of the same nets on the same
batch, listed by name, and the same optimizer's step. The first block of each is not counted. Weights are random: speed
does not depend on them, and no teacher is needed. One process; the run folder is a temporary one. Times are ms per
iteration, medians over blocks [quartiles]; the ratio is between neighbouring blocks. Peak memory is the process's
resident memory, on CUDA what torch allocated.
"""
import argparse
import contextlib
import copy
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import logs  # noqa: E402
import train  # noqa: E402
import trainer  # noqa: E402
from common import BadInput  # noqa: E402


# ---- the passes that each method needs: {phase: [(name, times per micro-step, function)]} ------------------------

def sft(p, cfg):
    kw = dict(logvar=True) if cfg["logvar"] else {}
    return dict(student=[("student forward + backward", 1, p.backward("student", **kw))])


def dmd2(p, cfg):
    simulated = (cfg["steps"] - 1) / 2 if cfg["student_input"] == "simulation" else 0       # expected number
    taps = dict(taps=cfg["gan_taps"] or (p.nets["student"].n_taps - 1,))
    gan, source, r1 = bool(cfg["gan_weight"]), cfg["gan_features"], bool(cfg["r1_weight"])
    shared = gan and source == "fake_score"
    rows = dict(student=[
        ("student forward, simulated steps", simulated, p.forward("student")),
        ("student forward + backward", 1, p.backward("student")),
        ("fake_score forward", 1, p.forward("fake_score")),
        ("teacher forward", cfg["guidance"] != 0, p.forward("teacher")),
        ("teacher forward, negative condition", cfg["guidance"] != 1, p.forward("teacher", p.uncond)),
    ], fake=[
        ("student forward", 1 + simulated, p.forward("student")),
        ("fake_score forward + backward", 1, p.backward("fake_score", **(taps if shared else {}))),
    ])
    if gan:
        rows["student"] += [
            ("features forward + input gradient", 1, p.backward(source, x_grad=True, stop=True, **taps)),
            ("discriminator forward + input gradient", 1, p.head(source, **taps))]
        rows["fake"] += [
            # those of generated samples come out of the fake score's pass above
            ("features forward + backward, real", shared, p.backward(source, stop=True, **taps) if shared else None),
            ("features forward + backward, r1", shared and r1, p.backward(source, stop=True, **taps) if shared else None),
            ("features forward, generated and real", 2 * (not shared), p.forward(source, stop=True, **taps)),
            ("features forward, r1", r1 and not shared, p.forward(source, stop=True, **taps)),
            ("discriminator forward + backward, generated and real", 2, p.head(source, x_grad=shared, **taps)),
            ("discriminator forward + backward, r1", r1, p.head(source, x_grad=shared, **taps))]
    return rows


PASSES = dict(sft=sft, dmd2=dmd2)       # by cfg["recipes"], which a copied method file keeps


class Passes:
    """Calls of the nets on one batch, noised at t = 0.5. Which parameters get gradients is as the trainer left it."""

    def __init__(self, nets, batch):
        x0 = batch["x0"]
        self.nets, self.cond, self.uncond, self.t = nets, batch["cond"], batch["uncond"], common.t_like(0.5, x0)
        self.x_t = common.add_noise(nets["student"].schedule, x0, torch.randn_like(x0), self.t)     # (B, C, H, W)

    def call(self, net, cond=None, x_grad=False, **kw):
        x_t = self.x_t.detach().requires_grad_(x_grad)
        out = self.nets[net](x_t, self.t, self.cond if cond is None else cond, **kw)
        return [out] if torch.is_tensor(out) else [*out.pop("taps", ()), *out.values()]

    def forward(self, net, cond=None, **kw):
        return torch.no_grad()(lambda: self.call(net, cond, **kw))

    def backward(self, net, **kw):
        return lambda: differentiate(self.call(net, **kw))

    def head(self, source, x_grad=True, taps=()):
        features = self.forward(source, taps=taps, stop=True)()
        return lambda: differentiate([self.nets["discriminator"]([f.detach().requires_grad_(x_grad) for f in features])])


def differentiate(outputs):
    torch.autograd.backward(outputs, [torch.full_like(o, 1 / o.numel()) for o in outputs])


# ---- the clock ---------------------------------------------------------------------------------------------------

class Syncs(TorchFunctionMode):
    """Counts calls that make the host wait for the device."""
    names, n = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero", "equal"}, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += func.__name__ in self.names
        return func(*args, **(kwargs or {}))


class Finished(Exception):
    """Leaves the trainer after the last block, where it would go on to write a checkpoint."""


class Clocked:
    """A method as the trainer sees it, whose phases come in blocks of `iters` iterations. After each block it runs
    what passes(nets, batch) -> {phase: [(name, times, function)]} lists, and an optimizer step, as often.

    blocks: {phase: [one dict of trainer, passes ({row: ms}), peak, peak_passes (MB) per block]}."""

    def __init__(self, method, cfg, passes, blocks, iters):
        self.method, self.passes, self.iters = method, passes, iters
        self.path, self.build, self.sample = method.path, method.build, method.sample
        turns = defaultdict(list)                       # the method's own iterations of each phase, in order
        for it in range(cfg["max_iter"]):
            turns[method.phase(it, cfg)].append(it)
        order = [(b * iters + i, phase) for b in range(blocks + 1) for phase in turns for i in range(iters)]
        self.plan = [(turns[phase][n % len(turns[phase])], phase) for n, phase in order]
        self.cfg = cfg | dict(max_iter=len(order) + 1, stop_at=0, save_every=0, val_every=0, sample_every=0, log_every=0,
                              resume="", wandb="disabled", log_level="warning")
        self.blocks, self.laps, self.syncs = {phase: [] for phase in turns}, defaultdict(list), {}
        self.stepped, self.then = -1, 0.0

    def init(self, cfg):
        return {}

    def optimizers(self, nets, cfg):
        self.opts = self.method.optimizers(nets, cfg)
        for opt in self.opts.values():
            opt.register_step_pre_hook(lambda *_: self.lap("average, clip + guard"))
            opt.register_step_post_hook(lambda *_: self.lap("optimizer"))
        return self.opts

    def phase(self, it, cfg):
        """The trainer's first call in an iteration, so also the end of the one before."""
        if it > 0 and it == self.stepped + 1:
            self.lap("EMA + log")
            self.end(it, self.plan[it - 1][1])
        return self.plan[min(it, len(self.plan) - 1)][1]

    def step(self, nets, batch, it, cfg):
        self.lap("data + encode")
        self.nets, self.batch, self.stepped = nets, batch, it
        loss, parts = self.method.step(nets, batch, self.plan[it][0], cfg)
        self.lap("step")
        engine = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda grad: engine.queue_callback(lambda: self.lap("backward")))
        if self.plan[it][1] not in self.syncs:          # once per phase, in the block that is not counted
            self.syncs[self.plan[it][1]] = Syncs().__enter__()
        return loss, parts

    def lap(self, name):
        """What ran since the last lap counts as `name`."""
        if torch.cuda.is_initialized():                 # on the stream: kernels run later than they are launched
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.laps[name].append((self.then, now))
        self.then = now

    def read(self):
        """{name: ms per iteration} of the laps since the last reading."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        ms = lambda a, b: (b - a) * 1e3 if isinstance(b, float) else a.elapsed_time(b) if a else 0.0        # noqa: E731
        rows = {name: sum(ms(*pair) for pair in pairs) / self.iters for name, pairs in self.laps.items()}
        self.laps.clear()
        return rows

    def end(self, done, phase):
        """After every iteration; at the end of a block, the passes."""
        if done % self.iters == 1 or self.iters == 1:
            self.syncs[phase].__exit__(None, None, None) if len(self.blocks[phase]) == 0 else None
        if done % self.iters:
            return
        opt, cfg, device, block = self.opts[phase], self.cfg, self.batch["x0"].device, dict(trainer=self.read())
        block["peak"] = peak(device)
        rows = [row for row in self.passes(self.nets, self.batch)[phase] if row[1]]
        for group in opt.param_groups:                  # these steps move no weight; the trainer sets lr every time
            group["lr"] = group["lr"] * 0.0
        self.lap("")
        for _ in range(self.iters):
            with torch.autocast(device.type, trainer.DTYPES.get(cfg["amp"]), enabled=bool(cfg["amp"])):
                for name, _, run in rows:
                    run()
                    self.lap(name)
            opt.step()
            opt.zero_grad(set_to_none=True)
        times = {name: times * cfg["accum"] for name, times, _ in rows} | dict(optimizer=1)
        block["passes"] = {name: ms * times[name] for name, ms in self.read().items() if name in times}
        block["peak_passes"] = peak(device)
        self.blocks[phase].append(block)
        if done == len(self.plan):
            raise Finished
        self.lap("")
        self.laps.clear()

    def run(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, FEWSTEP_OUTPUT_ROOT=folder), \
                contextlib.suppress(Finished):
            trainer.train(self, self.cfg)
        return {phase: blocks[1:] for phase, blocks in self.blocks.items()}


def peak(device):
    """High-water mark of memory in MB since the last call (since ever where the system cannot reset it)."""
    mb = logs.memory_gb(device) * 2 ** 10
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return mb
