"""FSDP2 on CPUs: sharded runs compute what one process computes; what they save continues on any ranks."""
import importlib
import itertools
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ckpt
import files
import run
import sample
import train
import trainer
from nets import toy
from tools import export
from run import differing, refused
from test_preempt import until

PROBE = Path(__file__).with_name("probe.py")
FSDP = dict(parallel="fsdp")
# what differs from shards over all ranks
MODES = dict(sharded={}, accum3=dict(accum=3), keep=dict(reshard=False), recompute=dict(recompute=True),
             all=dict(accum=3, offload=True, recompute=True), bare=dict(bare=True), hsdp=dict(shard_size=2))

def setup(which, **changes):
    """(method, config) of a method, or of the probe, on the toy net with a teacher: 20 iterations."""
    if which == "self_forcing":
        return run.setup(which, **dict(batch_size=12, max_iter=20, warmup=3) | changes)
    method = train.load_method(PROBE if which == "probe" else trainer.ROOT / "methods" / f"{which}.py")
    cfg = train.resolve(method, [])[0] | run.TINY | run.EXTRA.get(which, {}) | dict(
        batch_size=12, max_iter=20, warmup=3) | changes
    return method, cfg | dict(teacher=changes.get("teacher") or run.teacher("toy:tiny"))

def train_all(todo):
    """Of every (method, changes) the lines of its metrics."""
    return [run.run(*setup(which, **changes)).lines for which, changes in todo]

def named(which, mode, world=2):
    return which, FSDP | dict(name=f"{which}_{mode}_{world}") | MODES[mode]

def apart(ours, others, keys):
    """Largest relative difference of these values, per line."""
    assert len(ours) == len(others) and all(set(a) == set(b) for a, b in zip(ours, others))
    return [max(abs(a[k] - b[k]) / abs(a[k]) for k in a if k.startswith(keys)) for a, b in zip(ours, others)]

@pytest.mark.parametrize("world, cases", [
    (2, [("sft", "sharded"), ("dmd2", "accum3"), *(("probe", m) for m in "sharded keep all bare".split())]),
    (4, [("dmd2", "hsdp")]),
    pytest.param(4, [*itertools.product(("sft", "dmd2", "probe"), MODES)], marks=pytest.mark.slow)],
    ids=["2", "4", "all"])
def test_w_ranks_of_a_micro_steps_equal_one_rank_of_w_a(world, cases):
    """Losses to 1e-5 over 20 iterations, gradient norms to 1e-6 at the first and 1e-4 at the last."""
    run.teacher("toy:tiny")
    todo = [named(which, mode, world) for which, mode in cases]
    alone = {}
    for (which, changes), lines in zip(todo, run.ranks(world, train_all, todo, timeout_s=900)[0]):
        slices = world * changes.get("accum", 1)
        if (which, slices) not in alone:
            alone[which, slices] = train_all([(which, dict(accum=slices, name=f"{which}_one_{slices}"))])[0]
        loss = apart(alone[which, slices], lines, ("loss", "dm", "dsm", "gan", "fit"))
        norm = apart(alone[which, slices], lines, "norm")
        assert max(loss) < 1e-5 and norm[0] < 1e-6 and norm[19] < 1e-4

def times_seen(which, changes):
    """Lines of a run, and every time that the student's embedding sees."""
    seen, wave = [], toy.Toy.wave
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy.Toy, "wave", lambda self, t: (seen.append(t.detach().clone()), wave(self, t))[1])
        lines = train_all([(which, changes)])[0]
    return lines, {t.dtype for t in seen}, sorted({v for t in seen for v in t.flatten().tolist()})

@pytest.mark.parametrize("which", ["sft", pytest.param("probe", marks=pytest.mark.slow)])
def test_bf16_gathers_and_computes_in_bf16_and_leaves_t_exact(which):
    run.teacher("toy:tiny")
    changes = dict(name="bf16", amp="bf16")
    one, dtypes, times = times_seen(which, dict(changes, accum=2))
    changes |= FSDP | dict(name="bf16_sharded")
    (ours, d0, t0), (_, d1, t1) = run.ranks(2, times_seen, which, changes)
    exact, keys = train_all([(which, dict(accum=2, name="exact"))])[0], ("loss", "dm", "dsm", "fit")
    assert dtypes == d0 == d1 == {torch.float64} and times == sorted({*t0, *t1}) and len(times) > 40
    assert max(apart(one, ours, keys)) < 2e-2 and max(apart(exact, ours, keys)) > 1e-4

