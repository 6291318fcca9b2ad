"""What an iteration of the trainer costs over the network passes that its method cannot do without.

    python tools/bench.py methods/dmd2.py [--net edm:digits --key value ...] [--blocks 20] [--iters 5]
    python tools/bench.py methods/dmd2.py --startup    from process start to the end of the first iteration
    python tools/bench.py --overhead [400]             clipping, guard and EMA of 400 tensors; device syncs
    torchrun --nproc_per_node 2 tools/bench.py --overhead 2     almost none: the loop, its log and its flags

The first form runs trainer.train itself and reads the clock in the calls that a method gets anyway. Blocks
of --iters iterations of one phase alternate with as many runs of the bare passes of that phase: calls of the
same nets on the same batch, listed by name, and the same optimizer's step. The first block of each is not
counted. Weights are random: speed does not depend on them. One process, a temporary run folder. Times are ms
per iteration, medians over blocks [quartiles]; the ratio is that of neighbouring blocks. Memory is the peak
of the process, on CUDA of torch's allocator. There, every reading of the clock waits for the device.
"""
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

import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common, logs, shard, train, trainer  # noqa: E401, E402


# ---- the passes that each method needs: {phase: [(name, times per micro-step, function)]} ----------------

def sft(p, cfg):
    logvar = cfg.get("logvar", False)
    return dict(student=[("student forward + backward", 1, p.backward("student", logvar=logvar))])


def dmd2(p, cfg):
    simulated = (cfg["steps"] - 1) / 2 if cfg["student_input"] == "simulation" else 0       # expected number
    gan, source, r1 = bool(cfg["gan_weight"]), cfg["gan_features"], bool(cfg["r1_weight"])
    taps = dict(taps=cfg["gan_taps"] or (p.nets["student"].n_taps - 1,))
    shared = gan and source == "fake_score"     # those of generated samples come out of the fake score's pass
    student = [("student forward, simulated steps", simulated, p.forward("student")),
               ("student forward + backward", 1, p.backward("student")),
               ("fake_score forward", 1, p.forward("fake_score")),
               ("teacher forward", cfg["guidance"] != 0, p.forward("teacher")),
               ("teacher forward, negative condition", cfg["guidance"] != 1, p.forward("teacher", p.uncond))]
    fake = [("student forward", 1 + simulated, p.forward("student")),
            ("fake_score forward + backward", 1, p.backward("fake_score", **taps if shared else {}))]
    if gan:
        first = dict(taps, stop=True)
        student += [("features forward + input gradient", 1, p.backward(source, x_grad=True, **first)),
                    ("discriminator forward + input gradient", 1, p.head(source, first))]
        fake += [("features forward + backward (real, r1)", shared * (1 + r1), p.backward(source, **first)),
                 ("features forward (both, r1)", (not shared) * (2 + r1), lambda: p.call(source, **first)),
                 ("discriminator forward + backward (both, r1)", 2 + r1, p.head(source, first, shared))]
    return dict(student=student, fake=fake)


def f_distill(p, cfg):
    features = p.forward("teacher", taps=cfg["gan_taps"] or (p.nets["student"].n_taps - 1,), stop=True)()
    ratio = ("discriminator forward (ratio)", cfg["divergence"] != "rkl",
             torch.no_grad()(lambda: p.nets["discriminator"](features)))
    return dict(student=dmd2(p, cfg)["student"] + [ratio], fake=dmd2(p, cfg | dict(gan_weight=1.0))["fake"])


def ladd(p, cfg):
    first = dict(taps=cfg["gan_taps"] or tuple(range(p.nets["teacher"].n_taps)), stop=True)
    passes = dmd2(p, cfg | dict(gan_features="teacher", gan_taps=first["taps"], gan_weight=1.0, guidance=1.0))
    return {phase: [row for row in rows if not row[0].startswith(("fake_score", "teacher"))]
            for phase, rows in passes.items()}


def tangents(p, cfg, part=1.0):
    """A step of sCM, or of MeanFlow without dropout: tangents of a part of its batch."""
    kw = {**(dict(logvar=True) if cfg["recipes"] == "scm" and cfg["logvar"] else {}),
          **(dict(r=p.t) if cfg["recipes"] == "mean_flow" else {})}
    return dict(student=[
        ("teacher forward", cfg["distill"], p.forward("teacher")),
        ("teacher forward, negative condition", cfg["distill"] and cfg["guidance"] != 1,
         p.forward("teacher", p.uncond)),
        ("student forward-mode pass", 1, p.tangent("student", part, **kw)),
        ("student forward + backward", 1, p.backward("student", **kw))])


