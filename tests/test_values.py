"""Values that cannot work, wherever they stand: in strings, tuples, nets, data, environment, options."""
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import ckpt
import common
import data
import evaluate
import resume
import sample
import train
import trainer
from run import DMD2, SFT, load, refused

ROOT = trainer.ROOT

def start(*command, env={}, **kw):
    env = os.environ | dict(OMP_NUM_THREADS="1") | env
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, **kw)

# ---- numbers
@pytest.mark.parametrize("call", [
    *(lambda s=s: common.lr_factor(s, 0, 0, 10) for s in (
        "cosine:nan", "cosine:inf", "cosine:-5", "cosine:2", "inv_sqrt:nan", "inv_sqrt:inf", "inv_sqrt:0")),
    *(lambda ts=ts: common.t_list("edm", len(ts), ts) for ts in (
        (float("nan"),), (float("inf"),), (1e5,), (80.0, float("nan")), ("nan",), (None,))),
    *(lambda n=n: common.t_list("rf", n) for n in (10 ** 20, 5000, 0)),
    *(lambda w=w: common.loss_weight(w, "edm", torch.ones(1), "x0") for w in (
        "min_snr:nan", "min_snr:-5", "min_snr:0", "min_snr:inf")),
    *(lambda how=how: common.optimizer([torch.nn.Parameter(torch.ones(1))], **how) for how in (
        dict(lr=-1.0), dict(lr=1e300), dict(weight_decay=-1.0), dict(eps=-1.0), dict(lr=float("nan")),
        dict(betas=(0.9, float("nan"))))),
    lambda: common.optimizer([dict(params=[torch.nn.Parameter(torch.ones(1))], lr=-1.0)]),
    lambda: common.parse_ema("ema:half_kimg=inf"),
    lambda: common.sample_t(4, "polynomial", "edm", "cpu", t_min=79.8, t_max=80.0),
    lambda: common.sample_t(4, "uniform", "edm", "cpu", t_max=1e5),
    lambda: data.load(dict(data="digits", classes=-5)),
])
def test_a_number_out_of_range_is_refused(call):
    refused(call)

# ---- nets
@pytest.mark.parametrize("option", [
    "heads=0", "dim=-24", "label_dim=-3", "label_dim=foo", "dropout=foo", "dropout=5", "dropout=nan",
    "depth=0", "channels=-1", "size=7", "size=None", "label_dim=[1]"])
@pytest.mark.parametrize("net", ["toy:tiny", "edm:digits"])
def test_an_option_no_net_can_be_built_with_is_one_sentence(net, option):
    refused(common.make_net, f"{net},{option}", says=[net[:3]])

def test_the_size_of_a_toy_is_an_option_and_its_taps_are_checked():
    net = common.make_net("toy:tiny,size=16")
    assert net.x_shape == (1, 16, 16) and net.tap_shapes((0, 1)) == [(24, 8, 8)] * 2
    refused(net.tap_shapes, (9,), says=["0 to 1"])

# ---- data
def png():
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(file, "png")
    return file.getvalue()

def zipped(text="null"):
    def make(path):
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("a.png", png())
            z.writestr("dataset.json", '{"labels": %s}' % text)
    return make

def flipped(*places):
    def make(path):
        zipped()(path)
        content = bytearray(path.read_bytes())
        for text, offset in places:
            content[content.find(text) + offset] ^= 1
        path.write_bytes(content)
    return make

def npz(**arrays):
    return lambda path: np.savez(path, **dict(x=np.zeros((2, 8, 8), np.uint8)) | arrays)

@pytest.mark.parametrize("name, make", [
    ("checksum.zip", flipped((b"IDAT", 6))), ("encrypted.zip", flipped((b"PK\3\4", 6), (b"PK\1\2", 8))),
    ("huge.zip", zipped(f'[["a.png", {2 ** 70}]]')), ("many.zip", zipped(f'[["a.png", {2 ** 40}]]')),
    ("deep.zip", zipped("[" * 100_000)), ("x" * 300, lambda path: None),
    ("empty.npz", lambda path: path.touch()), ("lone.npz", lambda path: np.save(path.open("wb"), np.ones(3))),
    ("scalar.npz", npz(y=np.array(3))), ("column.npz", npz(y=np.zeros((2, 1), int))),
    ("wide.npz", npz(y=np.array([0, 2 ** 63], np.uint64)))])
def test_data_that_cannot_be_read_is_one_sentence(tmp_path, name, make):
    make(tmp_path / name)
    refused(data.load, dict(data=str(tmp_path / name)), says=[name])

def test_a_dangling_link_among_images_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").symlink_to("nowhere.png")
    refused(data.load, dict(data=str(tmp_path)), says=["b.png", "FileNotFoundError"])

@pytest.mark.parametrize("given, group", [
    ("set.v1", "set.v1"), ("set.v1.zip", "set.v1"), ("x.npz", "x"), (".", "in"), ("..", "up"), ("/", "root")])
def test_a_data_set_names_its_group(tmp_path, monkeypatch, given, group):
    (tmp_path / "up" / "in").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "up" / "in")
    assert train.resolve(load("sft"), [f"--data={given}"])[0]["group"] == group

# ---- the method file and the options
def method(tmp_path, text):
    (tmp_path / "mine.py").write_text(SFT.read_text() + "\n" + text)
    return train.load_method(tmp_path / "mine.py")

