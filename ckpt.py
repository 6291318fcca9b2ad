"""Checkpoints: `N.pth`, N = iterations done in exactly seven digits, on a disk or an object store (files.py).

    N.pth                                dict(format=2, it, method, config, counts, skipped, sources, data,
                                         nets, emas, optims, scaler, shards); the commit record, written last
    N.{net}_model/rank_00000.pth         with sharded nets beside it: the rows that each rank holds, of nets,
    N.{ema}_model/  N.{phase}_optim/     averages and optimizers; shards says how many files, and their keys

A kill at any moment leaves whole files only. Loading is weights-only (no pickled code runs) and checks every
byte against the archive's checksums; a stamp tells files of one save from another's. Why not
torch.distributed.checkpoint: its metadata is a pickle, nothing notices a flipped byte, and a save in the
background runs collectives of its own.

A *source* names weights for a net, `path[#entry]`: a run folder (its newest checkpoint) or a checkpoint, the
entry being a net or an EMA in it; a plain file of weights; a folder of safetensors, as diffusers writes a
model or (entry: its sub-folder, else unet or transformer) a pipeline; or such a repository of the Hugging
Face hub, `org/name` or `hf://org/name@revision`.
"""
import contextlib
import errno
import functools
import json
import os
import re
import secrets
import zipfile
import zlib
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import files
import shard
from common import BadInput, everyone, from_rank0, on_rank0

ROOT = Path(__file__).resolve().parent
FORMAT = 2
KINDS = dict(nets="model", emas="model", optims="optim")
SHARDS = r"\w+_(model|optim)"


def path(folder, it):
    return folder / f"{it:07d}.pth"


def scan(folder, ending="pth"):
    """Iterations that have a checkpoint in `folder`, ascending; or that have SHARDS, whole or not."""
    return sorted({int(n[:7]) for n in files.names(folder) if re.fullmatch(rf"[0-9]{{7}}\.{ending}", n)})


class Damaged(BadInput):
    """What a checkpoint holds is not what was written; not a disk that does not answer, which may pass."""


def together(f, group):
    """f() on every rank of a gloo group; what is BadInput on any is raised on all, Damaged if it is that on
    all that failed."""
    value = error = None
    try:
        value = f()
    except BadInput as e:
        error = not isinstance(e, Damaged), str(e)
    if errors := [*filter(None, everyone(error, group))]:
        other, text = max(errors)
        raise (BadInput if other else Damaged)(text)
    return value


# ---- shards ------------------------------------------------------------------------------------------------

class Lazy(Mapping):
    """{key: tensor}: what `index`, {key: (shape, type)}, names is read when asked for, `plain` is here."""
    plain = {}

    def __getitem__(self, key):
        return self.read(key) if key in self.index else self.plain[key]

    def __iter__(self):
        yield from [*self.index, *self.plain]

    def __len__(self):
        return len(self.index) + len(self.plain)


