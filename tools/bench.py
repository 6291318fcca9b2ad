"""What an iteration of the trainer costs over the network passes that its method cannot do without.

    python tools/bench.py methods/dmd2.py [--net edm:digits --key value ...] [--blocks 20] [--iters 5]
    python tools/bench.py methods/dmd2.py --startup    from process start to the end of the first iteration
    python tools/bench.py --overhead [400]             clipping, guard and EMA of 400 tensors; device syncs
    torchrun --nproc_per_node 2 tools/bench.py --overhead 2     almost none: the loop, its log and its flags

The first form runs trainer.train itself and reads the clock in the calls that a method gets anyway. Blocks
of --iters iterations of one phase alternate with as many runs of the bare passes of that phase: the calls of
nets that it made, of the same shapes, and the same optimizer's step. The first block of each is not
counted. Weights are random: speed does not depend on them. One process, a temporary run folder. Times are ms
per iteration, medians over blocks [quartiles]; the ratio is that of neighbouring blocks. Memory is the peak
of the process, on CUDA of torch's allocator. There, every reading of the clock waits for the device.
"""
import contextlib
import copy
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, namedtuple
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common, logs, shard, train, trainer  # noqa: E401, E402


# ---- the passes --------------------------------------------------------------------------------------------

Leaf = namedtuple("Leaf", "shape dtype device requires_grad dual")     # what is kept of a tensor argument


class Calls:
    """What nets were called with, to be called with again: shapes, with or without a graph, in forward mode.
    That a method makes no calls that it could do without is for its tests to hold."""

    def __init__(self, nets):
        self.nets, self.seen = nets, []
        for name, net in nets.items():
            net.register_forward_hook(functools.partial(self.note, name), with_kwargs=True)

    def note(self, name, net, args, kwargs, out):
        leaves, tree = tree_flatten((args, kwargs))
        dual = torch._C._functorch.is_functorch_wrapped_tensor              # inside torch.func.jvp
        leaves = [Leaf(v.shape, v.dtype, v.device, v.requires_grad, dual(v)) if torch.is_tensor(v) else v
                  for v in leaves]
        graph = torch.is_grad_enabled() and any(v.requires_grad for v in (     # not of dual numbers
            net.parameters() if any(map(is_dual, leaves)) else tensors(out)))
        text = f"{name} forward{'-mode' * any(map(is_dual, leaves))}{' to a tap' * kwargs.get('stop', False)}"
        self.seen.append((name, text, tree, leaves, torch.is_grad_enabled(), graph))

    def take(self):
        """{name: [a function for each call]}; forgets them."""
        calls, found, self.seen = self.seen, {}, []
        for name, text, tree, leaves, grad, graph in calls:
            if graph:
                trained = any(p.requires_grad for p in self.nets[name].parameters())
                text += " + backward" if trained else " + input gradient"
            again = functools.partial(self.again, self.nets[name], tree, leaves, grad, graph)
            found.setdefault(text, []).append(again)
        return found

    def again(self, net, tree, leaves, grad, graph):
        made, duals = list(leaves), [i for i, v in enumerate(leaves) if is_dual(v)]
        for i, v in enumerate(leaves):
            if isinstance(v, Leaf):
                made[i] = torch.full(v.shape, 0.5 if v.dtype.is_floating_point else 0, dtype=v.dtype,
                                     device=v.device, requires_grad=v.requires_grad and not v.dual)

        def call(*values):
            for i, v in zip(duals, values):
                made[i] = v
            args, kwargs = tree_unflatten(made, tree)
            return tuple(tensors(net(*args, **kwargs)))
        with torch.set_grad_enabled(grad):
            at = tuple(made[i] for i in duals)
            out = torch.func.jvp(call, at, at)[0] if duals else call()
            if graph:
                out = [o for o in out if o.requires_grad]
                torch.autograd.backward(out, [torch.full_like(o, 1 / o.numel()) for o in out])