def mean_flow(p, cfg):
    return tangents(p, cfg, cfg["ratio"])


def cm(p, cfg):
    calls = cfg["distill"] * (2 if cfg["solver"] == "heun" else 1)
    return dict(student=[
        ("student forward + backward", 1, p.backward("student")),
        ("student forward", 1, p.forward("student")),
        ("teacher forward", calls * (cfg["guidance"] != 0), p.forward("teacher")),
        ("teacher forward, negative condition", calls * (cfg["guidance"] != 1),
         p.forward("teacher", p.uncond))])


def tcm(p, cfg):
    """Stage 2, without dropout: a third of the targets (0.25 of them at the boundary) are stage 1's."""
    def part(net, a, b):
        rows = slice(None) if cfg["dropout"] else slice(len(p.t) * a // 3, len(p.t) * b // 3)
        cond = {k: v[rows] for k, v in p.cond.items()}
        return torch.no_grad()(lambda: p.nets[net](p.x_t[rows], p.t[rows], cond))
    if not cfg["stage1"]:
        return cm(p, dict(distill=False, solver="", guidance=1.0))
    return dict(student=[("student forward + backward", 1, p.backward("student")),
                         ("stage1 forward", 1, part("stage1", 0, 1)),
                         ("student forward", 1, part("student", 1, 3))])


# by config["recipes"], which a copied method file keeps
PASSES = dict(cm=cm, tcm=tcm, scm=tangents, mean_flow=mean_flow, sft=sft, dmd2=dmd2, f_distill=f_distill,
              ladd=ladd, kd=sft)


class Passes:
    """Calls of the nets on one batch at t = 0.5. Which parameters get gradients is as the trainer left it."""

    def __init__(self, nets, batch):
        x0, self.nets, self.cond, self.uncond = batch["x0"], nets, batch["cond"], batch["uncond"]
        self.t = common.t_like(0.5, x0)                                                         # (B,)
        self.x_t = common.add_noise(nets["student"].schedule, x0, torch.randn_like(x0), self.t)

    def call(self, net, cond=None, x_grad=False, **kw):
        out = self.nets[net](self.x_t.detach().requires_grad_(x_grad), self.t, cond or self.cond, **kw)
        return [out] if torch.is_tensor(out) else [*out.pop("taps", ()), *out.values()]

    def forward(self, net, cond=None, **kw):
        return torch.no_grad()(lambda: self.call(net, cond, **kw))

    def tangent(self, net, part, **kw):
        n = round(part * len(self.t))
        kw = {k: v[:n] if torch.is_tensor(v) else v for k, v in kw.items()}
        cond, at = {k: v[:n] for k, v in self.cond.items()}, (self.x_t[:n], self.t[:n])
        call = lambda x, t: self.nets[net](x, t, cond, **kw)                # noqa: E731
        return torch.no_grad()(lambda: torch.func.jvp(call, at, at))

    def backward(self, net, **kw):
        return lambda: differentiate(self.call(net, **kw))

    def head(self, source, taps, x_grad=True):
        features, head = self.forward(source, **taps)(), self.nets["discriminator"]
        return lambda: differentiate([head([f.detach().requires_grad_(x_grad) for f in features])])


def differentiate(outputs):
    torch.autograd.backward(outputs, [torch.full_like(o, 1 / o.numel()) for o in outputs])


# ---- the clock -------------------------------------------------------------------------------------------

class Syncs(TorchFunctionMode):
    """Counts calls that make the host wait for the device."""
    names, n = "item tolist __bool__ __float__ __int__ __index__ cpu numpy nonzero equal".split(), 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += func.__name__ in self.names
        return func(*args, **(kwargs or {}))


class Enough(BaseException):
    """No error (the trainer saves on those), and no Ctrl-C, which must still end the program."""


class Clocked:
    """A method as the trainer sees it, its phases in blocks of `iters` iterations. After each block come as
    many runs of what passes(nets, batch) -> {phase: [(name, times, function)]} lists, and the optimizer."""

    def __init__(self, method, cfg, passes):
        blocks, iters = cfg["blocks"] + 1, cfg["iters"]
        self.method, self.passes, self.iters, self.init = method, passes, iters, lambda cfg: {}
        self.path, self.source = method.path, method.source
        self.build, self.sample = method.build, method.sample
        turns = defaultdict(list)                       # the method's own iterations of each phase, in order
        for it in range(cfg["max_iter"]):
            turns[method.phase(it, cfg)].append(it)
        self.plan = [(own[i % len(own)], phase) for block in range(blocks) for phase, own in turns.items()
                     for i in range(block * iters, (block + 1) * iters)]
        off = dict.fromkeys(("stop_at", "save_every", "val_every", "sample_every", "log_every"), 0)
        off["max_iter"] = max(cfg["max_iter"], len(self.plan) + 1)
        self.cfg = cfg | off | dict(wandb="disabled", log_level="warning")
        self.blocks, self.laps, self.syncs = {phase: [] for phase in turns}, defaultdict(float), {}
        self.stepped, self.counter = -1, None

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
            self.counter = self.counter and self.counter.__exit__(None, None, None)
            if it % self.iters == 0:
                self.end(it, self.plan[it - 1][1])
            self.lap("")
        return self.plan[min(it, len(self.plan) - 1)][1]

    def step(self, nets, batch, it, cfg):
        self.lap("data + encode" if it else "")
        self.nets, self.batch, self.stepped, (own, phase) = nets, batch, it, self.plan[it]
        loss, parts = self.method.step(nets, batch, own, cfg)
        self.lap("step")
        after = torch.autograd.Variable._execution_engine.queue_callback
        loss.register_hook(lambda grad: after(lambda: self.lap("backward")))
        if phase not in self.syncs:                     # in the uncounted block, until the next phase()
            self.counter = self.syncs[phase] = Syncs().__enter__()
        return loss, parts

    def lap(self, name):
        """What ran since the last lap counts as `name`, in ms."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if name:
            self.laps[name] += (now - self.then) * 1e3
        self.then = now

    def end(self, done, phase):
        """The end of a block: note what it took, run the passes."""
        opt, device, amp = self.opts[phase], self.batch["x0"].device, shard.DTYPES.get(self.cfg["amp"])
        block, self.laps = dict(iteration=self.laps), defaultdict(float)
        rows = [row for row in self.passes(self.nets, self.batch)[phase] if row[1]]
        for group in opt.param_groups:                  # these steps move no weight; the trainer sets lr anew
            group["lr"] = group["lr"] * 0.0
        for _ in range(self.iters):
            with torch.autocast(device.type, amp, enabled=bool(amp)):
                self.lap("")
                for name, _, run in rows:
                    run()
                    self.lap(name)
            opt.step()
            opt.zero_grad(set_to_none=True)
        times = {name: n * self.cfg["accum"] for name, n, _ in rows} | dict(optimizer=1)
        block["passes"] = {f"{k} x {n:g}" if n != 1 else k: self.laps[k] * n for k, n in times.items()}
        self.blocks[phase].append(block)
        self.laps = defaultdict(float)
        if done == len(self.plan):
            raise Enough                                # out of the trainer, which would write a checkpoint


# ---- the tables ------------------------------------------------------------------------------------------

def row(name, values):
    low, mid, high = quantiles(values, n=4, method="inclusive")
    print(f"  {name:<50}{mid:10.3f}  [{low:.3f} {high:.3f}]")


def show(method, cfg, passes):
    clocked = Clocked(method, cfg, passes)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")
    print(f"net {cfg['net']}, batch {cfg['batch_size']}, {cfg['amp'] or 'float32'}, {cfg['blocks']} blocks",
          f"of {cfg['iters']}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as root, contextlib.suppress(Enough):
        os.environ["FEWSTEP_OUTPUT_ROOT"] = root
        trainer.train(clocked, clocked.cfg)
    for phase, (_, *blocks) in clocked.blocks.items():
        print(f"{phase}: {clocked.syncs[phase].n} device sync(s) after step")
        for kind in ("passes", "iteration"):
            for name in blocks[0][kind]:
                row(name, [b[kind][name] / cfg["iters"] for b in blocks])
            row(f"= {kind}", [sum(b[kind].values()) / cfg["iters"] for b in blocks])
        if cfg["recipes"]:
            row("ratio", [sum(b["iteration"].values()) / sum(b["passes"].values()) for b in blocks])
    print(f"peak memory {logs.memory_gb(clocked.batch['x0'].device) * 1024:.0f} MB")


def overhead(tensors=400, blocks=20, iters=5):
    """A method of small tensors without work; for its passes the loops that trainer.py does without."""
    def loops(nets, batch):
        params = copy.deepcopy(list(nets["student"].parameters()))
        pairs = list(zip(copy.deepcopy(params), params))
        for p in params:
            p.grad = torch.ones_like(p)
        clip = lambda: bool(torch.nn.utils.clip_grad_norm_(params, 10.0).isfinite())    # noqa: E731
        ema = lambda: [e.data.lerp_(p.data, 0.001) for e, p in pairs]                   # noqa: E731
        with Syncs() as syncs:
            clip(), ema()
        return dict(student=[(f"clip_grad_norm_, guard, {syncs.n} sync", 1, clip), ("EMA by a loop", 1, ema)])

    many = type("Many", (torch.nn.Sequential,), dict(x_shape=(1, 8, 8)))
    method = SimpleNamespace(
        path=Path(__file__), source=b"", sample=None, phase=lambda it, cfg: "student",
        build=lambda cfg: dict(student=many(*(torch.nn.Linear(8, 8) for _ in range(tensors // 2)))),
        optimizers=lambda nets, cfg: dict(student=common.optimizer(nets["student"].parameters())),
        step=lambda nets, *_: (sum(p.sum() for p in nets["student"].parameters()), {}))
    cfg = dict(net=f"of {tensors} small tensors", group="bench", name="bench", blocks=blocks, iters=iters)
    show(method, trainer.defaults | cfg, loops)


def startup(command, runs=3):
    """Times at which train.py prints "starting at ...", "it 0000000 | val...", "it 000001/..."."""
    times = defaultdict(list)
    command = [sys.executable, ROOT / "train.py", *command, "--stop_at=1", "--log_every=1",
               "--wandb=disabled"]
    for _ in range(runs):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as root, subprocess.Popen(
                command, text=True, stdout=subprocess.PIPE,
                env=os.environ | dict(FEWSTEP_OUTPUT_ROOT=root)) as run:
            for line in run.stdout:
                if line.startswith(("starting at", "it ")):
                    times[line.split("|")[0].strip()].append(time.perf_counter() - began)
        if run.returncode:
            raise common.BadInput(f"train.py ended with exit code {run.returncode}; its message is above")
    loaded = sorted({m.split(".")[0] for m in sys.modules if m[0] != "_"} - sys.stdlib_module_names)
    print("import train loads", *loaded)
    print(f"seconds from the start of the process to the line, {runs} runs, load {os.getloadavg()[0]:.1f}")
    for name, values in times.items():
        row(name, values)


def main(argv):
    if argv[:1] == ["--overhead"]:
        return overhead(*(int(common.number("--overhead", n, 2, 10 ** 5)) for n in argv[1:2]))
    if not argv or argv[0].startswith("-"):
        return print(__doc__)
    if "--startup" in argv:
        return startup([a for a in argv if a != "--startup"])
    method = train.load_method(argv[0])
    method.config = method.config | dict(blocks=20, iters=5)
    cfg, _, options = train.resolve(method, argv[1:])
    if options.keys() - {"preset"}:
        raise common.BadInput("tools/bench.py has no --help or --dry_run for a method file; train.py has")
    if cfg["recipes"] not in PASSES:
        raise common.BadInput(f"{argv[0]} has recipes {cfg['recipes']!r}; tools/bench.py lists the passes of "
                              f"{', '.join(PASSES)}: add an entry to PASSES")
    if cfg["blocks"] < 2 or cfg["iters"] < 1:
        raise common.BadInput(f"--blocks {cfg['blocks']} must be 2 or more, --iters {cfg['iters']} 1 or more")
    show(method, cfg, lambda nets, batch: PASSES[cfg["recipes"]](Passes(nets, batch), cfg))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except common.BadInput as e:
        train.quit_with(e)
