"""Checkpoints: `N.pth`, N = iterations done in exactly seven digits.

A file is written under a temporary name, synced, and renamed, so a kill at any moment leaves whole files
only. The scan accepts seven digits and `.pth`, nothing else. Loading is weights-only (no pickled code runs)
and checks every byte against the archive's checksums. A *source* names weights for a net, `path[#entry]`: a
run folder (its newest checkpoint), a checkpoint, or a plain weights file; the entry is a net or an EMA in it.

    dict(format=1, it, method, config, counts, skipped, sources, nets, emas, optims, scaler)
"""
import contextlib
import os
import re
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

import common
from common import BadInput

ROOT = Path(__file__).resolve().parent
FORMAT = 1


def path(folder, it):
    return Path(folder) / f"{it:07d}.pth"


def scan(folder):
    """Iterations that have a checkpoint in `folder`, ascending; [] if there are none."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(n[:7]) for n in names if re.fullmatch(r"[0-9]{7}\.pth", n))


def write(file, save):
    """Call save(temporary name), sync it, and put it in place of `file` in one step. Raises BadInput that
    names the file if that fails; what was there before stays."""
    file = Path(file)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        save(temporary)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, file)
        folder = os.open(file.parent, os.O_RDONLY)      # the new name itself must survive a power cut
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as e:
        raise BadInput(f"could not write {file} ({e.strerror or e}); what was there before is "
                       f"untouched, free some space and start again to continue") from e
    finally:
        temporary.unlink(missing_ok=True)


def save(file, state):
    """Write a checkpoint, with one retry (network file systems hiccup; a full disk may have been cleared)."""
    def put(temporary):
        with open(temporary, "wb") as f:                # given a path, torch hides the reason (no space left)
            torch.save(state, f)

    try:
        write(file, put)
    except BadInput:
        write(file, put)


def prune(folder, keep_last, done):
    """Delete all but the newest `keep_last` checkpoints up to `done`, the one just written (later ones are
    damaged, else the run would be past them); 0 keeps all."""
    for it in [n for n in scan(folder) if n <= done][:-keep_last] if keep_last else []:
        path(folder, it).unlink(missing_ok=True)


def load(file):
    """The dict in a `.pth` or `.safetensors` file, on the CPU. Raises BadInput if it is truncated, damaged or
    not weights."""
    try:
        if Path(file).suffix == ".safetensors":
            from safetensors.torch import load_file
            return load_file(file)
        with zipfile.ZipFile(file) as z:
            damaged = z.testzip()                     # torch.load itself would load a flipped byte in silence
        if damaged:
            raise BadInput(f"{file} is damaged (wrong checksum in {damaged}); use another copy of it")
        content = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise BadInput(f"{file} holds a {type(content).__name__}, no dict of weights by name")
        return content
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist") from None
    except BadInput:
        raise
    except Exception as e:                              # truncated archives raise half a dozen types
        raise BadInput(f"{file} cannot be read as weights ({str(e).splitlines()[0]}); "
                       f"is it whole, and a .pth or .safetensors file of tensors?") from e


def newest(folder, say):
    """(it, state) of the newest readable checkpoint, or (None, None); `say` names each unreadable one."""
    for it in reversed(scan(folder)):
        try:
            state = load(path(folder, it))
            if state.get("format") != FORMAT or state.get("it") != it:
                raise BadInput(f"{path(folder, it)} is no training checkpoint of this version and iteration")
            return it, state
        except BadInput as e:
            say(f"WARNING: {e}; falling back to the checkpoint before it")
    return None, None


# ---- sources: path[#entry] ---------------------------------------------------------------------------------

def find(name):
    """`name` in the working directory, else beside this file (so `assets/...` works from anywhere)."""
    for p in (Path(name).expanduser(), ROOT / name):
        if os.path.exists(p):                           # p.exists() raises where a name is too long
            return p.resolve()
    return None


def checksum(file):
    """Of a file's content: from the checksums in a .pth archive's directory, else of all bytes."""
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as z:
        return zlib.crc32(repr([(i.CRC, i.file_size) for i in z.infolist()]).encode())
    return file.stat().st_size and zlib.crc32(np.memmap(file, mode="r"))


def resolve(source, hint=""):
    """Pin a source to one file: dict(file, entry, it, size, crc); it = -1 for a plain file. Raises BadInput,
    with `hint` as the cure, if there is no such file. A file of this repository is kept relative to it."""
    name, _, entry = source.partition("#")
    file = find(name) if name else None                 # "" would be the working directory
    if file is None:
        raise BadInput(f"{name or repr(source)} does not exist{'; ' + hint if hint else ''}")
    it = -1
    if file.is_dir():
        folder = file / "checkpoints" if (file / "checkpoints").is_dir() else file
        it, _ = newest(folder, lambda text: print(text, flush=True))
        if it is None:
            raise BadInput(f"{name} holds no checkpoints{' that can be read' if scan(folder) else ''}"
                           f"{'; ' + hint if hint else ''}")
        file = path(folder, it)
    elif re.fullmatch(r"[0-9]{7}\.pth", file.name):
        it = int(file.stem)
    inside = file.is_relative_to(ROOT / "assets")
    return dict(file=str(file.relative_to(ROOT) if inside else file), entry=entry, it=it,
                size=file.stat().st_size, crc=checksum(file))


def read(source):
    """State dict of a resolved source. Entry "" means the student of a checkpoint, or a plain file's only
    content. Raises BadInput if the file is gone or another one than when it was resolved."""
    file = find(source["file"])
    if not (file and file.stat().st_size == source["size"] and source.get("crc") in (None, checksum(file))):
        raise BadInput(f"{source['file']} is {'gone' if file is None else 'not the file it was'} since this "
                       f"run began ({source['size']} bytes then); put it back, or start anew with --name NEW")
    entry, content = source["entry"], load(file)
    if content.get("format") == FORMAT and "nets" in content:
        content = content["nets"] | content["emas"]
        entry = entry or "student"
    elif entry == "" and all(torch.is_tensor(v) for v in content.values()):
        content = {"": content}
    if not isinstance(content.get(entry), dict):
        entries = ", ".join(str(k) for k, v in content.items() if isinstance(v, dict)) or "plain weights"
        raise BadInput(f"{source['file']} has no entry {entry or '(none given)'}; it has {entries}: write "
                       f"the source as path#entry")
    if not all(isinstance(k, str) and torch.is_tensor(v) for k, v in content[entry].items()):
        raise BadInput(f"{source['file']}#{entry} holds something else than tensors by name, so no weights")
    return content[entry]


# ---- filling nets ------------------------------------------------------------------------------------------

def materialise(net, name, seed, given=()):
    """Give a net built on the meta device its storage on the CPU and draw what is not in `given` (keys of a
    state dict about to be loaded): module by module, each from the default generator seeded by (seed, name,
    module), so the result depends on nothing else. Buffers in no checkpoint are rebuilt on the way."""
    if any(p.is_meta for p in [*net.parameters(), *net.buffers()]):
        net.to_empty(device="cpu")
    given = set(given)
    for module_name, module in net.named_modules():
        prefix = module_name + "." if module_name else ""
        keys = {prefix + k for k, _ in module.named_parameters(recurse=False)}
        keys |= {prefix + k for k, _ in module.named_buffers(recurse=False)}
        if keys <= given:                               # nothing here, or all of it is loaded
            continue
        if not hasattr(module, "reset_parameters"):
            raise BadInput(f"{type(module).__name__} ({name}.{module_name}) owns {sorted(keys)[0]} but has "
                           f"no reset_parameters(); give it one that fills its parameters and buffers")
        common.seed_default(common.hash_seed(seed, name, module_name))
        module.reset_parameters()


def adapted(net, state):
    """A source's tensors in the net's own shapes, without the keys the net knowingly drops."""
    adapt = getattr(net, "adapt", lambda key, tensor: tensor)
    pairs = ((k, adapt(k, v)) for k, v in state.items())
    return {k: v for k, v in pairs if v is not None}


def fill(net, state, what, keys=None, optional=()):
    """Copy `state` into the net. `keys`: the keys it must hold (default: all of the net's); those under a
    prefix in `optional` may be absent. All else missing, unknown or misshapen is a BadInput naming `what`."""
    own = net.state_dict()
    keys = set(own if keys is None else keys)
    missing = sorted(k for k in keys - set(state) if not k.startswith(tuple(optional) or ("\0",)))
    unknown = sorted(set(state) - keys)
    shapes = [f"{k} {tuple(v.shape)} for {tuple(own[k].shape)}" for k, v in state.items()
              if k in keys and v.shape != own[k].shape]
    problems = [f"{len(p)} {kind} ({', '.join(p[:3])}{', ...' if len(p) > 3 else ''})"
                for kind, p in (("missing", missing), ("unknown", unknown), ("misshapen", shapes)) if p]
    if problems:
        raise BadInput(f"weights of {what} do not fit the net: {'; '.join(problems)}; is --net the one they "
                       f"were made with? --name NEW starts a new run")
    net.load_state_dict(state, strict=False)
