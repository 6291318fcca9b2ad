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

TINY = ("--net=toy:tiny --batch_size=8 --val_every=0 --sample_every=0 --log_every=1 --wandb=disabled "
        "--device=cpu").split()

@pytest.fixture(autouse=True)
def cli(tmp_path, capsys, monkeypatch):
    """cli(method, *args) -> stdout of `python train.py method args`, in this process and an empty working
    directory; with fails=words it must end with a sentence that has the words, and change nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", sys.exit)          # no test ends pytest
    def cli(*args, fails=""):
        before, code = contents(), 0
        words = {word.partition("=")[0]: word for word in map(str, ("train.py", *args))}    # the last counts
        monkeypatch.setattr(sys, "argv", [*words.values()])
        try:
            train.run(train.main)
        except SystemExit as e:
            code = e.code
        out, err = capsys.readouterr()
        assert code == (2 if fails else 0), (code, err)
        assert not fails or contents() == before and err.count("\n") == 1 and re.search(fails, err), err
        return out
    return cli

def contents():
    return {p: p.read_bytes() if p.is_file() else None for p in Path.cwd().rglob("*")}

def mine(text=""):
    """mine.py: a copy of sft.py whose functions are followed (so replaced) by `text`."""
    Path("mine.py").write_text(f"{SFT.read_text()}\n\n{text}")
    return Path("mine.py")

# ---- the command line, method files
@pytest.mark.parametrize("args, words, text", [(*row, "")[:3] for row in (     # text: after a copy of sft.py
    ("--max_itr=5", "--max_itr is not a config key of .*; did you mean --max_iter?"),
    ("--ema=ema:1.5", "0 <= RATE < 1"), ("--max_iter=10000000", "from 0 to 9999999"),
    ("--batch_size=10 --accum=4", "10 is not divisible by 1 ranks x accum 4"),
    ("--val_every=5 --val_data=big.npz", "--val_data big.npz has samples of shape"),
    ("--teacher=mix.pth", "no entry.*write .*path#entry"), ("--teacher=gone.pth", "gone.pth does not exist"),
    ("--teacher=toy.pth --net=toy:tiny,dim=48", r"weights of teacher \(toy.pth\) do not fit.* misshapen \("),
    ("--teacher=other.pth", r"1 missing \(out.weight\).* 1 unknown \(extra\)"),
    ("--val_settings=batch_size=4", "=4 changes nets"), ("--amp=bf17", "--amp 'bf17' is not known"),
    ("", "lr = 'fast', which is not of the type", "config['lr'] = 'fast'"),
    ("", "mine.py line", "x = ("), ("", "lacks init, step; a method file has config, b", "del init, step"),
    ("--preset=a", r"--lrate is not a config key of mine.py", "presets = dict(a=dict(lrate=1.0))"))])
def test_a_mistake_on_the_command_line_or_in_the_method_file_is_one_sentence(cli, args, words, text):
    toy = torch.load(run.teacher("toy:tiny"), weights_only=True)
    torch.save(toy, "toy.pth")
    torch.save(dict(epoch=3, more=dict(a=1)), "mix.pth")
    torch.save(dict(extra=toy.pop("out.weight"), **toy), "other.pth")
    np.savez("big.npz", image=np.zeros((4, 16, 16, 1), np.uint8), y=range(4))
    teacher = f"--teacher={run.teacher('toy:tiny')}"
    cli(mine(text) if text else DMD2, *TINY, teacher, "--stop_at=3", *args.split(), fails=words)

@pytest.mark.parametrize("default, values, bad", [
    (0.1, {"1e-4": 1e-4, ".5": 0.5, "-1": -1.0, "3": 3.0}, ("fast", "inf", "nan", "", "1,5")),
    (1, {"1e4": 10000, "-1": -1, "4.0": 4}, ("3.5", "None", "inf", "true")),
    (False, {"True": True, "true": True, "1": True, "False": False, "0": False}, ("yes", "2", "")),
    ("x", {text: text for text in ("None", "1e-4", "", "b=c", "my run")}, ()),
    ((), {"0.999,0.75,0": (0.999, 0.75, 0), "(1, 2)": (1, 2), "": (), "[]": (), "a,b": ("a", "b")}, ()),
    ((0.9, 0.999), {"0,0.99": (0, 0.99)}, ("0.9,high",)),
    (("ema",), {"0.9": ("0.9",), "ema:0.9,ema_b": ("ema:0.9", "ema_b"), "('a', 'b')": ("a", "b")}, ())])
def test_the_type_of_the_default_decides_what_a_value_means(default, values, bad):
    for text, value in values.items():
        assert repr(train.parse("key", text, default, "here")) == repr(value)       # and of its type
    for text in bad:
        refused(train.parse, "key", text, default, "here", says=[f"--key {text!r} does not fit"])

def test_authority_is_defaults_then_method_then_preset_then_command_line():
    method = train.load_method(mine("presets['small'] = dict(lr=3, warmup=7, seed=5)"))
    cfg, changed, options = train.resolve(method, ["--warmup", "9", "--preset", "small"])
    assert (cfg["seed"], repr(cfg["lr"]), cfg["warmup"], cfg["steps"]) == (5, "3.0", 9, 18)
    assert (cfg["clip"], cfg["name"], cfg["group"]) == (trainer.defaults["clip"], "mine_small", "digits")
    assert changed.keys() == {"seed", "lr", "warmup", "name", "group"} and options == {"preset": "small"}

def tied(cfg):
    layers = (nets := load("sft").build(cfg))["student"].layers
    layers[1].up.weight = layers[0].up.weight
    return nets

@pytest.mark.parametrize("function, value, words", [
    ("build", tied, "student.layers.1.up.weight and student.layers.0.up.weight are one parameter"),
    ("init", lambda cfg: dict(studnet="x"), "init() 'studnet' is not known; did you mean student?"),
    ("optimizers", lambda nets, cfg: dict(student=common.optimizer([*nets["student"].parameters()][:-1])),
     " is trainable and in 0 optimizers"),
    ("phase", lambda it, cfg: "fake" if it == 1500 else "student", "phase 'fake' has no optimizer"),
    ("step", lambda *args: (torch.ones(()), {}), "returned a loss that depends on no parameter")])
def test_what_a_method_file_gives_is_named_if_it_does_not_fit(outputs, function, value, words):
    method, cfg = setup("sft", max_iter=3000)
    setattr(method, function, value)
    refused(trainer.train, method, cfg, says=[words])
    assert outputs.exists() == (function == "step")

# ---- whose folder it is
def test_a_folder_of_another_run_is_refused_and_the_ways_on_work(cli):
    file, command = mine(), [*TINY, "--name=run", "--save_every=2", "--max_iter=4"]
    cli(file, *command, "--max_iter=2")
    cli(SFT, *command, fails="is a run of mine, not of sft; use --name NEW")
    cli(file, *command, "--resume=", fails="holds checkpoints.*--name NEW.*--resume auto")
    cli(file, *command, "--net=toy:tiny,dim=48", fails="weights of student .* do not fit the net")
    mine("# changed")
    cli(file, *command, fails="has changed since.*--name NEW.*--resume force")
    out, folder = cli(file, *command, "--resume=force"), Path("outputs/fewstep/digits/run")
    assert "config differs from the checkpoint: max_iter was 2, now 4" in out
    assert ckpt.scan(folder / "checkpoints") == [2, 4]
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

def test_a_dry_or_a_finished_run_changes_nothing_and_a_folder_in_use_is_refused(cli, monkeypatch):
    out = cli(SFT, *TINY, "--lr=0.5", "--dry_run")
    assert contents() == {} and "* lr = 0.5   (default " in out and "memory per rank: 0.00 GB = weights" in out
    cli(SFT, *TINY, "--max_iter=3")
    before = contents()
    for extra in "--max_iter=3", "--stop_at=2":
        assert "nothing to do" in cli(SFT, *TINY, extra) and contents() == before
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with open("outputs/fewstep/digits/sft/.lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        cli(SFT, *TINY, "--max_iter=4", fails="is in use by another run")

# ---- ends
def test_weights_that_are_not_finite_are_not_saved(outputs):
    spoil = lambda nets: next(nets["student"].parameters()).data.fill_(torch.nan)
    method = stepping("sft", lambda values, nets, it: (spoil(nets), values)[1])
    refused(run.run, method, config(method, max_iter=1), says=["1 weights of student are not finite ("])
    assert ckpt.scan(outputs / "sft" / "checkpoints") == []

@pytest.mark.parametrize("at, kind, how", [
    (0, common.BadInput, {}), (3, KeyError, {}),        # 0: a method is being written
    (3, common.BadInput, dict(async_save=True, save_every=3))])         # being saved when the error comes
def test_what_is_done_is_saved_before_a_bad_end(outputs, monkeypatch, kind, at, how):
    method = stepping("sft", lambda v, nets, it: v if it != at else (_ for _ in ()).throw(kind("gone")))
    cfg, save = config(method, max_iter=6, **how), ckpt.save
    monkeypatch.setattr(ckpt, "save", lambda *args: time.sleep(0.5 if how else 0) or save(*args))
    refused(run.run, method, cfg, says=["gone"], error=kind)
    assert ckpt.scan(outputs / "sft" / "checkpoints") == [at] * (at > 0)
    states = [saved(run.run(load("sft"), cfg | dict(name=name)).folder, 6) for name in ("sft", "straight")]
    assert differing(*(state["nets"] for state in states)) == []
