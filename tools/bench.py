"""What an iteration of the trainer costs over the network passes that its method cannot do without.

    python tools/bench.py methods/dmd2.py [--net edm:digits --key value ...] [--blocks 20] [--iters 5]
    python tools/bench.py methods/sft.py --net toy:tiny,depth=33 --batch_size 1     clip, guard, EMA of 400

trainer.train itself runs, with a clock in the calls that a method gets anyway. After each iteration its bare
passes run: the calls of nets that it made, of the same shapes, and the same optimizer's step. A block is
--iters iterations of one phase; the first of each is not counted, weights are random, the run folder is
temporary. Times are ms per iteration, medians over blocks [quartiles]. Memory is the peak of the process, on
CUDA of torch's allocator. There, every reading of the clock waits for the device. Of a causal net, frames
per second of its sampler besides, for clips twice as long as the data's: with the KV cache and without it.
"""
import contextlib
import functools
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict, namedtuple
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace

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
        call = functools.partial(again, net, tree, leaves, duals, torch.is_grad_enabled(), graph)
        self.seen.append((text, call))

    def take(self):
        """{name: [a function for each call]}; forgets them."""
        found, self.seen = self.seen, []
        return {name: [call for text, call in found if text == name] for name, _ in found}


def again(net, tree, leaves, duals, grad, graph):
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


class Uncached(torch.nn.Module):
    """A causal net whose cache are the finished frames: it passes them again in every call."""

    def __init__(self, net):
        super().__init__()
        self.net, self.schedule, self.pred, self.chunk = net, net.schedule, net.pred, net.chunk

    def forward(self, x_t, t, cond, start=0, cache=None, write=False):
        # (B, F, C, H, W)
        x = torch.cat([cache["kv"][0], x_t.transpose(1, 2)], 1) if cache else x_t.transpose(1, 2)
        if write:
            return dict(cache=dict(pos=torch.arange(x.shape[1]), kv=[x]))
        t = torch.cat([t.new_zeros(len(t), start), t[:, None].expand(-1, x_t.shape[2])], 1)         # (B, F)
        return self.net(x.transpose(1, 2), t, cond)[:, :, start:]


@torch.no_grad()
def frames_per_second(method, cfg, net, batch, device):
    """{"cached", "uncached": (the clips, frames per second of each of --blocks)}, of the same noise."""
    b, c, f, *size = batch["x0"].shape
    noise, speed = common.noise_fn(0, range(b), (c, 2 * f, *size), device), defaultdict(list)
    for _ in range(cfg["blocks"] + 1):
        for name, one in ("cached", net.eval()), ("uncached", Uncached(net)):
            start = time.perf_counter()
            x0 = method.sample(one, noise, batch, cfg | dict(window=0), cfg["steps"])
            float(x0.sum())                             # waits for the device
            speed[name].append((x0, 2 * b * f / (time.perf_counter() - start)))
    return {name: (runs[0][0], [fps for _, fps in runs[1:]]) for name, runs in speed.items()}


class Syncs(TorchFunctionMode):
    """Counts calls that make the host wait for the device; not those of an optimizer: torch's RAdam reads
    counters that are on the CPU."""
    names, n, on = "item tolist __bool__ __float__ __int__ __index__ cpu numpy nonzero equal".split(), 0, True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += self.on and func.__name__ in self.names
        return func(*args, **(kwargs or {}))


class Enough(BaseException):
    """No error (the trainer saves on those), and no Ctrl-C, which must still end the program."""


