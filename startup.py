"""Before the first iteration: what can be wrong with the input, the run folder, the checkpoint it continues.

The checks run before the process group starts, alike on every rank: a mistake costs seconds and one sentence.
"""
import contextlib
import copy
import fcntl
import json
import math
import os
import re
import time
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import ckpt
import common
import data
import files
import fill
import resume
import shard
import watch
from common import BadInput, from_rank0, on_rank0

CHOICES = dict(amp=("", "bf16", "fp16"), parallel=("ddp", "fsdp"), resume=("auto", "force", ""),
               wandb=("", "online", "offline", "disabled"), log_level=("debug", "info", "warning"))
LEAST = dict(batch_size=1, accum=1, val_batches=1, steps=1, classes=-1)
MOST = dict(augment=1, max_iter=9_999_999)              # N.pth has seven digits


def plan(method, cfg, world, local, defaults):
    """What a run is made of, after all checks of it: device, data sets, nets (on the meta device), names of
    their trainable parameters, init's sources, turns of each phase, folder. Sets cfg["classes"]."""
    check(cfg, world)
    watch.profile_window(cfg)
    watch.deterministic(cfg["deterministic"])
    device = pick_device(cfg, local)
    torch.set_float32_matmul_precision("high" if cfg["tf32"] else "highest")
    torch.backends.cudnn.allow_tf32 = cfg["tf32"]
    dataset = data.load(cfg)
    cfg["classes"] = dataset.classes if cfg["classes"] < 0 else cfg["classes"]
    with torch.device("meta"):
        nets = method.build(cfg)
    student = nets["student"]
    if cfg["augment"] and getattr(student, "augment_dim", None) == 0:
        raise BadInput(f"--augment {cfg['augment']}: nets of {method.path.stem} take no labels of what was "
                       f"augmented and would make such samples; leave it out")
    if cfg["guidance"] not in (0, 1) and not cfg["classes"]:
        raise BadInput(f"--guidance {cfg['guidance']} needs classes to guide by; use --guidance 1")
    val_set = data.load(cfg, split="val") if cfg["val_every"] else dataset
    for key, some in ("data", dataset), ("val_data", val_set):
        if tuple(some.shape) != tuple(student.x_shape):
            raise BadInput(f"--{key} {cfg[key]} has samples of shape {tuple(some.shape)}, --net {cfg['net']} "
                           f"takes {tuple(student.x_shape)}; choose a net of that shape")
        for label, changes in val_settings(cfg):
            if (defaults.keys() & changes) - {"steps", "guidance"}:
                raise BadInput(f"--val_settings {label[:-1]} changes nets or trainer, not step")
            if hasattr(method, "check"):
                method.check(some, nets, cfg | changes)
    inits, turns = check_method(method, cfg, nets)
    return SimpleNamespace(
        device=device, dataset=dataset, val_set=val_set, nets=nets, inits=inits, turns=turns,
        trainable={n: [k for k, p in net.named_parameters() if p.requires_grad] for n, net in nets.items()},
        folder=output_folder(cfg), fingerprint=fingerprint(cfg, dataset))


def check(cfg, world):
    for key, choices in CHOICES.items():
        if cfg[key] not in choices:
            raise BadInput(f"--{key} {cfg[key]!r} is not known; choose from {', '.join(map(repr, choices))}")
    for key, value in cfg.items():
        counted = re.fullmatch(r"(max|lr)_\w+|\w+_(weight|decay|every|ratio|size|rate)|lr|clip|seed|warmup|"
                               r"workers|augment|stop_at|keep_last|timeout_s", key)
        low, high = LEAST.get(key, 0 if counted else -math.inf), MOST.get(key, math.inf)
        for v in value if isinstance(value, tuple) else (value,):
            if isinstance(v, (int, float)) and not low <= v <= high:
                raise BadInput(f"--{key} {value} must be a number from {low} to {high}")
    parts = world * cfg["accum"]
    if cfg["batch_size"] % parts:
        raise BadInput(f"batch_size {cfg['batch_size']} is not divisible by {world} ranks x accum "
                       f"{cfg['accum']}; the next one is {-(-cfg['batch_size'] // parts) * parts}")
    if world % (cfg["shard_size"] or world):
        raise BadInput(f"--shard_size {cfg['shard_size']} does not divide the {world} ranks; give 0 for all")
    common.lr_factor(cfg["lr_schedule"], 0, cfg["warmup"], 1)
    for entry in cfg["ema"]:
        common.parse_ema(str(entry))


def ranks():
    """(rank, world size, rank on this node), from torchrun's environment or of a single process."""
    return tuple(int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))


def pick_device(cfg, local):
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(cfg["device"] or best)
    if device.type == "cuda":
        torch.cuda.set_device(device := torch.device("cuda", local))
    return device