def test_the_bytes_that_ran_are_kept_whatever_the_file_is_later(tmp_path):
    mine = method(tmp_path, "answer = 42")
    before = (tmp_path / "mine.py").read_bytes()
    (tmp_path / "mine.py").write_text("raise SystemExit")
    assert mine.source == before and mine.answer == 42 and train.comments(mine.source, "config")["lr"]

@pytest.mark.parametrize("text, says", [
    ("import sys; sys.exit(3)", "sys.exit"), ("x = '\0'", "mine.py"), ("x = (", "mine.py line"),
    ("config['lr'] = 'fast'", "'fast'"), ("config['max_iter'] = '12'", "'12'"),
    ("config['preset'] = ''", "--preset"), ("config['batch_size'] = 8.5", "8.5"),
    ("config['steps'] = True", "True"), ("config['ema'] = 'ema:0.9'", "ema:0.9"), ("config = []", "dict")])
def test_a_method_file_that_cannot_work_is_one_sentence(tmp_path, text, says):
    refused(lambda: train.resolve(method(tmp_path, text), []), says=[says])

@pytest.mark.parametrize("args, says", [
    ([ROOT / "README.md"], "README.md line"), (["m" * 300 + ".py"], "cannot be read"),
    (["--max_iter", "5", SFT], "methods/NAME.py --max_iter"), ([SFT, "--dry_run=true"], "takes no value"),
    (["nosuch.py"], "there are " + os.path.relpath(DMD2, "/"))])
def test_a_command_that_cannot_work_is_one_sentence(capsys, monkeypatch, args, says):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.chdir("/")
    with pytest.raises(SystemExit) as left:
        train.main([str(a) for a in args])
    assert left.value.code == 2 and says in capsys.readouterr().err

def test_dry_run_shows_what_a_preset_sets_also_without_its_data():
    done = start(ROOT / "train.py", DMD2, "--preset", "cifar10", "--dry_run")
    assert done.returncode == 2 and "* gan_features = 'teacher'" in done.stdout
    assert done.stderr.count("\n") == 1 and "cifar10-32x32.zip does not exist" in done.stderr

@pytest.mark.parametrize("args", [["-h"], ["--dry_run"]])
def test_a_reader_that_leaves_is_no_error(args):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, ROOT / "train.py", SFT, "--net=toy:tiny", *args]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == -signal.SIGPIPE and done.stderr == b""

@pytest.mark.parametrize("args", [["make_digits.py"], ["bench.py", DMD2, "--dry_run"]])
def test_a_tool_does_nothing_that_was_not_asked(args):
    done = start(ROOT / "tools" / args[0], *args[1:])
    assert done.returncode == 2 and "Traceback" not in done.stderr

# ---- samples and scores
@pytest.mark.parametrize("args", [["--out", "x.jpg"], ["--guidance", "nan"], ["--steps", str(10 ** 20)]])
def test_samples_that_cannot_be_drawn_as_asked_are_refused(runs, tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    refused(sample.main, [str(runs / "sft"), *args], says=[args[0]])
    assert list(tmp_path.iterdir()) == []

def test_a_damaged_checkpoint_is_left_out_and_a_quick_score_replaces_no_full_one(runs, tmp_path, capsys):
    folder = shutil.copytree(runs / "dmd2", tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    ckpt.path(folder / "checkpoints", 1).write_bytes(b"")
    for few in ("20", "10"):
        evaluate.main([str(folder), "--all", "--seeds=1", "--samples", few])
        assert "WARNING: checkpoint 1 is left out" in capsys.readouterr().out
    assert {f.name for f in (folder / "eval").iterdir()} == {"0000002.json", "0000002_10x1.json"}
    file = json.loads((folder / "eval/0000002.json").read_text())
    assert [(r["samples"], r["checkpoint"]) for r in file["results"]] == [(20, 2)] * 2
    ckpt.path(folder / "checkpoints", 2).write_bytes(b"")
    refused(evaluate.main, [str(folder), "--all"], says=["cannot be read"])

# ---- signals and schedulers
@pytest.mark.parametrize("before, asked", [("SIG_DFL", True), ("SIG_IGN", False)])
def test_a_closed_terminal_is_a_request_to_stop_unless_nohup_says_otherwise(before, asked):
    code = (f"import os, resume, signal; signal.signal(signal.SIGHUP, signal.{before}); resume.install(); "
            "os.kill(os.getpid(), signal.SIGHUP); print(resume.requested())")
    assert start("-c", code, cwd=ROOT).stdout == f"{asked}\n"

def test_a_scheduler_without_its_program_only_warns(monkeypatch, capsys):
    for key, value in dict(SLURM_JOB_ID="77", FEWSTEP_REQUEUE="1", PATH="/nowhere").items():
        monkeypatch.setenv(key, value)
    slurm = resume.Slurm()
    slurm.init()
    slurm.request_resume()
    assert "scontrol cannot be run" in capsys.readouterr().out

def test_a_margin_that_is_no_number_is_one_sentence():
    done = start("-c", "import resume", cwd=ROOT, env=dict(SLURM_JOB_ID="7", FEWSTEP_STOP_BEFORE_END_S="2m"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("FEWSTEP_STOP_BEFORE_END_S=2m is not a number of seconds")
