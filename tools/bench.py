"""What an iteration of the trainer costs over the network passes that its method cannot do without.

    python tools/bench.py methods/dmd2.py [--net edm:digits --key value ...] [--blocks 20] [--iters 5]
    python tools/bench.py methods/sft.py --net toy:tiny,depth=33 --batch_size 1     clip, guard, EMA of 400
    torchrun --nproc_per_node 2 tools/bench.py methods/sft.py --net toy:tiny        loop, log, preemption

trainer.train itself runs, with a clock in the calls that a method gets anyway. Blocks of --iters iterations
of one phase alternate with as many runs of its bare passes: the calls of nets that it made, of the same
shapes, and the same optimizer's step. The first block of each is not counted, weights are random, the run
folder is temporary. Times are ms per iteration, medians over blocks [quartiles]; the ratio is that of
neighbouring blocks. Memory is the peak of the process, on CUDA of torch's allocator. There, every reading of
the clock waits for the device.
"""
import contextlib
import functools
import os
import sys
import tempfile
import time
from collections import defaultdict, namedtuple
from pathlib import Path
from statistics import quantiles

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common, logs, shard, train, trainer  # noqa: E401, E402


Leaf = namedtuple("Leaf", "size dtype device requires_grad")            # what is kept of a tensor argument


class Calls:
    """What nets were called with, to be called with again: shapes, with or without a graph, in forward mode.
    That a method makes no calls that it could do without is for its tests to hold."""

    def __init__(self, nets):
        self.seen = []
        for name, net in nets.items():
            net.register_forward_hook(functools.partial(self.note, name), with_kwargs=True)

    def note(self, name, net, args, kwargs, out):
        leaves, tree = tree_flatten((args, kwargs))
        dual = torch._C._functorch.is_functorch_wrapped_tensor              # inside torch.func.jvp
        duals = [i for i, v in enumerate(leaves) if torch.is_tensor(v) and dual(v)]
        leaves = [Leaf(v.shape, v.dtype, v.device, v.requires_grad and i not in duals)
                  if torch.is_tensor(v) else v for i, v in enumerate(leaves)]
        trained = any(p.requires_grad for p in net.parameters())
        graph = torch.is_grad_enabled() and (                               # dual numbers do not say
            trained if duals else any(v.requires_grad for v in tensors(out)))
        text = f"{name} forward" + "-mode" * bool(duals) + " to a tap" * kwargs.get("stop", False)
        text += (" + backward" if trained else " + input gradient") * graph
        call = functools.partial(call_again, net, tree, leaves, duals, torch.is_grad_enabled(), graph)
        self.seen.append((text, call))

    def take(self):
        """{name: [a function for each call]}; forgets them."""
        found = defaultdict(list)
        for text, call in self.seen:
            found[text].append(call)
        self.seen = []
        return found


def call_again(net, tree, leaves, duals, grad, graph):
    made = [torch.full(v.size, 0.5 if v.dtype.is_floating_point else 0, dtype=v.dtype, device=v.device,
                       requires_grad=v.requires_grad) if isinstance(v, Leaf) else v for v in leaves]

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


class Syncs(TorchFunctionMode):
    """Counts calls that make the host wait for the device; not those of an optimizer: torch's RAdam reads
    counters that are on the CPU."""
    names, n, on = "item tolist __bool__ __float__ __int__ __index__ cpu numpy nonzero equal".split(), 0, True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += self.on and func.__name__ in self.names
        return func(*args, **(kwargs or {}))


class Enough(BaseException):
    """No error (the trainer saves on those), and no Ctrl-C, which must still end the program."""


