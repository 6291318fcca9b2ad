"""Validation and sample grids, during training and for sample.py. Every rank calls these alike."""
import contextlib

import torch

import common
import data
import logs
import startup
from nets import encoders


@contextlib.contextmanager
def judging(nets):
    """Eval mode and no gradients; afterwards every module is in the mode it was."""
    modes = [(m, m.training) for net in nets for m in net.modules()]
    for net in nets:
        net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def validate(method, nets, cfg, dataset, done, rank, world, gloo, device, stopping):
    """{val/[setting/]phase/name: mean over batches and ranks}, or None if asked to stop in between. Calls
    step once per phase and batch, with its own seed."""
    meter, seed, its = logs.Meter(gloo), cfg["seed"], {}
    for it in range(done, done + min(1000, cfg["max_iter"])):   # first turn of every phase from here on
        its.setdefault(method.phase(it, cfg), it)
    with judging(nets.values()):
        for label, changes in startup.val_settings(cfg):
            loader = data.Loader(dataset, cfg | dict(workers=0), 0, rank, world, cfg["accum"], seed)
            for number in range(cfg["val_batches"]):
                for micro in range(cfg["accum"]):
                    batch = encoders.encode(next(loader), cfg, device)
                    for phase, it in its.items():
                        common.seed_default(common.hash_seed(seed, "val", number, micro * world + rank))
                        loss, parts = startup.call(method, nets, batch, it, cfg | changes)
                        values = dict(loss=loss) | parts
                        meter.add({f"val/{label}{phase}/{key}": v for key, v in values.items()})
                if stopping():
                    return None
    return meter.flush()


def own_frames(net):
    """Whether a net of video takes the frames that its clips begin with from cond; a causal one takes them
    from its cache."""
    return bool(getattr(net, "first", "") or getattr(net, "video2world", False))


def draw_samples(method, net, cfg, ids, labels, steps, seed, device, shape=None, texts={}, first=None):
    """x0 (B, *shape) of samples `ids` (list of ints): sample i depends on (seed, i), its label and its text
    alone; texts as encoders.conditions takes them; first: pixels (B, c, f, H, W) that clips begin with."""
    given = first is not None and own_frames(net)
    cond, uncond = encoders.conditions(labels, cfg, device, texts | dict(image=first) if given else texts)
    if first is not None and not given:
        first = encoders.moments(first, cfg, device) if cfg.get("encoders") else encoders.scaled(first)
        cond["first_frame"] = uncond["first_frame"] = first[:, :net.x_shape[0]].to(device)
    noise = common.noise_fn(seed, ids, shape or net.x_shape, device)
    return method.sample(net, noise, dict(cond=cond, uncond=uncond, id=torch.tensor(ids)), cfg, steps)


def draw_grid(method, net, cfg, device, rank, world, gloo, dataset=None, rows=8):
    """Eight samples of each of the first ten classes, one class per column, or for the texts of the first
    64 samples of a data set that has some, always from the same noise: (x0 on the CPU, columns). Each rank
    draws a part, all parts are as long. Clips are two of each class, one in a row."""
    columns = min(cfg["classes"], 10) or 8
    video = len(net.x_shape) == 4
    rows = 2 if video else rows
    n, each = rows * columns, -(-rows * columns // world)
    ids = [i % n for i in range(rank * each, (rank + 1) * each)]
    labels = torch.tensor([i % columns if cfg["classes"] else -1 for i in ids])
    some = [i % len(dataset) for i in ids] if dataset else []
    texts = dataset.texts(some) if hasattr(dataset, "texts") else {}
    if dataset and encoders.asks(cfg):
        texts[dataset.kind] = torch.stack([torch.as_tensor(dataset.get(i)[0]) for i in some])
    with judging([net]), startup.autocast(cfg, device):
        x0 = draw_samples(method, net, cfg, ids, labels, cfg["steps"], cfg["seed"], device, texts=texts)
    return torch.cat(common.everyone(x0.float().cpu(), gloo))[:n], 1 if video else columns
