"""FSDP2 on CPUs: sharded runs compute what one process computes; what they save continues on any ranks."""
import contextlib
import copy
import importlib
import itertools
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ckpt
import common
import files
import fill
import logs
import run
import sample
import shard
import train
import trainer
from nets import toy
from tools import export
from run import differing, refused
from test_preempt import until

PROBE = Path(__file__).with_name("probe.py")
FSDP = dict(parallel="fsdp")
# what differs from two ranks, sharded
MODES = dict(replicas=dict(parallel="ddp"), sharded={}, accum3=dict(accum=3), keep=dict(reshard=False),
             offload=dict(offload=True), recompute=dict(recompute=True),
             all=dict(accum=3, offload=True, recompute=True))

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
    modes = MODES | dict(hsdp=dict(shard_size=2), bare=dict(bare=True))
    return which, FSDP | dict(name=f"{which}_{mode}_{world}") | modes[mode]

def apart(ours, others, keys):
    """Largest relative difference of these values, per line."""
    assert len(ours) == len(others) and all(set(a) == set(b) for a, b in zip(ours, others))
    return [max(abs(a[k] - b[k]) / abs(a[k]) for k in a if k.startswith(keys)) for a, b in zip(ours, others)]

FAST = [("sft", "sharded"), ("dmd2", "accum3"), ("self_forcing", "sharded"),
        *(("probe", mode) for mode in ("sharded", "keep", "all", "bare"))]
ALL = [*itertools.product(("sft", "dmd2", "probe"), MODES)]
HSDP = [("dmd2", "hsdp")], [*itertools.product(("sft", "dmd2", "probe"), ("hsdp", "accum3"))]

@pytest.mark.parametrize("world, cases", [
    (2, FAST), (4, HSDP[0]), pytest.param(2, ALL, marks=pytest.mark.slow),
    pytest.param(4, HSDP[1], marks=pytest.mark.slow)], ids=["2", "4", "all on 2", "all on 4"])
def test_w_ranks_of_a_micro_steps_equal_one_rank_of_w_a(world, cases):
    """Losses to 1e-5 over 20 iterations, gradient norms to 1e-6 at the first and 1e-4 at the last."""
    run.teacher("toy:tiny")
    todo = [named(which, mode, world) for which, mode in cases]
    alone = {}
    for (which, changes), lines in zip(todo, run.ranks(world, train_all, todo)[0]):
        slices = world * changes.get("accum", 1)
        if (which, slices) not in alone:
            alone[which, slices] = train_all([(which, dict(accum=slices, name=f"{which}_one_{slices}"))])[0]
        loss = apart(alone[which, slices], lines, ("loss", "dm", "dsm", "gan", "fit"))
        norm = apart(alone[which, slices], lines, "norm")
        print(f"{changes['name']}: loss {max(loss):.1e}, norm {norm[0]:.1e} .. {norm[19]:.1e}")
        assert max(loss) < 1e-5 and norm[0] < 1e-6 and norm[19] < 1e-4

def times_seen(which, changes):
    """Lines of a run, and every time that the student's embedding sees."""
    seen, wave = [], toy.Toy.wave
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy.Toy, "wave", lambda self, t: (seen.append(t.detach().clone()), wave(self, t))[1])
        lines = train_all([(which, changes)])[0]
    return lines, {t.dtype for t in seen}, sorted({v for t in seen for v in t.flatten().tolist()})

@pytest.mark.parametrize("which", ["sft", *(
    pytest.param(which, marks=pytest.mark.slow) for which in ("dmd2", "probe", "self_forcing"))])
def test_bf16_gathers_and_computes_in_bf16_and_leaves_t_exact(which):
    run.teacher("toy:tiny")
    changes = dict(name="bf16", amp="bf16")
    one, dtypes, times = times_seen(which, dict(changes, accum=2))
    changes |= FSDP | dict(name="bf16_sharded")
    (ours, d0, t0), (_, d1, t1) = run.ranks(2, times_seen, which, changes)
    exact, keys = train_all([(which, dict(accum=2, name="exact"))])[0], ("loss", "dm", "dsm", "fit")
    assert dtypes == d0 == d1 == {torch.float64} and times == sorted({*t0, *t1}) and len(times) > 40
    near, far = max(apart(one, ours, keys)), max(apart(exact, ours, keys))
    print(f"{which} in bf16, sharded against one process: {near:.1e}, against float32: {far:.1e}")
    assert near < 2e-2 and far > 1e-4