def check_method(method, cfg, nets):
    """init's sources, {phase: its turns}; every phase has an optimizer, every trainable parameter one."""
    where, inits, opts = method.path, method.init(cfg), method.optimizers(nets, cfg)
    for name in inits:
        common.known(f"{where}: net in init()", name, nets)
    turns = Counter(method.phase(it, cfg) for it in range(cfg["max_iter"]))
    for phase in turns.keys() - opts.keys():
        raise BadInput(f"{where}: phase {phase!r} has no optimizer; optimizers() returns {', '.join(opts)}")
    owners = Counter(p for opt in opts.values() for g in opt.param_groups for p in g["params"])
    for name, net in nets.items():
        first = {}
        for key, p in net.named_parameters(remove_duplicate=False):
            if first.setdefault(p, key) != key:
                raise BadInput(f"{where}: {name}.{key} and {name}.{first[p]} are one parameter; give it one "
                               f"owner and pass it to where else it is used")
            if p.dim() == 0 and cfg["parallel"] == "fsdp":
                raise BadInput(f"{where}: {name}.{key} has no rows to share; give it shape (1,)")
            if (n := owners[p]) != p.requires_grad:
                kind = "trainable" if p.requires_grad else "frozen"
                raise BadInput(f"{where}: parameter {name}.{key} is {kind} and in {n} optimizers; trainable "
                               f"ones belong to one, frozen ones to none")
    return inits, turns


def call(method, nets, batch, it, cfg):
    """(loss, {name: scalar}) of the method's step, under autocast."""
    with autocast(cfg, batch["x0"].device):
        loss, parts = method.step(nets, batch, it, cfg)
    if torch.is_grad_enabled() and not getattr(loss, "requires_grad", False):
        raise BadInput(f"{method.path}: step() at it {it} (phase {method.phase(it, cfg)!r}) returned a loss "
                       f"that depends on no parameter of that optimizer; is something under no_grad?")
    return loss, parts


def autocast(cfg, device):
    return torch.autocast(device.type, shard.DTYPES.get(cfg["amp"]), enabled=bool(cfg["amp"]))


def like(default, value, what):
    """The value in the type of a key's default; an int may stand for a float, nothing else."""
    if type(value) is not type(default) and (type(value), type(default)) != (int, float):
        raise BadInput(f"{what} is not of the type of {default!r}")
    return type(default)(value)


def parse(key, text, default, where):
    """The value of `text` in the type of the key's default. Raises BadInput."""
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, (int, float)):
            number = float(text)
            if not math.isfinite(number) or number != type(default)(number):    # 1e4 is an int, 3.5 is not
                raise ValueError
            return type(default)(number)
        if isinstance(default, tuple):                  # a,b or, as --dry_run prints it, ('a', 'b') or [1, 2]
            words = default and isinstance(default[0], str)
            parts = [p.strip(" '\"") for p in text.strip("()[]").split(",") if p.strip()]
            values = tuple(parts if words else map(element, parts))
            if default and not words and any(isinstance(v, str) for v in values):
                raise ValueError
            return values
        return text
    except (KeyError, ValueError):
        raise BadInput(f"--{key} {text!r} does not fit: {where} has {default!r} there") from None


def element(text):
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def val_settings(cfg):
    """[("", {})] and one (label, {key: value}) per entry of val_settings."""
    settings = [("", {})]
    for entry in cfg["val_settings"]:
        pairs = [part.partition("=")[::2] for part in str(entry).split(";")]
        settings.append((f"{entry}/", {k: parse(k, text, cfg[k], "--val_settings") for k, text in pairs}))
    return settings


# ---- the run folder ----------------------------------------------------------------------------------------

def output_folder(cfg):
    root = files.place(os.environ.get("FEWSTEP_OUTPUT_ROOT", "outputs"))
    return root / cfg["project"] / cfg["group"] / cfg["name"]


