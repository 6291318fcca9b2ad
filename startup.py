"""Before the first iteration: what can be wrong with the input, the run folder, the checkpoint it continues.

The checks run before the process group starts, alike on every rank: a mistake costs seconds and one sentence.
"""
import ast
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
from datetime import timedelta
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
from common import BadInput, from_rank0, on_rank0
from nets import encoders

CHOICES = dict(amp=("", "bf16", "fp16"), parallel=("ddp", "fsdp"), resume=("auto", "force", ""),
               wandb=("", "online", "offline", "disabled"), log_level=("debug", "info", "warning"),
               device=("", "cuda", "mps", "cpu"), encoder_dtype=("", "bf16"))
COUNTED = re.compile(r"(max|lr)_\w+|\w+_(weight|decay|every|ratio|size|rate)|lr|clip|seed|warmup|workers|"
                     r"augment|stop_at|keep_last|timeout_s")            # keys whose values are 0 or more
LEAST = dict(data_scale=1e-9, batch_size=1, accum=1, val_batches=1, steps=1, classes=-1)
MOST = dict(augment=1, max_iter=9_999_999)              # N.pth has seven digits


def plan(method, cfg, world, local, defaults):
    """What a run is made of, after all checks of it: device, data sets, nets (on the meta device), names of
    their trainable parameters, init's sources, turns of each phase, folder. Sets cfg["classes"]."""
    check(cfg, world, defaults)
    if cfg["offline"]:
        os.environ["HF_HUB_OFFLINE"] = "1"              # read where the hub's client is imported first
    if cfg["deterministic"]:                            # cuBLAS reads this when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(cfg["deterministic"])
    device = pick_device(cfg, local)
    torch.set_float32_matmul_precision("high" if cfg["tf32"] else "highest")
    torch.backends.cudnn.allow_tf32 = cfg["tf32"]
    dataset = data.load(cfg)
    if cfg["classes"] < 0:
        cfg["classes"] = dataset.classes
    with torch.device("meta"):
        nets = method.build(cfg)
    inits, turns = check_method(method, cfg, nets, defaults, hasattr(dataset, "texts"))
    val_set = data.load(cfg, split="val") if cfg["val_every"] else dataset
    for key, some in ("data", dataset), ("val_data", val_set):
        shape = encoders.shapes(cfg, some.shape, some.kind)
        if shape != tuple(nets["student"].x_shape):
            raise BadInput(f"--{key} {cfg[key]} has samples of shape {shape}, --net {cfg['net']} "
                           f"takes {tuple(nets['student'].x_shape)}; choose a net of that shape")
        for _, changes in val_settings(cfg) if hasattr(method, "check") else ():
            method.check(some, nets, cfg | changes)
    return SimpleNamespace(
        device=device, dataset=dataset, val_set=val_set, nets=nets, inits=inits, turns=turns,
        trainable={n: [k for k, p in net.named_parameters() if p.requires_grad] for n, net in nets.items()},
        folder=output_folder(cfg), fingerprint=fingerprint(cfg, dataset))


def check(cfg, world, defaults):
    for key, choices in CHOICES.items():
        if cfg[key] not in choices:
            raise BadInput(f"--{key} {cfg[key]!r} is not known; choose from {', '.join(map(repr, choices))}")
    for key in ("project", "group", "name"):
        if cfg[key] in ("", ".", "..") or "/" in cfg[key]:
            raise BadInput(f"--{key} {cfg[key]!r} cannot be the name of a folder; leave out / and dots alone")
    for key, value in cfg.items():
        low = LEAST.get(key, 0 if COUNTED.fullmatch(key) else -math.inf)
        high = MOST.get(key, math.inf)
        for v in value if isinstance(value, tuple) else (value,):
            if isinstance(v, (int, float)) and not low <= v <= high:
                raise BadInput(f"--{key} {value} must be a number from {low} to {high}")
    parts = world * cfg["accum"]
    if cfg["batch_size"] % parts:
        low = cfg["batch_size"] // parts * parts
        raise BadInput(f"batch_size {cfg['batch_size']} is not divisible by {world} ranks x accum "
                       f"{cfg['accum']} = {parts}; nearest {f'{low} or ' if low else ''}{low + parts}")
    if world % (cfg["shard_size"] or world):
        raise BadInput(f"--shard_size {cfg['shard_size']} does not divide the {world} ranks; give 0 for all")
    for key in ("shard_size", "offload", "reshard"):
        if cfg[key] != defaults[key] and cfg["parallel"] != "fsdp":
            raise BadInput(f"--{key} {cfg[key]} is of sharded nets; give --parallel fsdp, or leave it out")
    if (window := cfg["profile"]) and not ([*map(type, window)] == [int, int] and
                                           0 <= window[0] <= window[1] and window[0] < cfg["max_iter"]):
        raise BadInput(f"--profile {window} is not first,last: two iterations before max_iter, such as 10,14")
    common.lr_factor(cfg["lr_schedule"], 0, cfg["warmup"], 1)
    names = [common.parse_ema(str(e))[0] for e in cfg["ema"]]
    if len(set(names)) < len(names):
        raise BadInput(f"--ema {','.join(map(str, cfg['ema']))} names an average twice")


