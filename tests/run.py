"""Shared by the tests: a tiny run of any method file, its files, new processes for ranks."""
import copy
import itertools
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckpt
import common
import data
import fill
import startup
import train
import trainer
from nets import encoders

sys.path.insert(0, str(trainer.ROOT / "tools"))
import make_pairs  # noqa: E402

METHODS = sorted(p.stem for p in (trainer.ROOT / "methods").glob("*.py"))
SFT, DMD2 = trainer.ROOT / "methods" / "sft.py", trainer.ROOT / "methods" / "dmd2.py"
TINY = dict(net="toy:tiny", device="cpu", batch_size=8, max_iter=12, workers=0, log_every=1, val_every=0,
            val_batches=1, sample_every=0, save_every=0, wandb="disabled", log_level="warning", group="tests")
TIMING = ("data_ms", "ms_per_it", "img_per_s", "mem_gb", "eta_s")   # keys of a log line that no run repeats
# what a method needs besides: its kind of toy net, fewer steps than its own sampler takes
EXTRA = dict(cm=dict(guidance=2.0),   # else what is its teacher learns from rounding errors
             mean_flow=dict(guidance=2.0), scm=dict(tangent_warmup=0), f_distill=dict(ratio_bins=0),
             sft=dict(steps=2, dropout=0.1), ladd=dict(gan_loss="softplus", lr_disc=1e-4, r1_weight=1.0),
             causal_sft=dict(net="toy:video", steps=2), causal_kd=dict(net="toy:video"),
             causvid=dict(net="toy:video", gan_weight=0.5, student=""),
             self_forcing=dict(net="toy:video", gan_weight=0.5, frames_max=8, student=""))

def load(name):
    """A fresh copy of a method module, which a test may patch."""
    return train.load_method(trainer.ROOT / "methods" / f"{name}.py")

def config(method, **changes):
    """The method's own config on the toy net, with changes; a method that has a teacher gets a toy one."""
    cfg = train.resolve(method, [])[0]
    extra = TINY | EXTRA.get(method.path.stem, {})
    net = (extra | changes)["net"]
    if method.config.get("teacher"):
        extra |= {key: teacher(net) for key in ("teacher", "stage1") if key in {*method.config} - {*changes}}
    if "data" in method.config:
        extra["data"] = (pairs if "kd" in method.config["recipes"] else clips)(net)
    assert {*extra, *changes} <= {*cfg}, {*extra, *changes} - {*cfg}
    return cfg | extra | changes

def setup(name, /, **changes):
    method = load(name)
    return method, config(method, **changes)

def stepping(name, after):
    """A method whose step(nets, batch, it, cfg) returns after(what it did return, nets, it)."""
    step = (method := load(name)).step
    method.step = lambda nets, batch, it, cfg: after(step(nets, batch, it, cfg), nets, it)
    return method

def teacher(spec):
    """A file with weights of a toy net, always the same."""
    file = Path(os.environ["FEWSTEP_OUTPUT_ROOT"], "teachers", f"{spec}.pth")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        net = common.make_net(spec, label_dim=10)
        fill.draw(net, copy.deepcopy(net), "teacher", 1)
        ckpt.save(file, net.state_dict())
    return str(file)

def pairs(spec):
    """A folder of 40 pairs of teacher(spec)."""
    folder = Path(os.environ["FEWSTEP_OUTPUT_ROOT"], "pairs", spec, "digits")
    if not folder.exists():
        video = f" --data {clips(spec)} --path_t 0.999,0.9375,0.8333,0.625" if "video" in spec else ""
        make_pairs.main(f"--net {spec} --teacher {teacher(spec)} --out {folder} --pairs 40 --steps 2{video}"
                        .split())
    return str(folder)

def clips(spec):
    """A file with 40 labelled clips for a net of video: noise that drifts, in [-1, 1]."""
    file = Path(os.environ["FEWSTEP_OUTPUT_ROOT"], f"{spec}.npz")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        draw, shape = np.random.default_rng(0), common.make_net(spec).x_shape
        still, moving = draw.uniform(-0.5, 0.5, (2, 40, *shape))
        np.savez(file, x=(still[:, :, :1] + moving).astype(np.float32), y=np.arange(40) % 10)
    return str(file)

def nets_of(method, cfg, device="meta"):
    """The nets of a fresh start, filled as the trainer does it."""
    cfg["classes"] = 10 if cfg["classes"] < 0 else cfg["classes"]
    with torch.device(device):
        nets = method.build(cfg)
    inits, models = method.init(cfg), {n: copy.deepcopy(net) for n, net in nets.items()}
    for net in nets.values():
        net.to_empty(device="cpu")
    sources = {s: ckpt.read(ckpt.resolve(s)) for s in inits.values() if s not in nets}
    fill.fill(nets, models, inits, sources, None, {}, cfg, "cpu")
    return nets