def tensors(out):
    return [v for v in tree_flatten(out)[0] if torch.is_tensor(v)]


def is_dual(leaf):
    return isinstance(leaf, Leaf) and leaf.dual


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
    """A method as the trainer sees it, its phases in blocks of `iters` iterations. After each block come the
    calls that it made, bare, or what passes(nets) -> {name: functions} says, and the optimizer."""

    def __init__(self, method, cfg, passes=None):
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
        self.stepped, self.counter, self.calls = -1, None, None

    def optimizers(self, nets, cfg):
        self.opts = self.method.optimizers(nets, cfg)
        def after(*_):
            self.lap("optimizer")
            if self.counter:                            # torch's RAdam reads counters that are on the CPU
                self.counter.n = self.held
        def before(*_):
            self.lap("average, clip + guard")
            self.held = self.counter and self.counter.n
        for opt in self.opts.values():
            opt.register_step_pre_hook(before)
            opt.register_step_post_hook(after)
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
        self.calls = self.calls or Calls(nets)
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
        calls = self.passes(self.nets) if self.passes else self.calls.take()
        for group in opt.param_groups:                  # these steps move no weight; the trainer sets lr anew
            group["lr"] = group["lr"] * 0.0
        for i in range(self.iters):
            with torch.autocast(device.type, amp, enabled=bool(amp)):
                self.lap("")
                for name, functions in calls.items():
                    for f in functions[i::self.iters]:
                        f()
                    self.lap(name)
            opt.step()
            opt.zero_grad(set_to_none=True)
        block["passes"] = {name: self.laps[name] for name in (*calls, "optimizer")}
        self.laps = defaultdict(float)
        block["times"] = {name: len(functions) / self.iters for name, functions in calls.items()}
        self.blocks[phase].append(block)
        self.calls.take()                               # of the calls just made
        if done == len(self.plan):
            raise Enough                                # out of the trainer, which would write a checkpoint


# ---- the tables ------------------------------------------------------------------------------------------

def row(name, values):
    low, mid, high = quantiles(values, n=4, method="inclusive")
    print(f"  {name:<50}{mid:10.3f}  [{low:.3f} {high:.3f}]")


def show(method, cfg, passes=None):
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
            for name in dict.fromkeys(name for b in blocks for name in b[kind]):
                n = sum(b["times"].get(name, 1) for b in blocks) / len(blocks)
                row(f"{name} x {n:.3g}" if n != 1 else name, [b[kind][name] / cfg["iters"] for b in blocks])
            row(f"= {kind}", [sum(b[kind].values()) / cfg["iters"] for b in blocks])
        if cfg["recipes"]:
            row("ratio", [sum(b["iteration"].values()) / sum(b["passes"].values()) for b in blocks])
    print(f"peak memory {logs.memory_gb(clocked.batch['x0'].device) * 1024:.0f} MB")


def overhead(tensors=400, blocks=20, iters=5):
    """A method of small tensors without work; for its passes the loops that trainer.py does without."""
    def loops(nets):
        params = copy.deepcopy(list(nets["student"].parameters()))
        pairs = list(zip(copy.deepcopy(params), params))
        for p in params:
            p.grad = torch.ones_like(p)
        clip = lambda: bool(torch.nn.utils.clip_grad_norm_(params, 10.0).isfinite())    # noqa: E731
        ema = lambda: [e.data.lerp_(p.data, 0.001) for e, p in pairs]                   # noqa: E731
        with Syncs() as syncs:
            clip(), ema()
        return {f"clip_grad_norm_, guard, {syncs.n} sync": [clip] * iters, "EMA by a loop": [ema] * iters}

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
    if cfg["blocks"] < 2 or cfg["iters"] < 1:
        raise common.BadInput(f"--blocks {cfg['blocks']} must be 2 or more, --iters {cfg['iters']} 1 or more")
    show(method, cfg)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except common.BadInput as e:
        train.quit_with(e)