def test_units_are_named_or_the_smallest_big_parts_or_none():
    layer = lambda: torch.nn.Sequential(torch.nn.Linear(1000, 1200), torch.nn.Linear(1200, 1000))
    small = torch.nn.Linear(9, 9)
    big = torch.nn.Sequential(small, torch.nn.ModuleList([layer(), layer()]), torch.nn.Linear(9, 9))
    name = {m: n for n, m in big.named_modules()}
    assert [name[m] for m in shard.units(big)] == ["1.0.0", "1.0.1", "1.1.0", "1.1.1"]
    big.blocks = ["1.1", "2"]
    assert [name[m] for m in shard.units(big)] == big.blocks and shard.units(big[0]) == []
    attention = torch.nn.Sequential(torch.nn.MultiheadAttention(1200, 4))       # does not call its children
    assert shard.units(attention) == [attention[0]]

def test_parameters_that_cannot_be_sharded_or_saved_are_refused():
    def built(change, **changes):
        method, cfg = setup("sft", **changes)
        build = method.build
        method.build = lambda cfg: (nets := build(cfg), change(nets["student"]))[0]
        return refused(run.run, method, cfg)
    def tie(net):
        net.layers[1].up.weight = net.layers[0].up.weight
    assert "student.layers.1.up.weight and student.layers.0.up.weight are one parameter" in built(tie)
    def scale(net):
        net.scale = torch.nn.Parameter(torch.ones(()))
    assert "student.scale has no rows to share" in built(scale, **FSDP)

# ---- resume
def begin(which, changes):
    """Whole tensors, by name, that a run holds when its loop begins, and its lines."""
    found, emas = {}, []
    with pytest.MonkeyPatch.context() as patch:
        averaged, describe = trainer.averaged, logs.describe
        def hold(cfg, nets, trainable, opts, names, *rest):
            named = [*nets.items(), *((f"ema{i}", ema) for i, ema in enumerate(emas))]
            found.update({f"{n}.{k}": v for n, net in named for k, v in net.state_dict().items()})
            for opt in opts.values():
                found.update(fill.saved_moments(opt, names))
            found.update({k: shard.whole(v, "cpu").clone() for k, v in found.items()})
            return describe(cfg, nets, trainable, opts, names, *rest)
        patch.setattr(trainer, "averaged", lambda ema, *rest: (emas.append(ema), averaged(ema, *rest))[1])
        patch.setattr(logs, "describe", hold)
        return found, run.run(*setup(which, **changes)).lines

def begin_all(todo):
    return [begin(*each) for each in todo]

EMAS = dict(ema=("ema:0.9", "ema_power:power=0.1"), val_every=5, sample_every=5, save_every=10)

def stored(folder, it, ema=""):
    """Whole tensors of a checkpoint, named as `begin` names them, or of one average; read by one process."""
    state = ckpt.load_checkpoint(ckpt.path(folder / "checkpoints", it))
    if ema:
        return dict(state["emas"][ema])
    kinds = [state["nets"], dict(zip(("ema0", "ema1"), state["emas"].values()))]
    tensors = {f"{n}.{k}": v for kind in kinds for n, each in kind.items() for k, v in each.items()}
    return tensors | {k: v for each in state["optims"].values() for k, v in each.items()}

def student_of(begun):
    """Without what no checkpoint keeps."""
    return {k: v for k, v in begun.items() if not k.startswith("teacher.")}