def ranks():
    """(rank, world size, rank on this node), from torchrun's environment or of a single process."""
    return tuple(int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))


def pick_device(cfg, local):
    name = cfg["device"] or ("cuda" if torch.cuda.is_available() else
                             "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.empty(0, device=f"cuda:{local}" if name == "cuda" else name).device
        if name == "cuda":
            torch.cuda.set_device(device)
        return device
    except (RuntimeError, AssertionError) as e:
        raise BadInput(f"--device {name} cannot be used by rank {local} of this node "
                       f"({str(e).splitlines()[0]}); give another one, none, or fewer ranks") from None


def check_method(method, cfg, nets, defaults, texts):
    """init's sources, {phase: its turns}; these nets can follow the keys, every phase has an optimizer, every
    trainable parameter one."""
    where = method.path
    if "student" not in nets:
        raise BadInput(f"{where}: build() returns {', '.join(nets)}; the net that samples is named student")
    if cfg["augment"] and not getattr(nets["student"], "augment_dim", 0):
        raise BadInput(f"--augment {cfg['augment']}: nets of {method.path.stem} take no labels of what was "
                       f"augmented and would make such samples; leave it out")
    if cfg["guidance"] not in (0, 1) and not cfg["classes"] and not texts:
        raise BadInput(f"--guidance {cfg['guidance']} needs classes or captions (NAME.txt beside an image) "
                       f"to guide by, and --data {cfg['data']} has none; use --guidance 1")
    for label, changes in val_settings(cfg)[1:]:
        with torch.device("meta"):
            others = method.build(cfg | changes)
        if str(nets) != str(others) or (defaults.keys() & changes) - {"steps", "guidance"}:
            raise BadInput(f"--val_settings {label[:-1]} changes nets or trainer, not step")
    inits, opts = method.init(cfg), method.optimizers(nets, cfg)
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
                raise BadInput(f"{where}: {name}.{key} and {name}.{first[p]} are one parameter; give it "
                               f"one owner and pass it to where else it is used")
            if p.dim() == 0 and cfg["parallel"] == "fsdp":
                raise BadInput(f"{where}: {name}.{key} has no rows to share (shape ()); give it shape (1,)")
            if (n := owners.pop(p, 0)) != p.requires_grad:
                raise BadInput(f"{where}: parameter {name}.{key} is "
                               f"{'trainable' if p.requires_grad else 'frozen'} and in {n} optimizers; "
                               f"trainable ones belong to one, frozen ones (requires_grad False in "
                               f"build) to none")
    if owners:
        raise BadInput(f"{where}: optimizers() holds {len(owners)} parameters of no net of build()")
    return inits, turns


def call(method, nets, batch, it, cfg):
    """(loss, {"loss" and what is logged: scalar without a graph}) of the method's step, under autocast;
    BadInput where it breaks its contract."""
    with autocast(cfg, batch["x0"].device):
        loss, parts = method.step(nets, batch, it, cfg)
    values = {k: v.detach() if torch.is_tensor(v) else v for k, v in (dict(loss=loss) | parts).items()}
    wrong = [f"{key!r} of shape {tuple(value.shape)}, not a scalar" for key, value in values.items()
             if torch.is_tensor(value) and value.numel() != 1]
    if torch.is_grad_enabled() and not getattr(loss, "requires_grad", False):
        wrong.append("a loss that depends on no parameter of that optimizer; is something under no_grad?")
    if wrong:
        raise BadInput(f"{method.path}: step() at it {it} (phase {method.phase(it, cfg)!r}) returned "
                       f"{wrong[0]}")
    return loss, values


def autocast(cfg, device):
    return torch.autocast(device.type, shard.DTYPES.get(cfg["amp"]), enabled=bool(cfg["amp"]))


# ---- values of config keys ---------------------------------------------------------------------------------

def like(default, value, what):
    """The value in the type of a key's default, or BadInput: an int may stand for a float, nothing else."""
    if type(value) is not type(default) and (type(value), type(default)) != (int, float):
        raise BadInput(f"{what} is not of the type of {default!r}")
    return type(default)(value)


def parse(key, text, default, where):
    """The value of `text` in the type of the key's default. Raises BadInput."""
    def element(text):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
        return text

    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, (int, float)):           # 1e4 is an int for an int key, 3.5 is not
            number = float(text)
            if not math.isfinite(number) or isinstance(default, int) and number % 1:
                raise ValueError
            return type(default)(number)
        if isinstance(default, tuple):                  # a,b or, as --dry_run prints it, ('a', 'b') or [1, 2]
            words = bool(default) and isinstance(default[0], str)
            values = tuple(ast.literal_eval(text) if text[:1] in ("(", "[") else
                           [e.strip() if words else element(e.strip()) for e in text.split(",") if e.strip()])
            kinds = str if words else (int, float) if default else (int, float, str)
            if not all(isinstance(e, kinds) for e in values):
                raise ValueError
            return values
        return text
    except (KeyError, ValueError, TypeError, SyntaxError):
        kind = {bool: "true, false, 1 or 0", int: "a whole number", float: "a number",
                tuple: "a list a,b of such values"}[type(default)]
        raise BadInput(f"--{key} {text!r} does not fit: {where} has {default!r} there, so give "
                       f"{kind}") from None


