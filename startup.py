"""Before the first iteration: what can be wrong with the input, the run folder, weights into nets.

The checks run before the process group starts, alike on every rank: a mistake costs seconds and one sentence.
"""
import ast
import contextlib
import fcntl
import json
import math
import os
import re
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

import torch

import ckpt
import common
import files
from common import BadInput, from_rank0

CHOICES = dict(amp=("", "bf16", "fp16"), parallel=("ddp", "fsdp"), resume=("auto", "force", ""),
               wandb=("", "online", "offline", "disabled"), log_level=("debug", "info", "warning"),
               device=("", "cuda", "mps", "cpu"))
RETURNS = dict(build=("{name: torch.nn.Module}", torch.nn.Module), init=("{name: source}", str),
               optimizers=("{phase: optimizer}", torch.optim.Optimizer),
               step=("(scalar loss, {name: scalar to log})", (int, float, torch.Tensor)))


def check(cfg, world, defaults):
    for key, default in defaults.items():               # a method file may change a value, not its type
        like(default, cfg[key], f"{key} = {cfg[key]!r} in the method file")
    for key, choices in CHOICES.items():
        if cfg[key] not in choices:
            raise BadInput(f"--{key} {cfg[key]!r} is not known; choose from {', '.join(map(repr, choices))}")
    for key in ("project", "group", "name"):
        if cfg[key] in ("", ".", "..") or "/" in cfg[key]:
            raise BadInput(f"--{key} {cfg[key]!r} cannot be the name of a folder; leave out / and dots alone")
    for key, value in cfg.items():
        low = (1 if key in ("batch_size", "accum", "val_batches", "steps") else -1 if key == "classes" else
               0 if re.fullmatch(r"(max|lr)_\w+|\w+_(weight|decay|every|ratio|size|rate)|lr|clip|seed|warmup|"
                                 r"workers|augment|stop_at|keep_last|timeout_s", key) else -2 ** 63)
        high = dict(augment=1, workers=256, max_iter=9_999_999, timeout_s=10 ** 8).get(key, 2 ** 63)   # N.pth
        for v in value if isinstance(value, tuple) else (value,):
            if isinstance(v, (int, float)) and not low <= v <= high:
                raise BadInput(f"--{key} {value} " + (
                    "must not be negative" if v < 0 == low else f"must be at least {low}" if v < low else
                    f"is more than {high}" if v > high else "is not a number"))
    parts = world * cfg["accum"]
    if cfg["batch_size"] % parts:
        low = cfg["batch_size"] // parts * parts
        raise BadInput(f"batch_size {cfg['batch_size']} is not divisible by {world} ranks x accum "
                       f"{cfg['accum']} = {parts}; nearest {f'{low} or ' if low else ''}{low + parts}")
    size = cfg["shard_size"] or world
    if world % size:
        fit = [n for n in range(1, world + 1) if world % n == 0]
        raise BadInput(f"--shard_size {size} does not divide the {world} ranks; give one of {fit}, or 0")
    for key in ("shard_size", "offload", "reshard"):
        if cfg[key] != defaults[key] and cfg["parallel"] != "fsdp":
            raise BadInput(f"--{key} {cfg[key]} is of sharded nets; give --parallel fsdp, or leave it out")
    common.lr_factor(cfg["lr_schedule"], 0, cfg["warmup"], 1)
    names = [common.parse_ema(str(e))[0] for e in cfg["ema"]]
    if len(set(names)) < len(names):
        raise BadInput(f"--ema {','.join(map(str, cfg['ema']))} names an average twice")
    val_settings(cfg)


def ranks():
    """(rank, world size, rank on this node), from torchrun's environment or of a single process."""
    return tuple(int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))