class Clocked:
    """A method as the trainer sees it, its phases in blocks of cfg["iters"] iterations, each followed by the
    bare calls that it made and the optimizer."""

    def __init__(self, method, cfg):
        self.method, self.iters, self.init = method, cfg["iters"], lambda cfg: {}
        self.path, self.source = method.path, method.source
        self.build, self.sample = method.build, method.sample
        turns = defaultdict(list)                       # the method's own iterations of each phase, in order
        for it in range(cfg["max_iter"]):
            turns[method.phase(it, cfg)].append(it)
        self.plan = [(own[(block * self.iters + i) % len(own)], phase) for block in range(cfg["blocks"] + 1)
                     for phase, own in turns.items() for i in range(self.iters)]
        off = dict.fromkeys(("stop_at", "save_every", "val_every", "sample_every", "log_every"), 0)
        off["max_iter"] = max(cfg["max_iter"], len(self.plan) + 1)
        self.cfg = cfg | off | dict(wandb="disabled", log_level="warning")
        self.blocks, self.syncs, self.laps = {phase: [] for phase in turns}, {}, defaultdict(float)
        self.then, self.stepped, self.calls = time.perf_counter(), -1, None
        self.counter = contextlib.ExitStack()

    def run(self):
        with tempfile.TemporaryDirectory() as root, contextlib.suppress(Enough), self.counter:
            os.environ["FEWSTEP_OUTPUT_ROOT"] = root
            trainer.train(self, self.cfg)

    def optimizers(self, nets, cfg):
        self.opts = self.method.optimizers(nets, cfg)
        for opt in self.opts.values():
            opt.register_step_pre_hook(lambda *_: self.lap("average, clip + guard", count=False))
            opt.register_step_post_hook(lambda *_: self.lap("optimizer"))
        return self.opts

    def phase(self, it, cfg):
        """The trainer's first call in an iteration, so also the end of the one before."""
        if it > 0 and it == self.stepped + 1:
            self.lap("EMA + log")
            self.counter.close()
            if it % self.iters == 0:
                self.end(self.plan[it - 1][1])
            if it == len(self.plan):
                raise Enough                            # out of the trainer, which would write a checkpoint
            self.lap("")
        return self.plan[min(it, len(self.plan) - 1)][1]

    def step(self, nets, batch, it, cfg):
        self.lap("data + encode")
        self.batch, self.stepped, (own, phase) = batch, it, self.plan[it]
        self.calls = self.calls or Calls(nets)
        loss, logged = self.method.step(nets, batch, own, cfg)
        self.lap("step")
        after = torch.autograd.Variable._execution_engine.queue_callback
        loss.register_hook(lambda grad: after(lambda: self.lap("backward")))
        if phase not in self.syncs and not cfg["compile"]:  # in an uncounted block, until the next phase()
            self.syncs[phase] = self.counter.enter_context(Syncs())
        return loss, logged

    def lap(self, name, count=True):
        """What ran since the last lap counts as `name`, in ms. `count`: the syncs of what follows?"""
        Syncs.on = count
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if name:
            self.laps[name] += (now - self.then) * 1e3
        self.then = now

    def end(self, phase):
        """The end of a block: note what it took, run the passes."""
        opt, device, amp = self.opts[phase], self.batch["x0"].device, shard.DTYPES.get(self.cfg["amp"])
        block, self.laps, calls = dict(iteration=self.laps), defaultdict(float), self.calls.take()
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


def row(name, values):
    low, mid, high = quantiles(values, n=4, method="inclusive")
    print(f"  {name:<50}{mid:10.3f}  [{low:.3f} {high:.3f}]")


def main(argv):
    if not argv or argv[0].startswith("-"):
        return print(__doc__)
    method = train.load_method(argv[0])
    method.config = method.config | dict(blocks=20, iters=5)
    cfg, _, options = train.resolve(method, argv[1:])
    if options.keys() - {"preset"} or cfg["blocks"] < 2 or cfg["iters"] < 1:
        raise common.BadInput("bench.py takes keys, --preset, --blocks (2 or more) and --iters (1 or more)")
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")
    print(f"net {cfg['net']}, batch {cfg['batch_size']}, {cfg['amp'] or 'float32'}, {cfg['blocks']} blocks",
          f"of {cfg['iters']}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}", flush=True)
    clocked = Clocked(method, cfg)
    clocked.run()
    for phase, (_, *blocks) in clocked.blocks.items():
        print(f"{phase}: {clocked.syncs[phase].n if phase in clocked.syncs else '?'} device sync(s)")
        for kind in ("passes", "iteration"):
            for name in dict.fromkeys(name for b in blocks for name in b[kind]):
                n = sum(b["times"].get(name, 1) for b in blocks) / len(blocks)
                row(f"{name} x {n:.3g}" if n != 1 else name, [b[kind][name] / cfg["iters"] for b in blocks])
            row(f"= {kind}", [sum(b[kind].values()) / cfg["iters"] for b in blocks])
        row("ratio", [sum(b["iteration"].values()) / sum(b["passes"].values()) for b in blocks])
    print(f"peak memory {logs.memory_gb(clocked.batch['x0'].device) * 1024:.0f} MB")


if __name__ == "__main__":
    train.run(main)