class Shards(Lazy):
    """The tensors of one folder of rank files and, in `plain`, of the record."""

    def __init__(self, plain, folder, index, count, stamp):
        self.plain, self.folder, self.index, self.count, self.stamp = plain, folder, index, count, stamp
        self.opened = {}

    def file(self, at):
        """The rows of rank `at`, {key: tensor}. Raises Damaged if they are missing, or another save's."""
        if at not in self.opened:
            file = self.folder / f"rank_{at:05d}.pth"
            if not files.exists(file):
                raise Damaged(f"{file} does not exist")
            content = load(file)
            if content.get("stamp") != self.stamp or set(content.get("rows", ())) != set(self.index):
                raise Damaged(f"{file} is not of the same save as {self.folder.name[:7]}.pth")
            self.opened[at] = content["rows"]
        return self.opened[at]

    def rows(self, key, first, end):
        """Rows [first, end) of a tensor. torch.chunk's division."""
        each = -(-self.index[key][0][0] // self.count)
        parts = [self.file(at)[key][max(first - at * each, 0):end - at * each]
                 for at in range(first // each, -(-end // each))]
        return torch.cat(parts) if parts else self.file(0)[key][:0]

    def read(self, key):
        return self.rows(key, 0, self.index[key][0][0])

    def __getstate__(self):                             # to the other ranks, which open files themselves
        return vars(self) | dict(opened={}, plain=meta(self.plain))


def spec(held, key):
    """The shape and type of an entry, as a tensor that may be on the meta device; nothing is read."""
    if key in getattr(held, "index", ()):
        shape, dtype = held.index[key]
        return torch.empty(shape, dtype=dtype, device="meta")
    return held[key]


def meta(content):
    """A nested dict without the values of its tensors (numbers stay)."""
    return tree_map(lambda v: v.to("meta") if torch.is_tensor(v) and v.dim() else v, content)


def shared(content, group):
    """Rank 0's nested dict on every rank; on the others its tensors are shape and type (see fill.spread)."""
    theirs = from_rank0(meta(content), group)
    return theirs if content is None else content


def split(content, count=0, stamp=""):
    """(record for N.pth, {folder: {key: this rank's rows}}), with `count` files to a folder."""
    record, parts, index = dict(content), {}, {}
    for kind, end in KINDS.items():
        record[kind] = {}
        for name, held in content[kind].items():
            rows = {k: v for k, v in held.items() if shard.sharded(v)}
            record[kind][name] = {k: v for k, v in held.items() if k not in rows}
            if rows:
                parts[f"{name}_{end}"] = {k: shard.local(v) for k, v in rows.items()}
                index[f"{name}_{end}"] = {k: (tuple(v.shape), v.dtype) for k, v in rows.items()}
    record["shards"] = dict(index=index, count=count, stamp=stamp)
    return record, parts


def whole(state, file):
    """The record as it was before `split`: shards in their places."""
    shards = state["shards"]
    for kind, end in KINDS.items():
        for name, plain in state[kind].items():
            part = f"{name}_{end}"
            if part in shards["index"]:
                state[kind][name] = Shards(plain, file.parent / f"{state['it']:07d}.{part}",
                                           shards["index"][part], shards["count"], shards["stamp"])
    return state


# ---- writing -----------------------------------------------------------------------------------------------

def save(file, content):
    """Write one file, with one retry (network file systems hiccup; a full disk may have been cleared)."""
    with contextlib.suppress(BadInput):
        return files.write(file, lambda f: torch.save(content, f))
    files.write(file, lambda f: torch.save(content, f))


def clear(folder, its, kept=()):
    """Delete all that is there of the iterations `its` but for those `kept`, the records first."""
    for name in sorted(files.names(folder), key=lambda n: not n.endswith(".pth")):
        if re.match(r"[0-9]{7}\.", name) and int(name[:7]) in its and int(name[:7]) not in kept:
            files.remove(folder / name)


class Saver:
    """Writes the checkpoints of a run; every rank calls its methods alike, in the same iterations. In the
    background: what is saved is first copied to host memory, then written by a thread, without collectives;
    `finish` commits it, in the next `save` or once no rank is `busy` any more. saved: the last one's
    iteration."""

    def __init__(self, folder, cfg, saved, rank, gloo, mesh, say):
        self.folder, self.saved, self.rank, self.gloo, self.say = folder, saved, rank, gloo, say
        self.keep_last, self.background = cfg["keep_last"], cfg["async_save"]
        self.at, self.count, self.writes = 0, 0, rank == 0
        if mesh is not None:
            *replica, self.at = mesh.get_coordinate()
            self.count, self.writes = mesh.size(mesh.ndim - 1), sum(replica) == 0   # replicas write once
        self.pool, self.job, self.due = futures.ThreadPoolExecutor(1), None, ()

    def save(self, it, content, wait=False):
        """content(): the state dict, with this rank's rows of sharded tensors. BadInput on every rank if any
        could not write. Nothing where `it` is saved."""
        self.finish()
        if it == self.saved:
            return
        self.saved, background = it, self.background and not wait
        stamp = from_rank0(secrets.token_hex(4), self.gloo) if self.count else ""

        def own():
            """(the record, on rank 0; the rows that this rank writes)"""
            record, parts = split(content(), self.count, stamp) if self.count or self.rank == 0 else ({}, {})
            held = record if self.rank == 0 else {}, parts if self.writes else {}
            copy = lambda v: v.detach().to("cpu", copy=True) if torch.is_tensor(v) else v       # noqa: E731
            return tree_map(copy, held) if background else held

        record, parts = together(own, self.gloo)
        write = functools.partial(self.write, it, record, parts, stamp)
        self.job = self.pool.submit(write) if background else None
        self.due = it, record, self.job.result if background else write
        if not background:
            self.finish()

    def write(self, it, record, parts, stamp):
        """This rank's files; of replicas the whole checkpoint."""
        try:
            for part, rows in parts.items():
                file = self.folder / f"{it:07d}.{part}" / f"rank_{self.at:05d}.pth"
                save(file, dict(stamp=stamp, rows=rows))
            if self.rank == 0 and not self.count:
                save(path(self.folder, it), record)
        except BadInput:
            raise
        except Exception as e:                          # every rank has to hear of it
            raise BadInput(f"{path(self.folder, it)}: {e!r}") from e

    def busy(self):
        return self.job is not None and not self.job.done()

    def wait(self):
        """Until the background has written what it was given."""
        futures.wait([self.job] if self.job else [])

    def finish(self):
        """Wait for what is being written, if anything is, and commit it."""
        if self.due:
            (it, record, written), self.due = self.due, ()
            together(written, self.gloo)
            on_rank0(lambda: self.commit(it, record), self.gloo)

    def commit(self, it, record):
        """The record of shards; then older checkpoints go, and what saves that did not finish left. Later
        ones stay: they are damaged, else the run would be past them."""
        if self.count:
            save(path(self.folder, it), record)
        try:
            if self.keep_last:
                older = [n for n in scan(self.folder) if n <= it]
                clear(self.folder, range(it + 1), kept=older[-self.keep_last:])
        except BadInput as e:                           # what is there too much can wait
            self.say.warn(f"WARNING: {e}")


# ---- reading -----------------------------------------------------------------------------------------------

def load(file, name=None):
    """The dict in a `.pth` or `.safetensors` file, on the CPU; a big file is mapped rather than read. Raises
    Damaged, which calls it `name`, if it is missing, truncated, damaged or not weights."""
    name = name or file
    try:
        with files.fetch(file) as here:
            if here.suffix == ".safetensors":
                lazy = Safetensors([here])              # of a URL's copy all, before it goes
                return lazy if here == name else dict(lazy)
            with zipfile.ZipFile(here) as z:
                bad = z.testzip()                     # torch.load itself would load a flipped byte in silence
            if bad:
                raise Damaged(f"{name} is damaged (wrong checksum in {bad}); use another copy of it")
            big = here.stat().st_size > 2 ** 28       # mapped: not all in memory, but nobody may write there
            content = torch.load(str(here), map_location="cpu", weights_only=True, mmap=big)
        if not isinstance(content, dict):
            raise Damaged(f"{name} holds a {type(content).__name__}, no dict of weights by name")
        return content
    except BadInput:
        raise
    except FileNotFoundError:
        raise Damaged(f"{name} does not exist") from None
    except Exception as e:                              # truncated archives raise half a dozen types; EINVAL:
        broken = (errno.EINVAL, errno.EISDIR)           # the archive's directory points before its beginning
        if isinstance(e, MemoryError) or isinstance(e, OSError) and e.errno not in broken:
            raise BadInput(f"could not read {name} ({type(e).__name__}: {e}); try again") from e
        raise Damaged(f"{name} cannot be read as weights ({str(e).splitlines()[0]}); "
                      f"is it whole, and a .pth or .safetensors file of tensors?") from e


def load_checkpoint(file):
    """A training checkpoint, its shards as mappings that read when asked."""
    state = load(file)
    if state.get("format") != FORMAT or not isinstance(state.get("it"), int):
        raise Damaged(f"{file} is no training checkpoint of this version")
    if f"{state['it']:07d}" != file.stem:
        raise Damaged(f"{file} is that of iteration {state['it']}, renamed")
    return whole(state, file)


def newest(folder, say, group=None):
    """(it, state) of the newest checkpoint that is whole, or (None, None); `say` names each that is damaged;
    one that cannot be read for another reason is a BadInput: what is newer must not be written over.
    Every rank of the gloo group calls it; rank 0 has the tensors of N.pth, every rank those of shards."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
    for it in from_rank0(scan(folder)[::-1] if rank == 0 else None, group):
        try:
            state = together(lambda: load_checkpoint(path(folder, it)) if rank == 0 else None, group)
            state = shared(state, group)
            shards = [h for kind in KINDS for h in state[kind].values() if isinstance(h, Shards)]
            together(lambda: [h.file(at) for h in shards for at in range(rank, h.count, ranks)], group)
            return it, state
        except Damaged as e:
            say(f"WARNING: {e}; falling back to the checkpoint before it")
    return None, None


# ---- sources: path[#entry] ---------------------------------------------------------------------------------

def find(name):
    """`name` in the working directory, else beside this file (so `assets/...` works from anywhere)."""
    if name.startswith("hf://"):
        return hub(name)
    if "://" in name:
        file = files.place(name)
        return file if files.exists(file) else None
    for p in (files.place(name), ROOT / name):
        if os.path.exists(p):                           # p.exists() raises where a name is too long
            return p.resolve()
    return None


def hub(name):
    """The local folder of a hub repository, hf://org/name[@revision], which fetches what is missing."""
    repo, _, revision = name.removeprefix("hf://").partition("@")
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(
            repo, revision=revision or None, ignore_patterns=["*.fp16.*", "*.non_ema.*"],
            allow_patterns=["*.json"] + [f"{part}*.safetensors" for part in ("", "unet/", "transformer/")]))
    except ImportError:
        raise BadInput(f"{name} needs the hub's client; pip install huggingface_hub") from None
    except Exception as e:                              # of the network, of access rights, ...
        raise BadInput(f"{repo} is neither here nor to be had from the hub ({files.reason(e)}); give a path, "
                       f"or see to the network, the name and `hf auth login`") from e


def weight_files(folder, entry=""):
    """The safetensors files, ascending, of a folder that diffusers wrote; of a pipeline the denoiser's."""
    parts = [entry] if entry else ["unet", "transformer"] if (folder / "model_index.json").exists() else [""]
    for part in parts:
        for index in sorted((folder / part).glob("*.safetensors.index.json")):
            names = sorted({*json.loads(index.read_text())["weight_map"].values()})
            if absent := [n for n in names if not (folder / part / n).exists()]:
                raise Damaged(f"{folder / part / absent[0]} does not exist, but {index.name} names it")
            return [folder / part / n for n in names]
        if found := [f for f in sorted((folder / part).glob("*.safetensors")) if ".fp16." not in f.name]:
            return found
    return []


class Safetensors(Lazy):
    """The tensors of safetensors files. A file is open while a tensor is read and no longer, as what is
    mapped counts as memory."""
    types = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16,
                 I64=torch.int64, I32=torch.int32, U8=torch.uint8, BOOL=torch.bool)

    def __init__(self, names):
        self.where, self.index = {}, {}
        for name in names:
            with self.opened(name) as f:
                for key in f.keys():                                                    # noqa: SIM118
                    view = f.get_slice(key)
                    self.where[key], kind = name, self.types[view.get_dtype()]
                    self.index[key] = tuple(view.get_shape()), kind

    @staticmethod
    @contextlib.contextmanager
    def opened(name):
        from safetensors import SafetensorError, safe_open
        try:
            with safe_open(name, "pt") as f:
                yield f
        except (SafetensorError, FileNotFoundError, KeyError) as e:
            raise Damaged(f"{name} cannot be read as weights ({str(e).splitlines()[0]}); is it whole, and of "
                          f"tensors?") from e

    def read(self, key):
        with self.opened(self.where[key]) as f:
            return f.get_tensor(key)


def pin(here, entry=""):
    """dict(size, crc) of local weights: of the checksums in a .pth archive's directory; of a folder's
    safetensors names, sizes and headers; else of all bytes."""
    parts, crc = weight_files(here, entry), 0
    size = sum(file.stat().st_size for file in parts or [here])
    for file in parts:
        with open(file, "rb") as f:
            head = f.read(int.from_bytes(f.read(8), "little"))
        crc = zlib.crc32(repr((file.name, file.stat().st_size)).encode() + head, crc)
    if here.is_file():
        with contextlib.suppress(Exception), zipfile.ZipFile(here) as z:     # a damaged one raises all sorts
            sums = repr([(i.CRC, i.file_size) for i in z.infolist()])
            return dict(size=size, crc=zlib.crc32(sums.encode()))
        crc = size and zlib.crc32(np.memmap(here, mode="r"))
    return dict(size=size, crc=crc)


def resolve(source, hint=""):
    """Pin a source to one file: dict(file, entry, it, size, crc); it = -1 for a plain file. Raises BadInput,
    with `hint` as the cure, if there is no such file. A file of this repository is kept relative to it, one
    of the hub by the revision that its cache's folder names."""
    name, _, entry = source.partition("#")
    file, it = find(name) if name else None, -1         # "" would be the working directory
    hubs = name.startswith("hf://")
    if file is None and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name.split("/")[0]):
        file, hubs = hub(name), True
    if file is None:
        raise BadInput(f"{name or repr(source)} does not exist{'; ' + hint if hint else ''}")
    entries, local = files.names(file), isinstance(file, Path)
    if local and weight_files(file, entry):
        kept = f"hf://{name.removeprefix('hf://').partition('@')[0]}@{file.name}" if hubs else file
    else:
        if entries or file.is_dir():
            folder = file / "checkpoints" if "checkpoints" in entries else file
            it, _ = newest(folder, lambda text: print(text, flush=True))
            if it is None:
                raise BadInput(f"{name} holds no checkpoints{'; ' + hint if hint else ''}")
            file = path(folder, it)
        elif re.fullmatch(r"[0-9]{7}\.pth", file.name):
            it = int(file.stem)
        kept = file.relative_to(ROOT) if local and file.is_relative_to(ROOT / "assets") else file
    with files.fetch(file) as here:
        return dict(file=str(kept), entry=entry, it=it, **pin(here, entry))