def test_a_sharded_run_continues_on_any_ranks_and_as_replicas(outputs):
    """Bit for bit a straight one on its own ranks; what others begin with is what was saved."""
    run.teacher("toy:tiny")
    straight, replicas = dict(FSDP, **EMAS, name="straight"), dict(parallel="ddp")
    (_, lines), _ = run.ranks(2, begin_all, [("probe", straight),
                                             ("probe", straight | dict(name="half", stop_at=10))])[0]
    saved, after = stored(outputs / "half", 10), {}
    ways = dict(half=(2, {}), replicas=(2, replicas), four=(4, {}), hsdp=(4, dict(shard_size=2)),
                one=(1, replicas | dict(accum=2)), alone=(1, dict(accum=2)))
    for name in [*ways][1:]:
        shutil.copytree(outputs / "half", outputs / name)
    for world in 1, 2, 4:
        names = [n for n, (w, _) in ways.items() if w == world]
        todo = [("probe", straight | dict(name=n) | ways[n][1]) for n in names]
        for results in run.ranks(world, begin_all, todo) if world > 1 else [begin_all(todo)]:
            for name, (begun, after[name]) in zip(names, results):
                assert differing(student_of(begun), saved) == []
    for name, (world, _) in ways.items():
        if world < 4:                                   # two slices: the same draws as the straight run's
            assert max(apart(lines, after[name], ("loss", "fit", "dsm", "norm", "val"))) < 1e-4
    run.assert_alike(lines, after["half"])
    a, b = (ckpt.load_checkpoint(ckpt.path(outputs / n / "checkpoints", 20)) for n in ("straight", "half"))
    assert a["counts"] == b["counts"]
    assert differing(stored(outputs / "straight", 20), stored(outputs / "half", 20)) == []
    # the averages, and the pictures of the first of them, are those of one process
    train_all([("probe", EMAS | dict(name="plain", accum=2))])
    ours, plain = stored(outputs / "half", 20), stored(outputs / "plain", 20)
    for key in (k for k in plain if k.startswith("ema")):
        torch.testing.assert_close(ours[key], plain[key], rtol=1e-6, atol=1e-6)
    for it in range(0, 21, 5):
        a, b = (np.asarray(Image.open(outputs / n / f"samples/{it:07d}.png"), int) for n in ("half", "plain"))
        assert a.shape == b.shape and abs(a - b).max() <= 1
    # back from replicas to shards
    begun = run.ranks(2, begin_all, [("probe", straight | dict(name="plain", max_iter=22))])[0][0][0]
    assert differing(student_of(begun), plain) == []

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
    (cut, STUDENT, "rank_00001.pth cannot be read", 4),
    (cut, "0000006.pth", "0000006.pth cannot be read", 4),
    (flip, "0000006.fake_optim/rank_00000.pth", "is damaged", 4),
    (flip, "0000006.pth", "0000006.pth", 4),
    (Path.unlink, STUDENT, "rank_00001.pth does not exist", 4),
    (Path.unlink, "0000006.pth", "", 4),
    (lambda file: shutil.rmtree(file.parent), "0000006.ema_model/rank_00000.pth", "does not exist", 4),
    (lambda file: file.write_bytes(b""), "0000006.pth", "0000006.pth cannot be read", 4),
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

def test_nothing_starts_silently_from_0(sharded, tmp_path, outputs, capsys):
    shutil.copytree(sharded.parent, outputs / "dmd2")
    at = outputs / "dmd2" / "checkpoints"
    for n in (2, 4, 6):
        flip(at / f"{n:07d}.student_model/rank_00000.pth")
    changes = dict(name="dmd2", max_iter=8, teacher=setup("dmd2")[1]["teacher"])
    assert "no checkpoint in" in refused(run.run, *setup("dmd2", **changes, resume="force"))
    assert capsys.readouterr().out.count("WARNING") == 3
    for n in (2, 4, 6):
        (at / f"{n:07d}.pth").unlink()
    run.run(*setup("dmd2", **changes | dict(max_iter=2)))
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
        with contextlib.suppress(ProcessLookupError):   # one that has lost the other may be gone
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(draw.choice((0, 0.001, 0.05)))
    for process in processes:
        process.join()

@pytest.fixture
def root(request, outputs, monkeypatch):
    """Where the runs lie: on the disk, or in a bucket of a real S3 server."""
    if request.param == "disk":
        yield outputs
        return
    s3 = importlib.import_module("s3")                  # skips where its packages lack
    with s3.server():
        run.teacher("toy:tiny")
        monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", at := s3.bucket(request).at + "/all")
        yield files.place(at + "/fewstep/tests")

