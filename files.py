"""Files of a run, on a disk or in an object store: a path with "://" is a URL, of any kind fsspec knows.

Credentials and server come from the usual environment and are written nowhere. What goes wrong is one
sentence, BadInput: after some 5 s where a server refuses, 20 s where none is reached, 70 s where one is
silent. In a store a folder is what names of objects begin with; files come and go by way of $TMPDIR. A kill
leaves whole files only: parts of an upload are no object (a life-cycle rule of the bucket,
AbortIncompleteMultipartUpload, removes them).
"""
import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from common import BadInput

CURE = "check the credentials, the bucket, the server (AWS_PROFILE, AWS_ENDPOINT_URL, ...) and $TMPDIR"
PATIENCE = dict(connect_timeout=3, read_timeout=15, retries=dict(mode="standard", total_max_attempts=4))
SLOWEST = 2 ** 20       # bytes per second; an upload that is slower is given up


def place(text):
    """A path or a URL as pathlib.Path or UPath, which the functions below take."""
    scheme, url, rest = str(text).partition("://")
    if not url:
        return Path(os.path.expanduser(text))
    if re.match(r"[^/@]*:[^/]*@", rest) or scheme.startswith("http") and "?" in rest:
        raise BadInput(f"a URL {scheme}:// with a password or a query would be logged; leave that to the "
                       f"environment, or fetch that file first")
    try:
        import fsspec
        from upath import UPath
        fsspec.config.conf.setdefault("s3", {}).setdefault("config_kwargs", PATIENCE)
        found = UPath(text)
        found.fs                                        # an unknown scheme or a missing package shows here
        return found
    except Exception as e:
        raise BadInput(f"{text} cannot be used ({reason(e)}); give a folder, or a URL such as "
                       f"s3://bucket/run after pip install universal_pathlib s3fs") from e


def store(file):
    """The file system of a UPath."""
    fs = file.fs
    fs.invalidate_cache()                               # it remembers listings, but others write there too
    if hasattr(fs, "s3"):
        from botocore.handlers import add_expect_header
        fs.s3.meta.events.unregister("before-call.s3", add_expect_header)   # "100 Continue" may never come
        fs.retries = 1                                  # botocore repeats requests, s3fs would repeat that
    return fs


def reason(e):
    text = " ".join((getattr(e, "strerror", None) or str(e) or type(e).__name__).split()).rstrip(".")
    return re.sub(r"\?[^\" ]*", "", text)[:300]         # without the query of a URL


@contextlib.contextmanager
def spoken(verb, file):
    """What a disk or a store says becomes BadInput: "could not VERB FILE (reason); cure"."""
    try:
        yield
    except Exception as said:
        while isinstance(said, RuntimeError) and (said.__cause__ or said.__context__):
            said = said.__cause__ or said.__context__   # torch.save raises one of its own on top
        if type(said).__module__ in ("builtins", "common", "torch") and not isinstance(said, OSError):
            raise                                       # a store's are of botocore, aiohttp, ...
        cure = "check the disk, or free some space" if isinstance(file, Path) else CURE
        safe = "what was there before is untouched, start again to continue; " if verb == "write" else ""
        raise BadInput(f"could not {verb} {file} ({reason(said)}); {safe}{cure}") from said


def write(file, save):
    """Call save(f), f a binary file open for writing, and put that in place of `file` in one step; its folder
    is made. If it fails what was there before stays, and an error of the disk or the store is BadInput."""
    local = isinstance(file, Path)
    with spoken("write", file), (contextlib.nullcontext(file.parent) if local else
                                 tempfile.TemporaryDirectory(prefix="fewstep_")) as folder:
        hidden = Path(folder, f".{file.name}.{os.getpid()}.tmp")
        hidden.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(hidden, "wb") as f:
                save(f)
                f.flush()
                os.fsync(f.fileno())
            if local:
                os.replace(hidden, file)
            else:                                       # botocore waits for ever if a server does not read
                limit = 5 * PATIENCE["read_timeout"] + hidden.stat().st_size / SLOWEST
                fs, part = store(file), file.path if file.fs.async_impl else f"{file.path}.tmp"
                fs.put_file(str(hidden), part, timeout=limit)
                if part != file.path:                   # sftp, ... write in place
                    fs.mv(part, file.path)
        finally:
            hidden.unlink(missing_ok=True)


def make(folder, cure="give another place"):
    """Create a folder and those above it; BadInput with this cure if nothing can be written there."""
    if not isinstance(folder, Path):                    # a store has no folders to create, so it is asked
        write(folder / ".writable", lambda f: f.write(b"yes"))
        return remove(folder / ".writable")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise BadInput(f"{folder} cannot be written to ({e.strerror}); {cure}") from None


def remove(file):
    """Delete a file, or a folder with all in it, if it is there."""
    with spoken("delete", file), contextlib.suppress(FileNotFoundError):
        if isinstance(file, Path):
            return shutil.rmtree(file) if file.is_dir() else file.unlink()
        for each in store(file).find(file.path):        # fs.rm takes * and [ for patterns, and says nothing
            file.fs.rm_file(each)                       # where the server refuses


@contextlib.contextmanager
def fetch(file):
    """A local Path to read: `file` itself, or of a URL a copy (in $TMPDIR) that goes with the context."""
    if isinstance(file, Path):
        yield file
        return
    with spoken("read", file):
        folder = tempfile.TemporaryDirectory(prefix="fewstep_")
        here, fs = Path(folder.name, file.name), store(file)
        try:
            fs.get_file(file.path, str(here))
        except Exception:                               # botocore repeats a request, not reading its answer
            if not here.exists():
                raise
            fs.get_file(file.path, str(here))
    with folder:
        yield here


def read(file):
    """The bytes of a file, or None if there is no such file."""
    with spoken("read", file), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return file.read_bytes() if isinstance(file, Path) else store(file).cat_file(file.path)


def exists(file):
    with spoken("find", file):
        return os.path.exists(file) if isinstance(file, Path) else store(file).exists(file.path)


def names(folder):
    """Names in a folder, ascending; [] if there is none."""
    with spoken("list", folder):
        if isinstance(folder, Path):
            return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        try:
            found = [p.rstrip("/") for p in store(folder).ls(folder.path, detail=False)]    # a file: itself
        except FileNotFoundError as e:
            if e.__cause__:                             # the server's own word: there is no such bucket
                raise
            return []
        return sorted(p.rpartition("/")[2] for p in found if p != folder.path.rstrip("/"))
