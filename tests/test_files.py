"""files.py, on a disk and against moto's S3 server."""
import os
import tempfile
from pathlib import Path

import pytest
import torch

import s3  # before what it may lack
import fsspec
import moto.server
import s3fs

import ckpt
import common
import files
import run
import sample
from run import config, load, refused

PART = 5 * 2 ** 20                                      # the smallest that S3 allows

@pytest.fixture(scope="module")
def server():
    with s3.server(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(files.PATIENCE, "retries", dict(mode="standard", total_max_attempts=2))
        patch.setitem(fsspec.config.conf, "s3", dict(default_block_size=PART))          # of what is read
        patch.setattr(s3fs.core, "calculate_chunksize", lambda *args, **kw: PART)       # of what is written
        yield

@pytest.fixture
def bucket(server, request):
    return s3.bucket(request)

@pytest.fixture(params=["disk", "store"])
def folder(request, tmp_path, bucket):
    return files.place(str(tmp_path) if request.param == "disk" else bucket.at + "/some/run")

def put(file, *parts, fault=None):
    """Writes the parts, then fails if there is an error."""
    def save(f):
        for part in parts:
            f.write(part)
        if fault:
            raise fault
    files.write(file, save)

def test_a_write_replaces_or_changes_nothing(folder):
    file, parts = folder / "x.bin", (b"a" * PART, b"b" * PART, b"c")
    put(file, b"old")
    refused(put, file, *parts, fault=OSError(28, "No space left on device"), says=[
        f"could not write {file} (No space left on device); what was there before is untouched"])
    for error in KeyError("a mistake"), KeyboardInterrupt(), common.BadInput("not finite"), \
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered"):
        with pytest.raises(type(error)) as raised:      # no fault of disk or store
            put(file, *parts, fault=error)
        assert raised.value is error
    assert files.read(file) == b"old" and files.names(folder) == ["x.bin"]
    put(file, *parts)
    assert files.read(file) == b"".join(parts) and files.names(folder) == ["x.bin"]

def test_the_error_of_torch_is_the_disks_and_one_of_tmpdir_damages_nothing(bucket, monkeypatch, tmp_path):
    file, state = files.place(bucket.at + "/x.pth"), dict(a=torch.arange(PART // 2))
    ckpt.save(file, state)
    monkeypatch.setattr(files, "open", lambda *_: open("/dev/full", "wb"), raising=False)
    refused(ckpt.save, file, state, says=[f"could not write {file} (No space left on device); "])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(common.BadInput, match=r"\$TMPDIR") as raised:
        ckpt.load(file)
    assert not isinstance(raised.value, ckpt.Damaged)

def test_a_folder_lists_and_removes_what_is_in_it_whoever_put_it_there(folder, bucket):
    assert not files.exists(folder / "x00") and files.names(folder) == []
    for name in (names := [f"x{i:02d}" for i in range(25)]):        # three pages of this server
        put(folder / name, b"1")
    for name in "a[1]*", "a1", "sub/b", "sub/c/d", "subs":
        files.make((folder / name).parent)
        put(folder / name, b"1")
    assert files.names(folder) == ["a1", "a[1]*", "sub", "subs", *names] and files.names(folder / "x01") == []
    for name in "a[1]*", "sub", "nothing":
        files.remove(folder / name)
    assert files.names(folder) == ["a1", "subs", *names] and files.read(folder / "sub" / "b") is None
    if not isinstance(folder, Path):                    # another program changes what has just been listed
        bucket.put_object(Key="some/run/z", Body=b"3")
        bucket.Object("some/run/x01").delete()
        assert files.exists(folder / "z") and not files.exists(folder / "x01")
        assert files.names(folder) == ["a1", "subs", names[0], *names[2:], "z"]

def test_what_a_store_refuses_is_one_sentence_without_secrets_and_loses_nothing(bucket, monkeypatch):
    def sentences(of, says):
        s3fs.S3FileSystem.clear_instance_cache()
        for act, *args in (put, b"new"), (put, b"n" * 2 * PART), (ckpt.load,), (files.names,):
            said = refused(act, files.place(of + "/run"), *args, says=[of, says, "check the credentials"])
            assert not any(key in said for key in s3.KEYS.values())
    put(files.place(bucket.at + "/run"), b"old")
    sentences("s3://there-is-no-such-bucket", "bucket does not exist")
    with monkeypatch.context() as patch:
        patch.setattr(moto.settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
        sentences(bucket.at, "The AWS Access Key Id you provided does not exist")
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")          # where nobody listens
        sentences(bucket.at, "Could not connect")
    s3fs.S3FileSystem.clear_instance_cache()
    assert files.read(files.place(bucket.at + "/run")) == b"old" and not [*bucket.multipart_uploads.all()]
    for url in "sftp://me:SECRET@host/x", "http://h/t.pth?sig=SECRET":
        assert "SECRET" not in refused(files.place, url, says=["would be logged"])
    refused(files.place, "s4://b/x", says=["s4://b/x cannot be used (", "pip install universal_pathlib s3fs"])
    assert files.place("~/x") == Path.home() / "x" and isinstance(files.place("a/b:c"), Path)

def test_a_run_in_a_store_is_the_run_on_a_disk(bucket, monkeypatch, capsys):
    method, kept = load("sft"), []
    for root in os.environ["FEWSTEP_OUTPUT_ROOT"], bucket.at + "/out":
        monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", root)
        cfg = config(method, max_iter=6, save_every=2, keep_last=2, val_every=3, sample_every=3)
        run.run(method, cfg | dict(stop_at=3))
        kept.append(run.run(method, cfg))
        sample.main([str(kept[-1].folder), "--seeds", "0-3"])
    disk, store = (k.folder for k in kept)
    run.assert_alike(*(k.lines for k in kept))
    assert run.differing(run.saved(disk, 6), run.saved(store, 6)) == []
    for sub in "checkpoints", "samples":
        assert files.names(disk / sub) == files.names(store / sub)
    assert {n for n in files.names(disk) if n[0] != "."} == {*files.names(store)}
    assert capsys.readouterr().out.count("4 samples of ema") == 2
    assert b"verysecret" not in b"".join(o.get()["Body"].read() for o in bucket.objects.all())