@pytest.mark.parametrize("root, in_background, kills", [("disk", False, 4), *(
    pytest.param(*case, 30, marks=pytest.mark.slow)
    for case in (("disk", False), ("disk", True), ("store", False), ("store", True)))], indirect=["root"])
def test_sigkill_loses_no_checkpoint_but_the_one_being_written(root, in_background, kills, tmp_path):
    """A sharded run that saves every iteration. In the end it is bit for bit what a run without kills is."""
    disk = isinstance(root, Path)
    teacher = run.teacher("toy:tiny") if disk else f"{tmp_path}/outputs/teachers/toy:tiny.pth"
    changes = dict(FSDP, name="killed", teacher=teacher, max_iter=100000, save_every=1, keep_last=4,
                   async_save=in_background)
    draw, at, moved = random.Random(0), 0, 0
    for n in range(kills):
        killed([("dmd2", changes)], draw, tmp_path / f"{n}", root / "killed/checkpoints")
        it = ckpt.newest(root / "killed/checkpoints", lambda text: pytest.fail(text))[0] or 0
        assert it >= at
        at, moved = it, moved + (it > at)
    print(f"{kills} kills, {moved} of them after a save; at iteration {at}")
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
    for file in tmp_path / "ema.safetensors", tmp_path / "ema.pth":
        export.main([f"{sharded.parent}#ema", str(file)])
        assert differing(dict(ckpt.load(file)), ema) == []
    for entry, out, words in (("#ema", str(file), "exists"), ("", "x.pth", "0000006.pth"),
                              ("#no", "x.pth", "no entry no"), ("", "x.txt", ".pth")):
        assert words in refused(export.main, [f"{sharded.parent}{entry}", out])
    shutil.copy(sharded.parent / "method.py", outputs / "dmd2")         # replicas on one rank go on from it
    changes = dict(name="dmd2", max_iter=6, save_every=2, accum=2, teacher=setup("dmd2")[1]["teacher"])
    run.run(*setup("dmd2", **changes, resume="force"))
    for key, value in stored(outputs / "dmd2", 6, "ema").items():
        torch.testing.assert_close(value, ema[key], rtol=1e-4, atol=1e-6)

def test_an_average_in_shards_is_a_source_and_samples(sharded):
    ema = stored(sharded.parent, 6, "ema")
    net = sample.load_net(sample.load_run(sharded.parent), "ema", torch.device("cpu"))
    pupil = FSDP | dict(name="pupil", teacher=f"{sharded.parent}#ema", max_iter=1)
    begun = run.ranks(2, begin_all, [("dmd2", pupil)])[1][0][0]
    assert differing(dict(net.state_dict()), ema) == []
    assert differing({k[8:]: v for k, v in begun.items() if k.startswith("teacher.")}, ema) == []

# ---- memory
BIG = "toy:tiny,dim=1536,depth=10,heads=8"              # 206 M parameters

def write_big(file):
    with torch.device("meta"):
        net = common.make_net(BIG, label_dim=10)
    whole = copy.deepcopy(net).to_empty(device="cpu")
    fill.draw(whole, net, "teacher", 1)
    ckpt.save(file, whole.state_dict())

def peaks(changes):
    """Peak host memory of this process in GB: when the nets are filled, after a student update."""
    found, describe = [], logs.describe
    peak = lambda: found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "describe", lambda *args: (peak(), describe(*args))[1])
        patch.setattr(ckpt.Saver, "save", lambda *args: peak())
        method, cfg = setup("dmd2", net=BIG, gan_weight=0.0, max_iter=1, batch_size=2, ema=(), **changes)
        method.phase = lambda it, cfg: "student"
        trainer.train(method, cfg)
    return found

@pytest.mark.slow
def test_no_rank_holds_the_nets_whole(tmp_path):
    """Student, teacher and fake score from one file, then an update: 0.7 of what one process needs."""
    run.ranks(1, write_big, tmp_path / "big.pth")
    teacher = dict(teacher=str(tmp_path / "big.pth"))
    one, = run.ranks(1, peaks, dict(teacher, name="one"))
    two = run.ranks(2, peaks, dict(FSDP, **teacher, name="two"))
    print("GB, filled and after an update: one process", one, "two ranks", two)
    assert all(a < 0.7 * b for each in two for a, b in zip(each, one, strict=True))
