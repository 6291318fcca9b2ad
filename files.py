"""Files of a run, on a disk or in an object store: a path with "://" is a URL, of any kind fsspec knows.

Credentials and server come from the usual environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL, ...;
a server's oddities by fsspec's, FSSPEC_S3='{"fixed_upload_size": true}') and are written nowhere. What goes
wrong is one sentence, BadInput: after some 5 s where a server refuses, 20 s where none is reached, 70 s where
one is silent. In a store a folder is what names of objects begin with. A kill leaves whole files only: parts
of an upload are no object (a life-cycle rule of the bucket, AbortIncompleteMultipartUpload, removes them).
"""
import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from common import BadInput

CURE = "check the credentials, the bucket and the server (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL)"
PATIENCE = dict(connect_timeout=3, read_timeout=15, retries=dict(mode="standard", total_max_attempts=4))


def place(text):
    """A path or a URL as pathlib.Path or UPath, which the functions below take; one of these stays itself."""
    if not isinstance(text, str):
        return text
    scheme, url, rest = text.partition("://")
    if not url:
        return Path(os.path.expanduser(text))
    if re.match(r"[^/@]*:[^/]*@", rest):
        raise BadInput(f"a URL {scheme}:// with a password would be logged; leave that to the environment")
    try:
        import fsspec
        from upath import UPath
        if scheme in ("s3", "s3a"):
            import s3fs
            s3fs.S3FileSystem.retries = 1               # botocore repeats requests, s3fs would repeat that
            fsspec.config.conf.setdefault("s3", {}).setdefault("config_kwargs", PATIENCE)
        found = UPath(text)
        found.fs                                        # an unknown scheme or a missing package shows here
        return found
    except Exception as e:
        raise BadInput(f"{text} cannot be used ({reason(e)}); give a folder, or a URL such as "
                       f"s3://bucket/run after pip install universal_pathlib s3fs") from e


def reason(e):
    text = " ".join((getattr(e, "strerror", None) or str(e) or type(e).__name__).split()).rstrip(".")
    return re.sub(r"\?[^\" ]*", "", text)[:300]         # without the query of a URL


@contextlib.contextmanager
def spoken(verb, file):
    """What a disk or a store says becomes BadInput: "could not VERB FILE (reason); cure"."""
    try:
        yield
    except Exception as e:
        said, local = e, isinstance(file, Path)
        while isinstance(said, RuntimeError) and (said.__cause__ or said.__context__):
            said = said.__cause__ or said.__context__   # torch.save raises one of its own on top
        strange = local or type(said).__module__ in ("builtins", "common")
        if strange and not isinstance(said, OSError):   # a store's are of botocore, aiohttp, ...
            raise
        cure = CURE if not local else "free some space" if verb == "write" else "check the disk"
        if verb == "write":
            cure = f"what was there before is untouched, {cure} and start again to continue"
        raise BadInput(f"could not {verb} {file} ({reason(said)}); {cure}") from e


def store(file):
    """(file system, path in it) of a UPath."""
    fs = file.fs
    fs.invalidate_cache()                               # it remembers listings, but others write there too
    if hasattr(fs, "s3"):
        fs.s3.meta.events.register_last("before-call.s3", at_once, unique_id="fewstep")
    return fs, file.path


def at_once(params, **_):
    """Send without waiting for the server's "100 Continue": that wait has no time-out."""
    params["headers"].pop("Expect", None)


# ---- writing -----------------------------------------------------------------------------------------------

def write(file, save):
    """Call save(f), f a binary file open for writing, and put that in place of `file` in one step. If it
    fails what was there before stays, and an error of the disk or the store is BadInput."""
    with spoken("write", file), (temporary if isinstance(file, Path) else upload)(file) as f:
        save(f)


@contextlib.contextmanager
def temporary(file):
    hidden = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(hidden, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(hidden, file)
        folder = os.open(file.parent, os.O_RDONLY)      # the new name itself must survive a power cut
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        hidden.unlink(missing_ok=True)


@contextlib.contextmanager
def upload(file):
    fs, path = store(file)
    at_close = fs.async_impl                            # object stores commit in the last request of close()
    if not at_close:                                    # sftp, memory, ...: in commit(); they have folders
        fs.makedirs(fs._parent(path), exist_ok=True)
    f = fs.open(path, "wb", autocommit=at_close)
    fs.transaction.files.clear()                        # fsspec would keep each that is not committed yet
    try:
        yield f
        f.close()
        if not at_close:
            f.commit()
    except BaseException:                               # `with f` or __del__ would commit what there is
        with contextlib.suppress(Exception):
            f.discard()                                 # fails where the server is gone
        with contextlib.suppress(Exception):
            f.closed = True
        raise


def make(folder):
    """Create a folder and those above it; a store has none (s3fs would create a bucket)."""
    with spoken("create", folder):
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)


def remove(file):
    """Delete a file, or a folder with all in it, if it is there."""
    with spoken("delete", file), contextlib.suppress(FileNotFoundError):
        if not isinstance(file, Path):
            fs, path = store(file)
            for each in fs.find(path):                  # fs.rm takes * and [ for patterns, and says nothing
                fs.rm_file(each)                        # where the server refuses
        elif file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink()


# ---- reading -----------------------------------------------------------------------------------------------

@contextlib.contextmanager
def fetch(file):
    """A local Path to read: `file` itself, or of a URL a copy (in $TMPDIR) that goes with the context."""
    if isinstance(file, Path):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="fewstep_") as folder:
        copy = Path(folder) / file.name
        with spoken("read", file):
            try:
                file.fs.get_file(file.path, str(copy))
            except Exception:                           # botocore repeats a request, not reading its answer
                if not copy.exists():
                    raise
                file.fs.get_file(file.path, str(copy))
        yield copy


def read(file):
    """The bytes of a file, or None if there is no such file."""
    with spoken("read", file), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return file.read_bytes() if isinstance(file, Path) else file.fs.cat_file(file.path)


def exists(file):
    with spoken("find", file):
        return os.path.exists(file) if isinstance(file, Path) else store(file)[0].exists(file.path)


def names(folder):
    """Names in a folder, ascending; [] if there is none."""
    with spoken("list", folder):
        if isinstance(folder, Path):
            return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        fs, path = store(folder)
        try:
            found = [p.rstrip("/") for p in fs.ls(path, detail=False)]
        except FileNotFoundError as e:
            if e.__cause__:                             # the server's own word: there is no such bucket
                raise
            return []
        return sorted(p.rpartition("/")[2] for p in found if p != path.rstrip("/"))     # a file lists itself