def val_settings(cfg):
    """[("", {})] and one (label, {key: value}) per entry of val_settings."""
    settings = [("", {})]
    for entry in cfg["val_settings"]:
        pairs = [part.partition("=")[::2] for part in str(entry).split(";")]
        for key, _ in pairs:
            common.known("--val_settings", key, cfg)
        settings.append((f"{entry}/", {k: parse(k, text, cfg[k], "--val_settings") for k, text in pairs}))
    return settings


# ---- the run folder ----------------------------------------------------------------------------------------

def output_folder(cfg):
    root = files.place(os.environ.get("FEWSTEP_OUTPUT_ROOT", "outputs"))
    return root / cfg["project"] / cfg["group"] / cfg["name"]


def fingerprint(cfg, dataset):
    """What tells this data set from another without reading it all: its size, all labels, some samples with
    their captions and embeddings."""
    crc, texts = zlib.crc32(dataset.label.tobytes()), {}
    for i in range(0, len(dataset), max(1, len(dataset) // 16)):
        if hasattr(dataset, "texts"):
            texts = dataset.texts([i])
        told = [v for part in ("cond", "uncond") for _, v in sorted(texts.get(part, {}).items())]
        for part in (dataset.get(i)[0], *(v.float().numpy() for v in told)):    # files have no order of keys
            crc = zlib.crc32(part.tobytes(), crc)
        crc = zlib.crc32("".join(texts.get("caption", ())).encode(), crc)
    return dict(path=cfg["data"], samples=len(dataset), **getattr(dataset, "about", {}), crc=crc)


def check_folder(method, cfg, folder, state=None, data=None):
    """True if there are checkpoints to continue from; BadInput if they (`state`: the newest) are not ours."""
    if not ckpt.scan(folder / "checkpoints"):
        return False
    if cfg["resume"] == "":
        raise BadInput(f"{folder} holds checkpoints, which --resume \"\" refuses; start anew with --name "
                       f"NEW, or continue with --resume auto")
    was, mine = state or json.loads(files.read(folder / "config.json") or b"{}"), method.path.stem
    if was.get("method", mine) != mine:
        raise BadInput(f"{folder} is a run of {was['method']}, not of {mine}; use --name NEW")
    if cfg["resume"] == "force":
        return True
    stage1 = state["config"].get("stage1", "") if state else cfg.get("stage1", "")
    if stage1 != cfg.get("stage1", ""):
        raise BadInput(f"{folder} is a run with --stage1 {stage1 or repr('')}, not "
                       f"{cfg['stage1'] or repr('')}: another training; use --name NEW")
    if files.read(folder / "method.py") not in (None, method.source):
        raise BadInput(f"{method.path} has changed since {folder} began; --name NEW starts a new run, "
                       f"--resume force continues with the changed file")
    if state and state["data"] | dict(path="") != data | dict(path=""):
        raise BadInput(f"--data {cfg['data']} is not the data {folder} began with, {state['data']['path']} "
                       f"then; --name NEW starts a new run, --resume force continues with the other data")
    return True


def join(cfg, world, device):
    """(gloo group for flags, None for one process; mesh of the shards, None for replicas). The default group,
    for tensors, is NCCL on CUDA and gloo elsewhere. Back-ends give up after the watchdog, which says more."""
    gloo, limit = None, timedelta(seconds=cfg["timeout_s"] + 120 if cfg["timeout_s"] else 7 * 86400)
    if world > 1 or cfg["parallel"] == "fsdp":
        alone = {} if "MASTER_ADDR" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        with resume.orphans_leave():
            dist.init_process_group(timeout=limit, **alone)
            if world > 1:
                nccl = device.type == "cuda"
                gloo = dist.new_group(backend="gloo", timeout=limit) if nccl else dist.group.WORLD
    return gloo, shard.make_mesh(cfg, world, device, limit)


def take_lock(folder):
    """One run per folder at a time. The lock is the kernel's: it ends with the process, however that ends.
    A store has none. Two runs with one URL would write whole files each, the last one's would stay."""
    if not isinstance(folder, Path):
        return None
    handle = open(folder / ".lock", "w")
    for attempt in range(20):                           # a killed predecessor may still be saving
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            time.sleep(0.5)
        except OSError:                                 # a file system without locks
            return handle
    raise BadInput(f"{folder} is in use by another run; wait for it, or use --name NEW")


def pin_sources(cfg, nets, inits, state):
    """dict(sources, held): every source of init pinned to a file, and the tensors of those that the
    checkpoint `state` does not make superfluous. BadInput where one is missing or does not fit its net."""
    hint = "run the first stage, or give --stage1 PATH[#ENTRY]" if cfg.get("stage1") else (
        f"make one with `torchrun train.py methods/sft.py --net {cfg['net']} --data {cfg['data']}`, or give "
        f"--teacher PATH[#ENTRY]")
    kept = state["sources"] if state else {}
    sources = {s: kept.get(s) or ckpt.resolve(s, hint) for s in inits.values() if s not in nets}
    folder = output_folder(cfg)
    for s, found in sources.items():                    # --keep_last would delete it
        file = None if found["file"].startswith("hf://") else ckpt.find(found["file"])  # asks no hub again
        if isinstance(file, Path) and isinstance(folder, Path) and file.is_relative_to(folder.resolve()):
            raise BadInput(f"{s} lies in this run's own folder; give --name NEW")
    held = {s: ckpt.read(sources[s]) for s in fill.needed(nets, inits, state)}
    for name in fill.order(nets, inits):
        if inits.get(name) in {*nets, *held}:
            fill.fitting(nets, name, inits[name], held)
    return dict(sources=sources, held=held)


def newest(method, cfg, folder, fingerprint, gloo, say):
    """(iterations done, checkpoint) to continue from, or (0, None). Every rank calls it, after the lock is
    taken: what a predecessor saved meanwhile counts."""
    at = folder / "checkpoints"

    def look():
        for it in sorted({*ckpt.scan(at, ckpt.SHARDS)} - {*ckpt.scan(at)}):
            say.warn(f"WARNING: {at}/{it:07d}.* is of a save that did not finish; it is not used")
            if ckpt.scan(at):
                ckpt.clear(at, [it])
        return check_folder(method, cfg, folder)

    if not from_rank0(on_rank0(look, gloo), gloo):
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
    student = nets["student"]
    for name, ema in emas.items():
        for a, b in zip([*student.parameters(), *student.buffers()], [*ema.parameters(), *ema.buffers()]):
            shard.local(b).copy_(shard.local(a))
        if state and name in state["emas"]:
            fill.take_all(ema, state["emas"][name], device)
    return emas


def open_folder(method, cfg, folder, sources, state, start, say):
    """config.json, method.py; on resume name what differs. Log lines and pictures past the checkpoint go."""
    for file in [*folder.rglob(".*.tmp")] if isinstance(folder, Path) else ():          # of a killed save
        files.remove(file)
    for name in files.names(folder / "samples"):
        if re.fullmatch(r"[0-9]{7}\.png", name) and not (state and int(name[:7]) <= start):
            files.remove(folder / "samples" / name)
    for key, was in state["config"].items() if state else ():
        if cfg.get(key, was) != was:
            say.warn(f"config differs from the checkpoint: {key} was {was!r}, now {cfg[key]!r}")
    text, lines = json.dumps(dict(cfg) | dict(method=method.path.stem, sources=sources), indent=1) + "\n", []
    for line in (files.read(folder / "metrics.jsonl") or b"").splitlines() if state else ():
        with contextlib.suppress(ValueError):           # a killed run may leave half a line
            if json.loads(line)["it"] <= start:
                lines.append(line + b"\n")
    for name, content in ("config.json", text.encode()), ("method.py", method.source), (
            "metrics.jsonl", b"".join(lines)):
        files.write(folder / name, lambda f: f.write(content))                                  # noqa: B023
