"""Memory of a run before it starts: what a rank holds all the time, and the most that a micro-step adds.

State is counted by shapes. A step of each phase then runs forward and backward on fake tensors, which have
shapes and storages but no memory: a storage counts from the operation that makes it until nothing holds it.
What that leaves out: the space inside kernels, fragments of an allocator, CUDA's context (hence `fits`), and
draws that change a step's size (the length of a rollout): it is that of the phase's first iteration.
"""
import math
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import augment
import shard
import startup

DEVICES = 24, 40, 80, 141                               # GB; a tenth of each is left for what is not counted
TOKENS = dict(sd=77, cogvideox=226)                     # of a caption; 512 in other families


class Live(TorchDispatchMode):
    """now: the bytes that operations under it have made and something still holds; peak: the most of them.
    What is made outside does not count, nor what shares its storage."""

    def __init__(self, outside=()):
        super().__init__()
        self.known, self.now, self.peak = weakref.WeakSet(x.untyped_storage() for x in outside), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if torch.is_tensor(x) and (storage := x.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.change(storage.nbytes())
                weakref.finalize(storage, self.change, -storage.nbytes())
        return out

    def change(self, n):
        self.now += n
        self.peak = max(self.peak, self.now)


def example(cfg, student, n, tokens=0, views=257):
    """A batch of n as encode gives it, drawn, of every condition that the net can take: captions of so many
    tokens (0: as the family's pipeline has them), so many vectors of CLIP's view of the first frame."""
    has, (c, f, *size) = lambda name: getattr(student, name, 0), student.x_shape
    tokens = tokens or TOKENS.get(cfg["net"].partition(":")[0], 512)
    shapes = dict(text=(tokens, has("text_dim")), pooled=(has("pooled_dim"),), augment=(augment.dim(cfg),),
                  image=(views, has("image_dim")), control=(has("control"), f, *size),     # a 0: has none
                  first_frame=(c * bool(has("first")), 1 if has("first") == "replace" else f, *size),
                  condition_frames=(c * bool(cfg["given_frames"]), f, *size))
    none, path_t = torch.full((n,), -1), torch.tensor(cfg.get("t_list", ()), dtype=torch.float64)
    cond = {k: torch.randn(n, *shape) for k, shape in shapes.items() if 0 not in shape}
    cond |= dict(label=torch.arange(n) % cfg["classes"] if cfg["classes"] else none)
    if cfg["given_frames"]:
        mask = (torch.arange(f) < cfg["given_frames"]).float().view(-1, 1, 1)
        cond["condition_mask"] = mask.expand(n, 1, -1, 1, 1)
    return dict(x0=torch.randn(n, c, f, *size), cond=cond, uncond=cond | dict(label=none), id=torch.arange(n),
                path=torch.randn(n, len(path_t), c, f, *size), path_t=path_t)


def peak(method, cfg, nets, batch, it):
    """(bytes a micro-step adds at most to nets, batch and the gradients it leaves; bytes of those), of nets
    and a batch that are real or fake."""
    opt = method.optimizers(nets, cfg)[method.phase(it, cfg)]
    mine = {p for group in opt.param_groups for p in group["params"]}
    keep = cfg["accum"] == 1 and cfg["parallel"] != "fsdp"      # else gradients are there before, or in rows
    every = [p for net in nets.values() for p in net.parameters()]
    for p in every:
        p.requires_grad_(p in mine)
        if p in mine and not keep:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    buffers = [b for net in nets.values() for b in net.buffers()]
    with Live([*every, *buffers, *(x for x in tree_iter(batch) if torch.is_tensor(x))]) as live:
        startup.call(method, nets, batch, it, cfg)[0].backward()
    grads = sum(p.numel() * 4 for p in mine)
    return max(live.peak - keep * grads, 0), grads


def faked(cfg, nets):
    """In place: the nets on fake tensors of the CPU, in the type they compute in, blocks as --recompute."""
    for net in nets.values():
        found = shard.units(net)
        for module in found if cfg["recompute"] else ():
            module.forward = shard.recomputed(module.forward)
        dtype = shard.DTYPES.get(cfg["amp"]) if cfg["parallel"] == "fsdp" and found else None
        for module in net.modules():
            for key, p in module._parameters.items():
                module._parameters[key] = p if p is None else torch.nn.Parameter(
                    torch.empty_like(p, dtype=dtype, device="cpu"), p.requires_grad)
            for key, b in module._buffers.items():
                module._buffers[key] = b if b is None else torch.empty_like(b, device="cpu")


def rows(net, cfg, world):
    """Bytes of a rank's part of every parameter (FSDP2 fills up the last rank's rows) and of the buffers:
    {parameter: bytes}, bytes."""
    split = cfg["parallel"] == "fsdp" and bool(shard.units(net))
    shares = (cfg["shard_size"] or world) if split else 1
    part = lambda p: math.ceil(len(p) / shares) * p[0].numel() if split else p.numel()          # noqa: E731
    return {p: part(p) * p.element_size() for p in net.parameters()}, sum(
        b.numel() * b.element_size() for b in net.buffers())


def gathered(cfg, net):
    """Bytes of what FSDP2 holds whole at a time: the root's own, a unit and the next (all, without reshard),
    and a trained unit's gradients in float32."""
    found = [m for m in shard.units(net) if m is not net]
    if cfg["parallel"] != "fsdp" or not shard.units(net):
        return 0
    units = [sum(p.numel() for p in m.parameters()) for m in found] or [0]
    whole = sum(p.numel() for p in net.parameters())
    most = whole - sum(units) + 2 * max(units) if cfg["reshard"] else whole
    trained = any(p.requires_grad for p in net.parameters())
    return most * (2 if cfg["amp"] else 4) + 4 * trained * max(units)


def per_rank(method, cfg, nets, world, trial=True):
    """({what: GB per rank}, "" or why a step could not be tried, when `step` is nan). nets: on the meta
    device, left useless by the trial. `gradients` and `step` are of the phase that takes the most."""
    parts = {name: rows(net, cfg, world) for name, net in nets.items()}
    size = {p: b for own, _ in parts.values() for p, b in own.items()}
    of = {phase: [p for g in opt.param_groups for p in g["params"]]
          for phase, opt in method.optimizers(nets, cfg).items()}
    rank = {phase: sum(size[p] for p in params) for phase, params in of.items()}
    student, buffers = parts["student"]
    gb = dict(weights=sum(size.values()) + sum(b for _, b in parts.values()), moments=2 * sum(rank.values()),
              ema=len(cfg["ema"]) * (sum(student.values()) + buffers))
    gather, why, most = max(gathered(cfg, net) for net in nets.values()), "", (0, 0)
    whole = {phase: sum(size[p] for p in params if size[p] == p.numel() * 4) for phase, params in of.items()}
    if trial:
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                faked(cfg, nets)
                batch = example(cfg, nets["student"], n := cfg["batch_size"] // (world * cfg["accum"]))
            batch["cond"]["label"] = batch["uncond"]["label"] = torch.zeros(n, dtype=torch.int64)   # are read
            firsts = {method.phase(it, cfg): it for it in reversed(range(min(cfg["max_iter"], 1000)))}
            for phase, it in firsts.items():
                flat = whole[phase] if world > 1 else 0         # average_gradients copies them
                step = max(peak(method, cfg, nets, batch, it)[0] + gather, flat)
                most = max(most, (rank[phase] + step, rank[phase]))
        except Exception as e:      # where a step reads values, of which fake tensors have none
            why = f"{type(e).__name__} {str(e).partition(chr(10))[0]}"
            most = math.nan, max(rank.values())
    gb |= dict(gradients=most[1], step=most[0] - most[1]) if trial else dict(gradients=max(rank.values()))
    gb |= dict.fromkeys(("weights", "moments", "ema", "gradients"), 0.0) if cfg["offload"] else {}
    return {k: v / 2 ** 30 for k, v in gb.items()}, why


def fits(gb):
    """The smallest of the devices that holds it, in words."""
    held = [size for size in DEVICES if sum(gb.values()) <= 0.9 * size]
    return f"{held[0]} GB" if held else f"none of {DEVICES[-1]} GB"


def line(gb, why):
    """What --dry_run says of it."""
    parts = ", ".join(f"{k} {v:.2f}" for k, v in gb.items())
    return f"memory per rank: {sum(gb.values()):.2f} GB = {parts} (step: by trial, of a micro-step)\n" + (
        f"no step could be tried ({why})" if why else f"smallest device that holds it: {fits(gb)}")