def measure(method, cfg):
    """Runs the trainer; -> {phase: [(ms of an iteration's parts, ms of its passes, number of each) of a
    block]}, sums over --iters iterations; {phase: syncs of its first iteration}; the device; the speed of a
    causal net's sampler."""
    own = defaultdict(list)
    for it in range(cfg["max_iter"]):                   # the method's own iterations of each phase, in order
        own[method.phase(it, cfg)].append(it)
    iters, every = cfg["iters"], range(cfg["blocks"] + 1)
    blocks, syncs = {phase: [(Counter(), Counter(), Counter()) for _ in every] for phase in own}, {}
    plan = [(its[(k * iters + i) % len(its)], phase, blocks[phase][k])
            for k in every for phase, its in own.items() for i in range(iters)]
    now = SimpleNamespace(it=-1, clock=0.0, opts={}, calls=None, into={}, device=None)
    counter = contextlib.ExitStack()

    def lap(name, count=True):
        """What ran since the last lap counts as `name`, in ms. count: the syncs of what follows?"""
        Syncs.on = count
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        before, now.clock = now.clock, time.perf_counter()
        if name:
            now.into[name] += (now.clock - before) * 1e3

    def watched_optimizers(nets, cfg):
        now.opts = method.optimizers(nets, cfg)
        for opt in now.opts.values():
            opt.register_step_pre_hook(lambda *_: lap("average, clip + guard", count=False))
            opt.register_step_post_hook(lambda *_: lap("optimizer"))
        return now.opts

    def watched_phase(it, cfg):
        """The trainer's first call in an iteration, so also the end of the one before."""
        if it == now.it + 1 > 0:
            lap("EMA + log")
            counter.close()
            passes(*plan[now.it][1:])
            if it == len(plan):
                raise Enough                            # out of the trainer, which would write a checkpoint
        _, phase, block = plan[min(it, len(plan) - 1)]
        now.into = block[0]
        lap("")
        return phase

    def watched_step(nets, batch, it, cfg):
        lap("data + encode")
        its_own, phase, _ = plan[it]
        now.it, now.device, now.calls = it, batch["x0"].device, now.calls or Calls(nets)
        now.net, now.batch = nets["student"], batch
        loss, logged = method.step(nets, batch, its_own, cfg)
        lap("step")
        after = torch.autograd.Variable._execution_engine.queue_callback
        loss.register_hook(lambda grad: after(lambda: lap("backward")))
        if phase not in syncs and not cfg["compile"]:   # until the next phase()
            syncs[phase] = counter.enter_context(Syncs())
        return loss, logged

    def passes(phase, block):
        """The calls of an iteration again, and its optimizer."""
        opt, amp, calls = now.opts[phase], shard.DTYPES.get(cfg["amp"]), now.calls.take()
        for group in opt.param_groups:                  # this step moves no weight; the trainer sets lr anew
            group["lr"] = group["lr"] * 0.0
        now.into = block[1]
        lap("")
        with torch.autocast(now.device.type, amp, enabled=bool(amp)):
            for name, functions in calls.items():
                for f in functions:
                    f()
                lap(name)
        opt.step()
        opt.zero_grad(set_to_none=True)
        del block[1]["average, clip + guard"]
        block[2].update({name: len(functions) for name, functions in calls.items()})
        now.calls.take()                                # of the calls just made

    watched = SimpleNamespace(**vars(method) | dict(
        init=lambda cfg: {}, step=watched_step, phase=watched_phase, optimizers=watched_optimizers))
    off = dict.fromkeys(("stop_at", "save_every", "val_every", "sample_every", "log_every"), 0)
    off |= dict(max_iter=max(cfg["max_iter"], len(plan) + 1), wandb="disabled", log_level="warning")
    with tempfile.TemporaryDirectory() as root, contextlib.suppress(Enough), counter:
        os.environ["FEWSTEP_OUTPUT_ROOT"] = root
        trainer.train(watched, cfg | off)
    speed = (frames_per_second(method, cfg, now.net, now.batch, now.device)
             if getattr(now.net, "chunk", 0) else {})
    return blocks, {phase: found.n for phase, found in syncs.items()}, now.device, speed


def row(name, values):
    low, mid, high = quantiles(values, n=4, method="inclusive")
    print(f"  {name:<50}{mid:10.3f}  [{low:.3f} {high:.3f}]")


def main(argv):
    if not argv or argv[0].startswith("-"):
        return print(__doc__)
    method = train.load_method(argv[0])
    method.config = method.config | dict(blocks=20, iters=5)
    cfg, _, options = train.resolve(method, argv[1:])
    iters = cfg["iters"]
    if options.keys() - {"preset"} or cfg["blocks"] < 2 or iters < 1:
        raise common.BadInput("bench.py takes keys, --preset, --blocks (2 or more) and --iters (1 or more)")
    print(f"net {cfg['net']}, batch {cfg['batch_size']}, {cfg['amp'] or 'float32'}, {cfg['blocks']} blocks",
          f"of {iters}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}", flush=True)
    found, syncs, device, speed = measure(method, cfg)
    for phase, (_, *blocks) in found.items():
        print(f"{phase}: {syncs.get(phase, '?')} device sync(s)")
        for k, kind in (1, "passes"), (0, "iteration"):
            for name in dict.fromkeys(name for b in blocks for name in b[k]):
                n = sum(b[2].get(name, iters) for b in blocks) / iters / len(blocks)
                row(f"{name} x {n:.3g}" if n != 1 else name, [b[k][name] / iters for b in blocks])
            row(f"= {kind}", [b[k].total() / iters for b in blocks])
        row("ratio", [b[0].total() / b[1].total() for b in blocks])
    for name, (_, fps) in speed.items():
        row(f"frames per second, {name}", fps)
    print(f"peak memory {logs.memory_gb(device) * 1024:.0f} MB")


if __name__ == "__main__":
    train.run(main)