def pick_device(cfg, local):
    name = cfg["device"] or ("cuda" if torch.cuda.is_available() else
                             "mps" if torch.backends.mps.is_available() else "cpu")
    if name == "cuda" and torch.cuda.device_count():
        wanted, there = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if wanted > there:                              # every rank of the node sees it, so rank 0 can say it
            raise BadInput(f"this node has {there} GPUs for {wanted} ranks; lower --nproc_per_node to "
                           f"{there}, or use --device cpu")
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    try:
        device = torch.empty(0, device=name).device
        if device.type == "mps" and cfg.get("parallel") == "fsdp":
            raise RuntimeError("FSDP2 runs on cuda and cpu")
        return device
    except (RuntimeError, AssertionError) as e:
        raise BadInput(f"--device {name} cannot be used ({str(e).splitlines()[0]}); give another one, or "
                       f"none") from None


def call(method, name, *args):
    """What a function of the method file returns; BadInput if that is not what the trainer can use."""
    text, kinds = RETURNS[name]
    try:
        value = getattr(method, name)(*args)
    except RuntimeError as e:
        if "mixed torch.Tensor and DTensor" not in str(e):
            raise
        raise BadInput(f"{method.path}: a net uses the weights of a module that it does not call, so they "
                       f"are not gathered ({str(e).splitlines()[0]}); name units in net.blocks") from e
    table, wrong = value, [type(value).__name__]
    if name == "step":
        pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)
        table = value[1] | dict(loss=value[0]) if pair else None
    if isinstance(table, dict):
        wrong = [f"{k!r}: {getattr(v, 'shape', type(v).__name__)}" for k, v in table.items() if not (
                 isinstance(k, str) and isinstance(v, kinds) and (not torch.is_tensor(v) or v.numel() == 1))]
    if wrong:
        raise BadInput(f"{method.path}: {name}() returned {wrong[0]}; it must return {text}")
    return value


def check_nets(method, cfg, nets):
    """Keys that these nets cannot follow, once the data's classes are known."""
    if "student" not in nets:
        raise BadInput(f"{method.path}: build() returns {', '.join(nets)}; the net that samples is "
                       f"named student")
    if cfg["augment"] and getattr(nets["student"], "augment_dim", None) == 0:
        raise BadInput(f"--augment {cfg['augment']}: nets of {method.path.stem} take no labels of what was "
                       f"augmented and would make such samples; leave it out")
    if cfg["guidance"] not in (0, 1) and not cfg["classes"]:
        raise BadInput(f"--guidance {cfg['guidance']} needs classes to guide by, and there are none; use "
                       f"--guidance 1")


def check_method(method, cfg, nets, trainable):
    """init's sources, {phase: its turns}; every phase has an optimizer, every trainable parameter one."""
    where, inits, turns = method.path, call(method, "init", cfg), Counter()
    opts = call(method, "optimizers", nets, cfg)
    for name in inits:
        common.known(f"{where}: net in init()", name, nets)
    for it in range(cfg["max_iter"]):
        phase = method.phase(it, cfg)
        if phase not in [*opts]:
            raise BadInput(f"{where}: phase {phase!r} (it {it}) has no optimizer; optimizers() returns "
                           f"{', '.join(map(repr, opts)) or 'none'}")
        turns[phase] += 1
    for name, net in nets.items():
        first = {}
        for key, p in net.named_parameters(remove_duplicate=False):
            if first.setdefault(id(p), key) != key:
                raise BadInput(f"{where}: {name}.{key} and {name}.{first[id(p)]} are one parameter; give it "
                               f"one owner and pass it to where else it is used")
            if p.dim() == 0 and cfg["parallel"] == "fsdp":
                raise BadInput(f"{where}: {name}.{key} has no rows to share (shape ()); give it shape (1,)")
    owners = Counter(id(p) for opt in opts.values() for g in opt.param_groups for p in g["params"])
    for name, net in nets.items():
        for key, p in net.named_parameters():
            n = owners.pop(id(p), 0)
            if (key in trainable[name]) != (n == 1) or n > 1:
                raise BadInput(f"{where}: parameter {name}.{key} is "
                               f"{'trainable' if p.requires_grad else 'frozen'} and in {n} optimizers; "
                               f"trainable ones belong to one, frozen ones (requires_grad False in "
                               f"build) to none")
    if owners:
        raise BadInput(f"{where}: optimizers() holds {len(owners)} parameters of no net that build() "
                       f"returned")
    return inits, turns


