"""files.py, on a disk and against a real S3 server that runs beside the tests."""
import gc
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import ckpt
import common
import files
import logs
import run
import sample
from run import config, load, refused

for module in "s3fs", "upath", "moto.server", "boto3":
    pytest.importorskip(module, reason="pip install universal_pathlib s3fs boto3 'moto[server]'")

import boto3  # noqa: E402
import fsspec  # noqa: E402
import s3  # noqa: E402
import s3fs  # noqa: E402

PART = 5 * 2 ** 20                                      # the smallest that S3 allows


@pytest.fixture(scope="module")
def wire():
    patience = files.PATIENCE | dict(retries=dict(mode="standard", total_max_attempts=3))
    with pytest.MonkeyPatch.context() as patch, s3.server() as wire:
        for key in [k for k in os.environ if k.startswith("AWS_")]:
            patch.delenv(key)
        for key, value in (s3.ENV | dict(AWS_ENDPOINT_URL=f"http://127.0.0.1:{wire.port}")).items():
            patch.setenv(key, value)
        patch.setitem(fsspec.config.conf, "s3", dict(config_kwargs=patience, default_block_size=PART))
        yield wire
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(wire, request):
    """boto3's view of a new bucket: another program that works in the store. `at`: its URL."""
    name = f"b{abs(hash(request.node.name))}"
    bucket = boto3.resource("s3", region_name="us-east-1").create_bucket(Bucket=name)
    bucket.at = f"s3://{name}"
    return bucket


@pytest.fixture(params=["disk", "store"])
def folder(request, tmp_path, bucket):
    return files.place(str(tmp_path) if request.param == "disk" else bucket.at + "/some/run")


def put(file, *parts):
    files.write(file, lambda f: [f.write(part) for part in parts])


def bad(error, *parts):
    """A save that fails with `error` after so much."""
    def save(f):
        for part in parts:
            f.write(part)
        raise error
    return save


def uploads(bucket):
    return list(bucket.multipart_uploads.all())


# ---- writing

@pytest.mark.parametrize("parts", [(), (b"new",), (b"a" * PART, b"b" * PART, b"c")], ids=["0", "1", "many"])
def test_a_write_replaces_or_changes_nothing(folder, bucket, wire, parts):
    file = folder / "x.bin"
    put(file, b"old")
    sentence = refused(files.write, file, bad(OSError(28, "No space left on device"), *parts))
    assert sentence.startswith(f"could not write {file} (No space left on device); what was there before is")
    for error in KeyError("a mistake"), KeyboardInterrupt(), common.BadInput("not finite"):
        with pytest.raises(type(error)):
            files.write(file, bad(error, *parts))
    assert files.read(file) == b"old" and files.names(folder) == ["x.bin"] and uploads(bucket) == []
    wire.sent = bytearray()
    put(file, *parts)
    sent, wire.sent = bytes(wire.sent), None
    assert files.read(file) == b"".join(parts) and files.names(folder) == ["x.bin"] and uploads(bucket) == []
    if not isinstance(file, Path):                      # to wait for "100 Continue" would be without end
        assert sent.count(b"PUT /") == max(1, len(parts)) and b"100-continue" not in sent


