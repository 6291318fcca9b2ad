"""Wrong input ends with one sentence and nothing created. Then a run's folder: whose it is, bad ends."""
import fcntl
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
import common
import run
import train
import trainer
from run import DMD2, SFT, config, differing, load, refused, saved, setup, stepping

TINY = ("--net", "toy:tiny", "--batch_size", "8", "--val_every", "0", "--sample_every", "0", "--log_every",
        "1", "--wandb", "disabled", "--device", "cpu", "--workers", "0")

@pytest.fixture(autouse=True)
def cli(outputs, tmp_path, capsys, monkeypatch):
    """cli(method, *args) -> (exit code, stdout, stderr) of `python train.py method args`, in this process and
    an empty working directory; output goes to outputs/ below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", sys.exit)          # no test ends pytest
    def cli(*args):
        code = 0
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, args)])
        try:
            train.run(train.main)
        except SystemExit as e:
            code = e.code
        return code, *capsys.readouterr()
    return cli

@pytest.fixture
def fails(cli):
    """fails(words, method, *args): it ends with one sentence that has the words, and nothing has changed."""
    def fails(words, method, *args):
        before = contents()
        code, _, err = cli(method, "--stop_at=3", *args)        # where it is accepted it does not run on
        assert code == 2 and contents() == before, (code, err)
        assert err.count("\n") == 1 and re.search(words, err), (words, err)
    return fails

def contents():
    return {p: p.read_bytes() if p.is_file() else None for p in Path.cwd().rglob("*")}

def mine(text=""):
    """mine.py: a copy of sft.py whose functions are followed (so replaced) by `text`."""
    Path("mine.py").write_text(f"{SFT.read_text()}\n\n{text}")
    return Path("mine.py")

# ---- the command line, method files
@pytest.mark.parametrize("args, words, text", [(*row, "")[:3] for row in (     # text: after a copy of sft.py
    ("--max_itr 5", "--max_itr is not a config key of .*; did you mean --max_iter?"),
    ("--ema ema:1.5", "0 <= RATE < 1"), ("--max_iter 10000000", "from 0 to 9999999"),
    ("--batch_size 10 --accum 4", "10 is not divisible by 1 ranks x accum 4"),
    ("--val_every 5 --val_data big.npz", "--val_data big.npz has samples of shape"),
    ("--teacher mix.pth", "no entry.*write .*path#entry"), ("--teacher gone.pth", "gone.pth does not exist"),
    ("--teacher toy.pth --net toy:tiny,dim=48", r"weights of teacher \(toy.pth\) do not fit.* misshapen \("),
    ("--teacher less.pth", r"1 missing \(out.weight\)"), ("--teacher extra.pth", r"1 unknown \(extra\)"),
    ("--val_settings batch_size=4", "=4 changes nets"), ("--amp bf17", "--amp 'bf17' is not known"),
    ("", "lr = 'fast', which is not of the type", "config['lr'] = 'fast'"),
    ("", "mine.py line", "x = ("), ("", "lacks init, step; a method file has config, b", "del init, step"),
    ("--preset a", r"--lrate is not a config key of mine.py", "presets = dict(a=dict(lrate=1.0))"))])
def test_a_mistake_on_the_command_line_or_in_the_method_file_is_one_sentence(fails, args, words, text):
    toy = torch.load(run.teacher("toy:tiny"), weights_only=True)
    extra, less = toy | dict(extra=toy["out.bias"]), {k: v for k, v in toy.items() if k != "out.weight"}
    for name, content in dict(mix=dict(epoch=3, more=dict(a=1)), toy=toy, extra=extra, less=less).items():
        torch.save(content, f"{name}.pth")
    np.savez("big.npz", image=np.zeros((4, 16, 16, 1), np.uint8), y=range(4))
    args = args.split()
    given = dict(zip(TINY[::2], TINY[1::2])) | {"--teacher": run.teacher("toy:tiny")}
    given = [f"{k}={v}" for k, v in given.items() if not {k, f"{k}="} & {*args}]
    fails(words, mine(text) if text else DMD2, *given, *args)

@pytest.mark.parametrize("default, values, bad", [
    (0.1, {"1e-4": 1e-4, ".5": 0.5, "-1": -1.0, "3": 3.0}, ("fast", "inf", "nan", "", "1,5")),
    (1, {"1e4": 10000, "-1": -1, "4.0": 4}, ("3.5", "None", "inf", "true")),
    (False, {"True": True, "true": True, "1": True, "False": False, "0": False}, ("yes", "2", "")),
    ("x", {text: text for text in ("None", "1e-4", "", "b=c", "my run")}, ()),
    ((), {"0.999,0.75,0": (0.999, 0.75, 0), "(1, 2)": (1, 2), "": (), "[]": (), "a,b": ("a", "b")}, ()),
    ((0.9, 0.999), {"0,0.99": (0, 0.99)}, ("0.9,high",)),
    (("ema",), {"0.9": ("0.9",), "ema:0.9,ema_b": ("ema:0.9", "ema_b"), "('a', 'b')": ("a", "b")}, ())])
def test_the_type_of_the_default_decides_what_a_value_means(default, values, bad):
    typed = lambda value: [(type(v), v) for v in (value, *(value if isinstance(value, tuple) else ()))]
    for text, value in values.items():
        assert typed(train.parse("key", text, default, "here")) == typed(value)
    for text in bad:
        refused(train.parse, "key", text, default, "here", says=[f"--key {text!r} does not fit"])

def test_authority_is_defaults_then_method_then_preset_then_command_line():
    method = train.load_method(mine("presets['small'] = dict(lr=3, warmup=7, seed=5)"))
    cfg, changed, options = train.resolve(method, ["--warmup", "9", "--preset", "small"])
    assert (cfg["seed"], cfg["lr"], cfg["warmup"], cfg["steps"]) == (5, 3.0, 9, 18)
    assert type(cfg["lr"]) is float and cfg["clip"] == trainer.defaults["clip"]
    assert (cfg["name"], cfg["group"]) == ("mine_small", "digits")
    assert changed.keys() == {"seed", "lr", "warmup", "name", "group"} and options == {"preset": "small"}

def tied(cfg):
    layers = (nets := load("sft").build(cfg))["student"].layers
    layers[1].up.weight = layers[0].up.weight
    return nets

@pytest.mark.parametrize("function, value, words", [
    ("build", tied, r"student.layers.1.up.weight and student.layers.0.up.weight are one parameter"),
    ("init", lambda cfg: dict(studnet="x"), r"init\(\) 'studnet' is not known; did you mean student\?"),
    ("optimizers", lambda nets, cfg: dict(student=common.optimizer([*nets["student"].parameters()][:-1])),
     r"parameter student\.\S+ is trainable and in 0 optimizers"),
    ("phase", lambda it, cfg: "fake" if it == 1500 else "student", r"phase 'fake' has no optimizer"),
    ("step", lambda *args: (torch.ones(()), {}), r"step\(\) at it 0 .* a loss that depends on no parameter")])
def test_what_a_method_file_gives_is_named_if_it_does_not_fit(outputs, function, value, words):
    method, cfg = setup("sft", max_iter=3000)
    setattr(method, function, value)
    assert re.search(words, refused(trainer.train, method, cfg)) and outputs.exists() == (function == "step")

# ---- whose folder it is
def test_a_folder_of_another_run_is_refused_and_the_ways_on_work(cli, fails, tmp_path):
    file, folder = mine(), tmp_path / "outputs" / "fewstep" / "digits" / "run"
    command = (*TINY, "--name", "run", "--save_every", "2")
    assert cli(file, *command, "--max_iter", "2")[0] == 0
    fails("is a run of mine, not of sft; use --name NEW", SFT, *command)
    fails("holds checkpoints.*--name NEW.*--resume auto", file, *command, "--resume", "")
    fails("weights of student .* do not fit the net: .*misshapen", file,
          *(a.replace("toy:tiny", "toy:tiny,dim=48") for a in command))
    mine("# changed")
    fails("has changed since.*--name NEW.*--resume force", file, *command, "--max_iter", "4")
    code, out, _ = cli(file, *command, "--max_iter", "4", "--resume", "force")
    assert code == 0 and ckpt.scan(folder / "checkpoints") == [2, 4]
    assert "config differs from the checkpoint: max_iter was 2, now 4" in out
    assert (folder / "method.py").read_bytes() == file.read_bytes()

def test_other_data_are_refused_unless_forced():
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 1), np.uint8)
    for name, x in ("a", images), ("b", images), ("c", images[::-1]):
        np.savez(f"{name}.npz", image=x)
    method, cfg = setup("sft", max_iter=1, data="a.npz")
    run.run(method, cfg)
    run.run(method, cfg | dict(max_iter=2, data="b.npz"))               # moved
    other = cfg | dict(max_iter=3, data="c.npz")
    refused(run.run, method, other, says=["--data c.npz is not the data ", " began with, b.npz "])
    run.run(method, other | dict(resume="force"))

def test_a_dry_or_a_finished_run_changes_nothing_and_a_folder_in_use_is_refused(cli, fails, monkeypatch):
    code, out, _ = cli(SFT, *TINY, "--lr", "0.5", "--dry_run")
    assert code == 0 and contents() == {} and "* lr = 0.5   (default " in out and "GB for weights" in out
    assert cli(SFT, *TINY, "--max_iter", "3")[0] == 0
    before = contents()
    for extra in (("--max_iter", "3"), ("--stop_at", "2")):
        code, out, _ = cli(SFT, *TINY, *extra)
        assert code == 0 and contents() == before and "nothing to do" in out
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with open("outputs/fewstep/digits/sft/.lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        fails("is in use by another run", SFT, *TINY, "--max_iter", "2")

# ---- ends
def test_weights_that_are_not_finite_are_not_saved(outputs):
    spoil = lambda nets: next(nets["student"].parameters()).data.fill_(torch.nan)
    method = stepping("sft", lambda values, nets, it: (spoil(nets), values)[1])
    refused(run.run, method, config(method, max_iter=1), says=["1 weights of student are not finite ("])
    assert ckpt.scan(outputs / "sft" / "checkpoints") == []

@pytest.mark.parametrize("at, kind, how", [
    (0, common.BadInput, {}), (0, KeyError, {}), (3, common.BadInput, {}), (3, KeyError, {}),
    (3, common.BadInput, dict(async_save=True, save_every=3))])         # being written when the error comes
def test_what_is_done_is_saved_before_a_bad_end(outputs, monkeypatch, kind, at, how):
    method = stepping("sft", lambda v, nets, it: v if it != at else (_ for _ in ()).throw(kind("gone")))
    cfg, save = config(method, max_iter=6, **how), ckpt.save
    monkeypatch.setattr(ckpt, "save", lambda *args: time.sleep(0.5 if how else 0) or save(*args))
    refused(run.run, method, cfg, says=["gone"], error=kind)
    assert ckpt.scan(outputs / "sft" / "checkpoints") == ([at] if at else [])   # a method is being written
    states = [saved(run.run(load("sft"), cfg | dict(name=name)).folder, 6) for name in ("sft", "straight")]
    assert differing(*(state["nets"] for state in states)) == []