def check_settings(method, cfg, nets, world, defaults):
    """Validations under changed keys: with the nets and phases of the run, other values for step."""
    for label, changes in val_settings(cfg)[1:] if cfg["val_every"] else ():
        check(cfg | changes | dict(val_settings=()), world, defaults)
        with torch.device("meta"):
            others = call(method, "build", cfg | changes)
        was, now = (str(call(method, "optimizers", n, c)) for n, c in ((nets, cfg), (others, cfg | changes)))
        if (str(nets) != str(others) or was != now or (defaults.keys() & changes) - {"steps", "guidance"}
                or any(method.phase(it, cfg) != method.phase(it, cfg | changes) for it in range(1000))):
            raise BadInput(f"--val_settings {label[:-1]} changes nets, optimizers, data, phases "
                           f"or trainer, not step")


def fingerprint(cfg, dataset):
    """What tells this data set from another without reading it all: its size, all labels, some samples."""
    some = [dataset.get(i)[0] for i in range(0, len(dataset), max(1, len(dataset) // 16))]
    return dict(path=cfg["data"], samples=len(dataset), **getattr(dataset, "about", {}),
                crc=zlib.crc32(b"".join(a.tobytes() for a in [dataset.label, *some])))


def output_folder(cfg):
    root = files.place(os.environ.get("FEWSTEP_OUTPUT_ROOT", "outputs"))
    return root / cfg["project"] / cfg["group"] / cfg["name"]


def make_folder(folder, problem, cure, subs=("",)):
    """Create the folder and its `subs`; BadInput "problem (reason); cure" if nothing can be written there."""
    if not isinstance(folder, Path):                    # a store has no folders to create, so it is asked
        files.write(folder / ".writable", lambda f: f.write(b"yes"))
        return files.remove(folder / ".writable")
    try:
        for sub in subs:
            (folder / sub).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise BadInput(f"{problem} ({e.strerror}); {cure}") from None


def check_folder(method, cfg, folder, state=None, data=None):
    """True if there are checkpoints to continue from; BadInput if they (`state`: the newest) are not ours."""
    if not ckpt.scan(folder / "checkpoints"):
        return False
    if cfg["resume"] == "":
        raise BadInput(f"{folder} holds checkpoints, which --resume \"\" refuses; start anew with --name "
                       f"NEW, or continue with --resume auto")
    was = method.path.stem
    with contextlib.suppress(BadInput, ValueError, AttributeError):     # without it the checkpoint knows
        was = (state or json.loads(files.read(folder / "config.json") or b"{}")).get("method", was)
    if was != method.path.stem:
        raise BadInput(f"{folder} is a run of {was}, not of {method.path.stem}; use --name NEW")
    copied, began = files.read(folder / "method.py"), (state or {}).get("data", data)
    if cfg["resume"] != "force" and copied not in (None, method.source):
        raise BadInput(f"{method.path} has changed since {folder} began; --name NEW starts a new run, "
                       f"--resume force continues with the changed file")
    if cfg["resume"] != "force" and began and (began | dict(path="")) != (data | dict(path="")):
        raise BadInput(f"--data {cfg['data']} is not the data {folder} began with, {began['path']} then; "
                       f"--name NEW starts a new run, --resume force continues with the other data")
    return True


def like(default, value, what):
    """The value in the type of a key's default, or BadInput: an int may stand for a float, nothing else."""
    if type(value) is not type(default) and (type(value), type(default)) != (int, float):
        raise BadInput(f"{what} is not of the type of {default!r}")
    return type(default)(value)


def parse(key, text, default, where):
    """The value of `text` in the type of the key's default. Raises BadInput."""
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, int):
            number = float(text)                        # 1e4 is an int for an int key, 3.5 is not
            if number != int(number):
                raise ValueError
            return int(text) if text.lstrip("+-").replace("_", "").isdigit() else int(number)
        if isinstance(default, float):
            number = float(text)
            if not math.isfinite(number):
                raise ValueError
            return number
        if isinstance(default, tuple):                  # a,b or, as --dry_run prints it, ('a', 'b') or [1, 2]
            words = bool(default) and isinstance(default[0], str)
            values = tuple(ast.literal_eval(text) if text[:1] in ("(", "[") else
                           [e.strip() if words else element(e.strip()) for e in text.split(",") if e.strip()])
            kinds = str if words else (int, float) if default else (int, float, str)
            if not all(isinstance(e, kinds) for e in values):
                raise ValueError
            return values
        return text
    except (KeyError, ValueError, OverflowError, TypeError, SyntaxError):
        kind = {bool: "true, false, 1 or 0", int: "a whole number", float: "a number",
                tuple: "a list a,b of such values"}[type(default)]
        raise BadInput(f"--{key} {text!r} does not fit: {where} has {default!r} there, so give "
                       f"{kind}") from None


def element(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def val_settings(cfg):
    """[("", {})] and one (label, {key: value}) per entry of val_settings."""
    settings = [("", {})]
    for entry in cfg["val_settings"]:
        changes = {}
        for part in str(entry).split(";"):
            key, _, text = part.partition("=")
            if key not in cfg:
                raise BadInput(f"--val_settings names {key!r}, which is not a config key")
            changes[key] = parse(key, text, cfg[key], "--val_settings")
        settings.append((f"{entry}/", changes))
    return settings


# ---- start-up ----------------------------------------------------------------------------------------------

def open_folder(method, cfg, folder, sources, state, start, say):
    """config.json, method.py; on resume name what differs. Log lines and pictures past the checkpoint go."""
    pictures = [n for n in files.names(folder / "samples") if re.fullmatch(r"[0-9]{7}\.png", n)]
    late = [folder / "samples" / n for n in pictures if not state or int(n[:7]) > start]
    left = folder.rglob(".*.tmp") if isinstance(folder, Path) else ()       # by a killed save
    for file in [*left, *late]:
        files.remove(file)
    if state:
        for key, value in cfg.items():
            if state["config"].get(key, value) != value:
                say(f"config differs from the checkpoint: {key} was {state['config'][key]!r}, now {value!r}",
                    "warning")
    text = json.dumps(dict(cfg) | dict(method=method.path.stem, sources=sources), indent=1)
    files.write(folder / "config.json", lambda f: f.write(f"{text}\n".encode()))
    files.write(folder / "method.py", lambda f: f.write(method.source))
    metrics, lines = folder / "metrics.jsonl", []
    for line in (files.read(metrics) or b"").decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):           # a killed run may leave half a line
            if json.loads(line)["it"] <= start:
                lines.append(line + "\n")
    files.write(metrics, lambda f: f.write("".join(lines if state else []).encode()))


def take_lock(folder, rank, gloo):
    """One run per folder at a time. The lock is the kernel's: it ends with the process, however that ends.
    A store has none. Two runs with one URL would write whole files each, the last one's would stay."""
    none = rank or not isinstance(folder, Path)
    try:
        handle, error = open(os.devnull if none else folder / ".lock", "w"), None
    except OSError as e:                                # of another user
        none, error = True, f"could not open {folder}/.lock ({e.strerror}); use --name NEW"
    for attempt in range(0 if none else 20):            # a killed predecessor may still be saving
        error = None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            error = f"{folder} is in use by another run; wait for it, or use --name NEW"
            time.sleep(0.5)
        except OSError:                                 # a file system without locks
            break
    error = from_rank0(error, gloo)
    if error:
        raise BadInput(error)
    return handle