def fingerprint(cfg, dataset):
    """What tells this data set from another without reading it all: its size, all labels, some samples."""
    some = [dataset.get(i)[0] for i in range(0, len(dataset), max(1, len(dataset) // 16))]
    return dict(path=cfg["data"], samples=len(dataset), **getattr(dataset, "about", {}),
                crc=zlib.crc32(b"".join(a.tobytes() for a in [dataset.label, *some])))


def check_folder(method, cfg, folder, state=None, data=None):
    """True if there are checkpoints to continue from; BadInput if they (`state`: the newest) are not ours."""
    if not ckpt.scan(folder / "checkpoints"):
        return False
    if cfg["resume"] == "":
        raise BadInput(f"{folder} holds checkpoints; --name NEW starts anew, --resume auto continues")
    was, mine = state or json.loads(files.read(folder / "config.json") or b"{}"), method.path.stem
    if was.get("method", mine) != mine:
        raise BadInput(f"{folder} is a run of {was['method']}, not of {mine}; use --name NEW")
    if cfg["resume"] == "force":
        return True
    ways = "--name NEW starts a new run, --resume force continues with what there is now"
    if files.read(folder / "method.py") not in (None, method.source):
        raise BadInput(f"{method.path} has changed since {folder} began; {ways}")
    if state and state["data"] | dict(path="") != data | dict(path=""):
        raise BadInput(f"--data {cfg['data']} is not the data {folder} began with, {state['data']['path']} "
                       f"then; {ways}")
    return True


def join(cfg, world, device):
    """(gloo group for flags, None for one process; mesh of the shards, None for replicas)."""
    gloo, limit = None, watch.group_timeout(cfg["timeout_s"])
    if world > 1 or cfg["parallel"] == "fsdp":
        alone = {} if "MASTER_ADDR" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        with resume.orphans_leave():
            dist.init_process_group(timeout=limit, **alone)
            if world > 1:
                own = device.type == "cuda"
                gloo = dist.new_group(backend="gloo", timeout=limit) if own else dist.group.WORLD
    return gloo, shard.make_mesh(cfg, world, device, limit)


def take_lock(folder, gloo):
    """One run per folder at a time. The lock is the kernel's: it ends with the process, however that ends.
    A store has none. Two runs with one URL would write whole files each, the last one's would stay."""
    def lock():
        handle = open(folder / ".lock", "w")
        for attempt in range(20):                       # a killed predecessor may still be saving
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                time.sleep(0.5)
            except OSError:                             # a file system without locks
                return handle
        raise BadInput(f"{folder} is in use by another run; wait for it, or use --name NEW")
    return on_rank0(lock, gloo) if isinstance(folder, Path) else None


def pin_sources(cfg, nets, inits, state):
    """dict(sources, held): every source of init pinned to a file, and the tensors of those that the
    checkpoint `state` does not make superfluous. BadInput where one is missing or does not fit its net."""
    kept, hint = state["sources"] if state else {}, "make one with methods/sft.py, or give PATH[#ENTRY]"
    sources = {s: kept.get(s) or ckpt.resolve(s, hint) for s in inits.values() if s not in nets}
    held = {s: ckpt.read(sources[s]) for s in fill.needed(nets, inits, state)}
    fill.check_sources(nets, inits, held)
    return dict(sources=sources, held=held)


def newest(method, cfg, folder, fingerprint, rank, gloo, say):
    """(iterations done, checkpoint) to continue from, or (0, None). Every rank calls it, after the lock is
    taken: what a predecessor saved meanwhile counts."""
    at = folder / "checkpoints"
    for it in ckpt.unfinished(at) if rank == 0 else ():
        say.warn(f"WARNING: {at}/{it:07d}.* is of a save that did not finish; it is not used")
        if ckpt.scan(at):
            ckpt.clear(at, [it])
    if not from_rank0(on_rank0(lambda: check_folder(method, cfg, folder), gloo), gloo):
        return 0, None
    start, state = ckpt.newest(at, say.warn, gloo)
    if start is None:
        raise BadInput(f"no checkpoint in {folder} can be read; remove them to start anew, or use --name NEW")
    on_rank0(lambda: check_folder(method, cfg, folder, state, fingerprint), gloo)
    return start, state


def post_step(nets):
    for net in nets:
        if hasattr(net, "post_step"):
            net.post_step()


def fill_nets(cfg, plan, averages, held, state, mesh):
    """Shards and fills plan.nets, from the sources' tensors `held` and the checkpoint `state`; -> {name: net}
    of `averages`, as the checkpoint has them, else equal to the student."""
    nets, device = plan.nets, plan.device
    models = {name: copy.deepcopy(net) for name, net in nets.items()}           # stay on the meta device
    emas = {name: copy.deepcopy(nets["student"]).requires_grad_(False).eval() for name in averages}
    for net in [*nets.values(), *emas.values()]:
        shard.wrap(net, cfg, mesh, device)
    fill.fill(nets, models, plan.inits, held, state, plan.trainable, cfg, device)
    if state is None:
        post_step(nets.values())
    for name, ema in emas.items():
        fill.copy_net(nets["student"], ema)
        if state and name in state["emas"]:
            fill.take_all(ema, state["emas"][name], device)
    return emas


def open_folder(method, cfg, folder, sources, state, start, say):
    """config.json, method.py; on resume name what differs. Log lines and pictures past the checkpoint go."""
    late = [folder / "samples" / n for n in files.names(folder / "samples")
            if re.fullmatch(r"[0-9]{7}\.png", n) and not (state and int(n[:7]) <= start)]
    for file in [*late, *(folder.rglob(".*.tmp") if isinstance(folder, Path) else ())]:     # of a killed save
        files.remove(file)
    for key, was in state["config"].items() if state else ():
        if cfg.get(key, was) != was:
            say.warn(f"config differs from the checkpoint: {key} was {was!r}, now {cfg[key]!r}")
    text = json.dumps(dict(cfg) | dict(method=method.path.stem, sources=sources), indent=1)
    files.write(folder / "config.json", lambda f: f.write(f"{text}\n".encode()))
    files.write(folder / "method.py", lambda f: f.write(method.source))
    lines = []
    for line in (files.read(folder / "metrics.jsonl") or b"").decode().splitlines() if state else ():
        with contextlib.suppress(ValueError):           # a killed run may leave half a line
            if json.loads(line)["it"] <= start:
                lines.append(line + "\n")
    files.write(folder / "metrics.jsonl", lambda f: f.write("".join(lines).encode()))