# ---- resume
def stored(folder, it, ema=""):
    """Whole tensors of a checkpoint by name, or of one average; read by one process."""
    state = ckpt.load_checkpoint(ckpt.path(folder / "checkpoints", it))
    if ema:
        return dict(state["emas"][ema])
    kinds = [state["nets"], state["emas"], state["optims"]]
    return {f"{n}.{k}": v for kind in kinds for n, each in kind.items() for k, v in each.items()}

def test_a_sharded_run_continues_on_any_ranks_as_replicas_and_back(outputs):
    """Bit for bit a straight one on its own ranks, on others to rounding errors: losses, weights, moments,
    averages, and pictures of the first of them. All cut a batch into four."""
    run.teacher("toy:tiny")
    straight = dict(FSDP, ema=("ema:0.9", "ema_power:power=0.1"), val_every=5, sample_every=5, save_every=10,
                    accum=2, name="straight")
    replicas, every = dict(parallel="ddp"), ("loss", "fit", "dsm", "norm", "val")
    ways = dict(half=(2, {}), back=(2, {}), replicas=(2, replicas), four=(4, dict(accum=1)),
                hsdp=(4, dict(accum=1, shard_size=2)), one=(1, replicas | dict(accum=4)),
                alone=(1, dict(accum=4)))
    first = [("probe", straight | changes) for changes in (
        {}, dict(name="half", stop_at=10), replicas | dict(name="back", stop_at=10))]
    lines, *_ = run.ranks(2, train_all, first, timeout_s=900)[0]
    for name in [*ways][2:]:
        shutil.copytree(outputs / "half", outputs / name)
    after, whole = {}, stored(outputs / "straight", 20)
    for world in 1, 2, 4:
        names = [n for n, (w, _) in ways.items() if w == world]
        todo = [("probe", straight | dict(name=n) | ways[n][1]) for n in names]
        after |= zip(names, run.ranks(world, train_all, todo, timeout_s=900)[0])
    run.assert_alike(lines, after["half"])
    assert differing(stored(outputs / "half", 20), whole) == []
    a, b = (ckpt.load_checkpoint(ckpt.path(outputs / n / "checkpoints", 20)) for n in ("straight", "half"))
    assert a["counts"] == b["counts"]
    for name in ways:
        assert max(apart(lines, after[name], every)) < 1e-4, name
        torch.testing.assert_close(stored(outputs / name, 20), whole, rtol=1e-4, atol=1e-4)     # lr: 1e-3
        for it in range(0, 21, 5):
            a, b = (np.asarray(Image.open(outputs / n / f"samples/{it:07d}.png"), int)
                    for n in ("straight", name))
            assert a.shape == b.shape and abs(a - b).max() <= 1