def read(source):
    """Tensors by name of a resolved source. Entry "" means the student of a checkpoint, or a plain file's
    only content. Raises BadInput if the file is gone or another one than when it was resolved."""
    file, entry, content = find(source["file"]), source["entry"], None
    if file is not None:
        with files.fetch(file) as here:                 # of a URL: one copy for both
            if pin(here, entry) == {k: source[k] for k in ("size", "crc")}:
                if parts := weight_files(here, entry):
                    return Safetensors(parts)
                content = load(here, file)
    if content is None:
        raise BadInput(f"{source['file']} is {'not the file it was' if file else 'gone'} since this run "
                       f"began ({source['size']} bytes then); put it back, or start anew with --name NEW")
    if content.get("format") == FORMAT and "nets" in content:
        content = whole(content, file)
        content, entry = content["nets"] | content["emas"], entry or "student"
    elif entry == "" and (isinstance(content, Lazy) or all(map(torch.is_tensor, content.values()))):
        return content
    held = content.get(entry)
    if not isinstance(held, Mapping):
        entries = ", ".join(str(k) for k, v in content.items() if isinstance(v, Mapping)) or "plain weights"
        raise BadInput(f"{source['file']} has no entry {entry or '(none given)'}; it has {entries}: write "
                       f"the source as path#entry")
    if isinstance(held, dict) and not all(isinstance(k, str) and torch.is_tensor(v) for k, v in held.items()):
        raise BadInput(f"{source['file']}#{entry} holds something else than tensors by name, so no weights")
    return held