def test_torch_writes_and_reads_and_its_error_is_the_stores(bucket, wire):
    file, state = files.place(bucket.at + "/x.pth"), dict(a=torch.arange(PART // 2), b=torch.ones(3))
    ckpt.save(file, state)
    assert run.differing(ckpt.load(file), state) == []
    with files.fetch(file) as here:
        assert here.suffix == ".pth" and here.is_file()
    assert not here.parent.exists()
    nowhere = files.place("s3://there-is-no-such-bucket/x.pth")
    says = [f"could not write {nowhere} (The specified bucket does not exist"]
    refused(ckpt.save, nowhere, state, says=says)


def test_a_server_that_goes_during_a_write_loses_nothing(bucket, wire):
    file = files.place(bucket.at + "/x.bin")
    put(file, b"old")
    def save(f):
        f.write(b"a" * PART)                            # the first part is there
        wire.cut()
        f.write(b"b" * PART)
    began = time.monotonic()
    with pytest.raises(common.BadInput, match=rf"could not write {file} \(.*127.0.0.1:{wire.port}") as error:
        files.write(file, save)
    assert time.monotonic() - began < 20
    refused(files.read, file, says=[f"could not read {file} ("])
    wire.mend()
    del error
    gc.collect()                                        # what is left of that upload, now that it could go on
    assert files.read(file) == b"old" and files.names(file.parent) == ["x.bin"]
    put(file, b"a" * PART, b"new")
    assert file.stat().st_size == PART + 3


def test_a_hiccup_is_bridged(bucket, wire):
    file = files.place(bucket.at + "/x.bin")
    put(file, b"old")
    for act, *args in (put, file, b"a" * PART, b"b"), (files.names, file.parent), (files.read, file):
        wire.cut()
        wire.drops = 1
        wire.mend()
        act(*args)
        assert wire.drops == 0
    wire.limit = PART
    with files.fetch(file) as here:                     # breaks within the second of two ranges
        assert here.read_bytes() == b"a" * PART + b"b" and wire.limit is None


# ---- listing

def test_listings_have_every_page_and_folder_and_forget_nothing_that_others_do(folder, bucket):
    assert files.names(folder) == [] and not files.exists(folder / "x000")
    names = [f"x{i:03d}" for i in range(250)]           # three pages of this server
    for name in names if isinstance(folder, Path) else ():
        put(folder / name, b"1")
    if not isinstance(folder, Path):
        folder.fs.pipe({f"{folder.path}/{name}": b"1" for name in names})
    files.make(folder / "sub")
    put(folder / "sub" / "y", b"2")
    assert files.names(folder) == ["sub", *names] and files.names(folder / "x001") == []
    if not isinstance(folder, Path):                    # another program changes what has just been listed
        bucket.put_object(Key="some/run/z", Body=b"3")
        bucket.Object("some/run/x001").delete()
        assert files.names(folder) == ["sub", names[0], *names[2:], "z"]
        assert files.exists(folder / "z") and not files.exists(folder / "x001")


def test_what_is_removed_is_gone_and_nothing_else(folder):
    for name in "a[1]*", "a1", "sub/b", "sub/c/d", "subs":
        files.make((folder / name).parent)
        put(folder / name, b"1")
    files.remove(folder / "a[1]*")
    files.remove(folder / "sub")
    files.remove(folder / "nothing")
    assert files.names(folder) == ["a1", "subs"] and files.read(folder / "sub" / "b") is None
    refused(ckpt.load, folder / "gone.pth", says=[folder / "gone.pth", "does not exist"])


# ---- one sentence each

def test_wrong_credentials_and_buckets_are_one_sentence_without_secrets(bucket, wire, monkeypatch):
    there, file = files.place(bucket.at + "/run"), files.place(bucket.at + "/run/x")
    put(file, b"old")
    acts = [(files.names, there), (files.read, file), (files.exists, file), (files.remove, file),
            (files.write, file, lambda f: f.write(b"new"))]
    acts += [(files.write, file, lambda f: f.write(b"n" * 2 * PART)), (ckpt.load, file)]
    try:
        wire.check(True)
        sentences = [refused(*act, says=[act[1], "check the credentials"]) for act in acts]
    finally:
        wire.check(False)
    assert "The AWS Access Key Id you provided does not exist in our records" in sentences[0]
    for key in "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY":
        monkeypatch.delenv(key)
    s3fs.S3FileSystem.clear_instance_cache()
    elsewhere = files.place(bucket.at + "/run/x")
    sentences += [refused(act[0], elsewhere, *act[2:], says=["Unable to locate credentials"]) for act in acts]
    monkeypatch.undo()
    s3fs.S3FileSystem.clear_instance_cache()
    missing = files.place("s3://there-is-no-such-bucket/run")
    sentences += [refused(act[0], missing, *act[2:], says=[missing, "The specified bucket does not exist"])
                  for act in (acts[0], *acts[4:])]
    assert not any(s3.ENV[k] in s for s in sentences for k in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    assert files.read(file) == b"old" and uploads(bucket) == []


def test_a_url_that_cannot_be_used_is_one_sentence(monkeypatch):
    refused(files.place, "s4://b/x", says=["s4://b/x cannot be used (", "a URL such as s3://"])
    assert "hunter2" not in refused(files.place, "sftp://me:hunter2@host/x", says=["with a password"])
    monkeypatch.setitem(sys.modules, "upath", None)
    refused(files.place, "s3://b/x", says=["cannot be used (", "pip install universal_pathlib s3fs"])
    assert files.place("~/x") == Path.home() / "x" and isinstance(files.place("a/b:c"), Path)


# ---- a run

def test_a_run_in_a_store_is_the_run_on_a_disk(bucket, monkeypatch, capsys):
    method, kept = load("sft"), []
    for root in os.environ["FEWSTEP_OUTPUT_ROOT"], bucket.at + "/out":
        monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", root)
        cfg = config(method, max_iter=6, save_every=2, keep_last=2, val_every=3, sample_every=3)
        run.run(method, cfg | dict(stop_at=3))
        for name in ("0000099.png", ".writable") if "://" in root else ():      # what an attempt may leave
            put(files.place(root) / "fewstep/tests/sft/samples" / name, b"")
        kept.append(run.run(method, cfg))
        sample.main([str(kept[-1].folder), "--seeds", "0-3"])
    disk, store = (k.folder for k in kept)
    assert str(store) == bucket.at + "/out/fewstep/tests/sft"
    run.assert_alike(*(k.lines for k in kept))
    assert run.differing(run.saved(disk, 6), run.saved(store, 6)) == []
    for sub in "checkpoints", "samples":
        assert files.names(disk / sub) == [n for n in files.names(store / sub) if n != ".writable"]
    assert {n for n in files.names(disk) if n[0] != "."} == {*files.names(store)}
    assert capsys.readouterr().out.count("4 samples of ema") == 2
    secret = s3.ENV["AWS_SECRET_ACCESS_KEY"].encode()
    assert not any(secret in o.get()["Body"].read() for o in bucket.objects.all())
    assert uploads(bucket) == []


def test_lines_of_a_store_that_was_gone_are_there_later(bucket, wire):
    said, folder = [], files.place(bucket.at + "/run")
    put(folder / "metrics.jsonl", b'{"it": 1}\n')
    record = logs.Recorder(folder, None, 0, None, lambda text, level: said.append(text))
    wire.cut()
    record(2, dict(loss=1.0))
    wire.mend()
    assert len(said) == 1 and said[0].startswith("WARNING: could not write")
    record(3, {"val/x": 2.0})
    assert [e["it"] for e in run.lines(folder)] == [1, 2, 3]
    assert record.has(3, "val/") and not record.has(2, "val/")