# ---- damage
@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Folder of checkpoints 2, 4, 6 of a run on two ranks."""
    root = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEWSTEP_OUTPUT_ROOT", str(root))
        run.teacher("toy:tiny")
        run.ranks(2, train_all, [("dmd2", dict(FSDP, name="dmd2", max_iter=6, save_every=2))])
    return root / "fewstep/tests/dmd2/checkpoints"

def cut(file):
    file.write_bytes(file.read_bytes()[:-100])

def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

OLD, STUDENT = (f"000000{it}.student_model/rank_00001.pth" for it in (4, 6))
DAMAGE = [                              # what is done to which file, what is said, which one is found
    (cut, STUDENT, "rank_00001.pth cannot be read", 4), (flip, "0000006.pth", "0000006.pth", 4),
    (flip, "0000006.fake_optim/rank_00000.pth", "is damaged", 4),
    (Path.unlink, STUDENT, "rank_00001.pth does not exist", 4), (Path.unlink, "0000006.pth", "", 4),
    (lambda file: shutil.copy(file.parent / "0000004.pth", file), "0000006.pth", "renamed", 4),
    (lambda file: shutil.copy(file.parents[1] / OLD, file), STUDENT, "of the same save as 0000006.pth", 4),
    (Path.mkdir, "0000008.pth", "0000008.pth", 6),
    *((Path.touch, name, "", 6) for name in ("10000000.pth", "latest.pth", "0000009.pth.tmp", "000007.pth"))]

@pytest.mark.parametrize("harm, file, says, found", DAMAGE)
def test_the_newest_whole_checkpoint_is_found_and_a_bad_one_named(harm, file, says, found, sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "checkpoints")
    harm(tmp_path / "checkpoints" / file)
    said = []
    it, state = ckpt.newest(tmp_path / "checkpoints", said.append)
    assert it == found and len(said) == bool(says) and all(says in s for s in said), said
    assert differing(stored(sharded.parent, found), stored(tmp_path, found)) == []

def test_what_cannot_be_read_now_is_not_taken_for_damaged(sharded, monkeypatch):
    def broken(file):
        raise OSError(5, "Input/output error", str(file))
    monkeypatch.setattr(ckpt.zipfile, "ZipFile", broken)
    assert "could not read" in refused(ckpt.newest, sharded, pytest.fail)

def test_nothing_starts_silently_from_0(sharded, outputs, capsys):
    shutil.copytree(sharded.parent, outputs / "dmd2")
    for n in (2, 4, 6):
        flip(outputs / f"dmd2/checkpoints/{n:07d}.student_model/rank_00000.pth")
    method, cfg = setup("dmd2", name="dmd2", max_iter=2)
    refused(run.run, method, cfg | dict(resume="force"), says=["no checkpoint in"])
    assert capsys.readouterr().out.count("WARNING") == 3
    for n in (2, 4, 6):
        (outputs / f"dmd2/checkpoints/{n:07d}.pth").unlink()
    run.run(method, cfg)
    assert "0000006.* is of a save that did not finish; it is not used" in capsys.readouterr().out

# ---- kills
def killed(todo, draw, folder, saves):
    """Starts a run on two ranks and kills both, not quite together: at some moment of the start, or soon
    after a save, which may be late on a busy machine."""
    folder.mkdir()
    before, longest = ckpt.scan(saves), 3.5
    processes = run.start(2, folder, train_all, todo)
    if draw.random() < 0.5:
        longest = 0.5
        until(lambda: ckpt.scan(saves) != before)
    time.sleep(draw.uniform(0, longest))
    assert os.listdir(folder) in ([], ["store0"])       # no rank has an answer, so none had an error
    for process in draw.sample(processes, 2):
        process.kill()
        time.sleep(draw.choice((0, 0.001, 0.05)))
    for process in processes:
        process.join()

@pytest.fixture
def root(request, outputs, monkeypatch):
    """Where the runs lie: on the disk, or in a bucket of a real S3 server."""
    run.teacher("toy:tiny")
    if request.param == "disk":
        yield outputs
    else:
        s3 = importlib.import_module("s3")              # skips where its packages lack
        with s3.server():
            monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", at := s3.bucket(request).at + "/all")
            yield files.place(at + "/fewstep/tests")

@pytest.mark.parametrize("root, in_background, kills", [("disk", False, 4), *(
    pytest.param(*case, 30, marks=pytest.mark.slow)
    for case in (("disk", False), ("disk", True), ("store", False), ("store", True)))], indirect=["root"])
def test_sigkill_loses_no_checkpoint_but_the_one_being_written(root, in_background, kills, tmp_path):
    """A sharded run that saves every iteration. In the end it is bit for bit what a run without kills is."""
    changes = dict(FSDP, name="killed", teacher=f"{tmp_path}/outputs/teachers/toy:tiny.pth", max_iter=100000,
                   save_every=1, keep_last=4, async_save=in_background)
    draw, at, moved = random.Random(0), 0, 0
    for n in range(kills):
        killed([("dmd2", changes)], draw, tmp_path / f"{n}", root / "killed/checkpoints")
        it = ckpt.newest(root / "killed/checkpoints", lambda text: pytest.fail(text))[0] or 0
        assert it >= at
        at, moved = it, moved + (it > at)
    assert moved
    last = dict(changes, stop_at=at + 3)
    run.ranks(2, train_all, [("dmd2", last), ("dmd2", dict(last, name="plain", save_every=0))])
    ours, plain = (stored(root / n, at + 3) for n in ("killed", "plain"))
    assert differing(ours, plain) == []
    names = files.names(root / "killed/checkpoints")
    assert {int(n[:7]) for n in names} == {at, at + 1, at + 2, at + 3}, names

def test_export_writes_a_checkpoint_and_an_entry_of_it_into_one_file(sharded, tmp_path, outputs):
    (outputs / "dmd2/checkpoints").mkdir(parents=True)
    record, ema = outputs / "dmd2/checkpoints/0000004.pth", stored(sharded.parent, 6, "ema")
    export.main([f"{sharded / record.name}", str(record)])
    assert os.listdir(record.parent) == ["0000004.pth"]
    assert differing(stored(sharded.parent, 4), stored(outputs / "dmd2", 4)) == []
    export.main([f"{sharded.parent}#ema", str(tmp_path / "ema.safetensors")])
    assert differing(dict(ckpt.load(tmp_path / "ema.safetensors")), ema) == []
    net = sample.load_net(sample.load_run(sharded.parent), "ema", torch.device("cpu"))
    assert differing(dict(net.state_dict()), ema) == []