def turn(nets, opts, phase):
    """requires_grad for one phase, as the trainer sets it; no gradients left."""
    for name, opt in opts.items():
        for p in (p for g in opt.param_groups for p in g["params"]):
            p.requires_grad_(name == phase)
            p.grad = None

def batch_of(cfg, it=0):
    """The first micro-batch of iteration `it`."""
    return encoders.encode(next(data.Loader(data.load(cfg), cfg, it)), cfg, "cpu")

def phases(method, cfg):
    """{phase: its first iteration}"""
    return {method.phase(it, cfg): it for it in reversed(range(100))}

def owned(method, nets, cfg):
    """{phase: names of the parameters that its optimizer holds}"""
    name = {p: f"{n}.{k}" for n, net in nets.items() for k, p in net.named_parameters()}
    return {phase: {name[p] for g in opt.param_groups for p in g["params"]}
            for phase, opt in method.optimizers(nets, cfg).items()}

def gradients(nets):
    """{net.parameter: gradient} of those that have one."""
    return {f"{n}.{k}": p.grad for n, net in nets.items() for k, p in net.named_parameters()
            if p.grad is not None}

def one_step(method, nets, cfg, it, batch=None):
    """Loss, logs and gradients of iteration `it` after a reseed, without an update."""
    turn(nets, method.optimizers(nets, cfg), method.phase(it, cfg))
    common.seed_default(0)
    loss, logs = method.step(nets, batch or batch_of(cfg), it, cfg)
    loss.backward()
    return loss, logs, gradients(nets)

def run(method, cfg):
    """Trains; -> nets (those of the trainer, with what they hold now), folder, lines of metrics.jsonl."""
    with pytest.MonkeyPatch.context() as patch:
        built = spy(patch, method, "build")
        trainer.train(method, dict(cfg))
    folder = startup.output_folder(cfg)
    return SimpleNamespace(nets=built[-1][1], folder=folder, lines=lines(folder))

def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

def its(lines, key="loss"):
    """Iterations of the lines with a key that starts so."""
    return [line["it"] for line in lines if any(k.startswith(key) for k in line)]

def assert_alike(ours, others, rel=0.0):
    """The same lines, up to this relative error and the clock."""
    a, b = ([{k: v for k, v in line.items() if k not in TIMING} for line in each] for each in (ours, others))
    assert b == [pytest.approx(line, rel=rel, abs=0) for line in a]

def saved(folder, it):
    return ckpt.load(ckpt.path(folder / "checkpoints", it))

def refused(f, *args, says=(), error=common.BadInput, **kw):
    """The sentence, with every word of `says`, of the BadInput that f raises. The frames of the error, which
    hold the lock of a run, are gone afterwards."""
    try:
        f(*args, **kw)
    except error as e:
        sentence = str(e)
        assert "\n" not in sentence and [word for word in says if str(word) not in sentence] == [], sentence
        return sentence
    raise AssertionError("went through")

def spy(patch, thing, name):
    """A list that grows by (arguments, result) with every call of thing.name."""
    calls, f = [], getattr(thing, name)
    def watched(*args, **kw):
        calls.append((args, f(*args, **kw)))
        return calls[-1][1]
    patch.setattr(thing, name, watched)
    return calls

def differing(a, b, where=""):
    """Paths at which two nested values are not the same, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        apart = [f"{where}/{k} only in one" for k in {*a} ^ {*b}]
        return apart + [d for k in a if k in b for d in differing(a[k], b[k], f"{where}/{k}")]
    if torch.is_tensor(a) and torch.is_tensor(b):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    return [] if a == b else [where]

# ---- processes
SERVER = multiprocessing.get_context("forkserver")      # plain fork breaks autograd where there is a GPU
SERVER.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "pytest"])    # dynamo: optimizers import it

def start(world, folder, check, *args):
    """Processes of check(*args) on every rank, over gloo."""
    processes = [SERVER.Process(target=child, args=(rank, world, folder, dict(os.environ), check, args))
                 for rank in range(world)]
    for process in processes:
        process.start()
    return processes

def ranks(world, check, *args, timeout_s=900):
    """[check(*args) on every rank], each in a new process; AssertionError with what each rank has to say if
    any raised, hung or ended early."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start(world, folder, check, *args)
        for process in processes:
            process.join(timeout_s)
            process.kill()
            process.join()
        files = [Path(folder, f"rank{rank}") for rank in range(world)]
        results = [pickle.loads(f.read_bytes()) if f.exists() else (None, f"exit code {process.exitcode}")
                   for f, process in zip(files, processes)]
    errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error]
    assert not errors, "\n".join(errors)
    return [result for result, _ in results]

def child(rank, world, folder, env, check, args):
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    start, stores = dist.init_process_group, itertools.count()
    dist.init_process_group = lambda *_, **__: start(
        "gloo", init_method=f"file://{folder}/store{next(stores)}", rank=rank, world_size=world,
        timeout=timedelta(seconds=120))
    try:
        result = check(*args), None
    except BaseException:
        result = None, traceback.format_exc()
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(result))
