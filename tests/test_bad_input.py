"""Wrong input ends with one sentence on stderr, exit code 2 and nothing created, before any work. Then a run
and its folder: whose it is, what a bad end leaves, what a method file may return."""
import fcntl
import os
import re
import shutil
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
def here(outputs, tmp_path, monkeypatch):
    """An empty working directory for each test; output goes to outputs/ below it. No test ends pytest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", sys.exit)
    return tmp_path

@pytest.fixture
def cli(capsys, monkeypatch):
    """cli(method, *args) -> (exit code, stdout, stderr) of `python train.py method args`, in this process."""
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
    ("--lr", "--lr needs a value"), ("lr 1", "'lr' is not an option; write --key value"),
    ("--lr fast", "--lr 'fast' does not fit: .*methods/dmd2.py has 0.0006 there, so give a number"),
    ("--lr 1 --lr=2", "--lr is given twice"), ("--preset cifar", "no preset 'cifar'; it has .*cifar10"),
    ("--ema ema:1.5", "0 <= RATE < 1"), ("--ema ema,ema:0.5", "names an average twice"),
    ("--max_iter 10000000", "from 0 to 9999999"), ("--gan_weight -1", "--gan_weight -1.0 must be"),
    ("--batch_size 10 --accum 4", "10 is not divisible by 1 ranks x accum 4; the next one is 12"),
    ("--lr_schedule cosin", "cosin.*cosine"), ("--fake_weight emd", "loss weight 'emd' is not known"),
    ("--amp bf17", "--amp 'bf17' is not known"), ("--net edn:digits", "edn.*edm"),
    ("--data nowhere.zip", "--data nowhere.zip does not exist"),
    ("--net edm:cifar10", r"samples of shape \(1, 8, 8\), --net edm:cifar10 takes \(3, 32, 32\)"),
    ("--val_every 5 --val_data big.npz", "--val_data big.npz has samples of shape"),
    ("--teacher text.md", "text.md cannot be read as weights"), ("--teacher=", "'' does not exist"),
    ("--teacher mix.pth#epoch", "no entry epoch"), ("--teacher mix.pth", "no entry.*write .*path#entry"),
    ("--teacher toy.pth --net toy:tiny,dim=48", r"weights of teacher \(toy.pth\) do not fit.* misshapen \("),
    ("--teacher less.pth", r"1 missing \(out.weight\)"), ("--teacher extra.pth", r"1 unknown \(extra\)"),
    ("--teacher nowhere.pth", "nowhere.pth does not exist; make one with methods/sft.py"),
    ("--val_settings guidance=two", "'two' does not fit"), ("--val_settings batch_size=4", "=4 changes nets"),
    ("", "lr = 'fast', which is not of the type", "config['lr'] = 'fast'"),
    ("", "8.5", "config['batch_size'] = 8.5"), ("", "mine.py line", "x = ("),
    ("", "lacks init, step; a method file has config, b", "del init, step"),
    ("--preset a", r"--lrate is not a config key of mine.py", "presets = dict(a=dict(lrate=1.0))"))])
def test_a_mistake_on_the_command_line_or_in_the_method_file_is_one_sentence(fails, args, words, text):
    Path("text.md").touch()
    toy = torch.load(run.teacher("toy:tiny"), weights_only=True)
    extra, less = toy | dict(extra=toy["out.bias"]), {k: v for k, v in toy.items() if k != "out.weight"}
    for name, content in dict(mix=dict(epoch=3, more=dict(a=1)), toy=toy, extra=extra, less=less).items():
        torch.save(content, f"{name}.pth")
    np.savez("big.npz", image=np.zeros((4, 16, 16, 1), np.uint8), y=range(4))
    args = args.split()
    given = dict(zip(TINY[::2], TINY[1::2])) | {"--teacher": run.teacher("toy:tiny")}
    given = [f"{k}={v}" for k, v in given.items() if not {k, f"{k}="} & {*args}]
    fails(words, mine(text) if text else DMD2, *given, *args)

@pytest.mark.parametrize("default, values, bad, kind", [
    (0.1, {"1e-4": 1e-4, ".5": 0.5, "-1": -1.0, "3": 3.0}, ("fast", "inf", "nan", "", "1,5"), "a number"),
    (1, {"1e4": 10000, "-1": -1, "4.0": 4}, ("3.5", "None", "inf", "true"), "a whole number"),
    (False, {"True": True, "true": True, "1": True, "False": False, "0": False}, ("yes", "2", ""), "true, "),
    ("x", {text: text for text in ("None", "1e-4", "", "b=c", "my run")}, (), ""),
    ((), {"0.999,0.75,0": (0.999, 0.75, 0), "(1, 2)": (1, 2), "": (), "[]": (), "a,b": ("a", "b")}, (), ""),
    ((0.9, 0.999), {"0,0.99": (0, 0.99)}, ("0.9,high",), "a list a,b of such values"),
    (("ema",), {"0.9": ("0.9",), "ema:0.999,ema_long": ("ema:0.999", "ema_long"), "('a', 'b')": ("a", "b")},
     (), "")])
def test_the_type_of_the_default_decides_what_a_value_means(default, values, bad, kind):
    typed = lambda value: [(type(v), v) for v in (value, *(value if isinstance(value, tuple) else ()))]
    for text, value in values.items():
        assert typed(train.parse("key", text, default, "here")) == typed(value)
    for text in bad:
        says = f"--key {text!r} does not fit: here has {default!r} there, so give {kind}"
        refused(train.parse, "key", text, default, "here", says=[says])

def test_authority_is_defaults_then_method_then_preset_then_command_line():
    method = train.load_method(mine("presets['small'] = dict(lr=3, warmup=7, seed=5)"))
    cfg, changed, options = train.resolve(method, ["--warmup", "9", "--preset", "small"])
    assert (cfg["seed"], cfg["lr"], cfg["warmup"], cfg["steps"]) == (5, 3.0, 9, 18)
    assert type(cfg["lr"]) is float and cfg["clip"] == trainer.defaults["clip"]
    assert (cfg["name"], cfg["group"]) == ("mine_small", "digits")
    assert changed.keys() == {"seed", "lr", "warmup", "name", "group"} and options == {"preset": "small"}
    for data, group in {"set.v1": "set.v1", "a/set.v1.zip": "set.v1", "up/in/..": "up"}.items():
        assert train.resolve(method, [f"--data={data}"])[0]["group"] == group       # a data set names it

def optimizers(**shares):
    """optimizers() with these shares of the student's parameters."""
    return lambda nets, cfg: {phase: common.optimizer([*nets["student"].parameters()][share])
                              for phase, share in shares.items()}

@pytest.mark.parametrize("function, value, words", [
    ("build", lambda cfg: dict(student=load("sft").build(cfg)["student"].requires_grad_(False)),
     r"parameter student\.\S+ is frozen and in 1 optimizers"),
    ("init", lambda cfg: dict(studnet="x"), r"init\(\) 'studnet' is not known; did you mean student\?"),
    ("optimizers", optimizers(student=slice(-1)), r"parameter student\.\S+ is trainable and in 0 optimizers"),
    ("optimizers", optimizers(student=slice(99), fake=slice(1)), r"student\.\S+ is trainable and in 2 optim"),
    ("phase", lambda it, cfg: "fake" if it == 1500 else "student", r"phase 'fake' has no optimizer"),
    ("step", lambda *args: (torch.ones(()), {}), r"step\(\) at it 0 .* a loss that depends on no parameter")])
def test_what_a_method_file_gives_is_named_if_it_does_not_fit(outputs, function, value, words):
    method, cfg = setup("sft", max_iter=3000)
    setattr(method, function, value)
    assert re.search(words, refused(trainer.train, method, cfg)) and outputs.exists() == (function == "step")

# ---- whose folder it is
def test_a_folder_of_another_run_is_refused_and_the_ways_on_work(cli, fails, here):
    """One folder with a checkpoint meets another method, a changed method file, --resume "" and a net of
    another size."""
    file, folder = mine(), here / "outputs" / "fewstep" / "digits" / "run"
    command = (*TINY, "--name", "run", "--save_every", "2")
    assert cli(file, *command, "--max_iter", "2")[0] == 0
    assert ckpt.scan(folder / "checkpoints") == [2]
    fails("is a run of mine, not of sft; use --name NEW", SFT, *command)
    fails("holds checkpoints; --name NEW.*--resume auto", file, *command, "--resume", "")
    fails("weights of student .* do not fit the net: .*misshapen", file,
          *(a.replace("toy:tiny", "toy:tiny,dim=48") for a in command))
    mine("# changed")
    fails("has changed since.*--name NEW.*--resume force", file, *command, "--max_iter", "4")
    code, out, _ = cli(file, *command, "--max_iter", "4", "--resume", "force")
    assert code == 0 and ckpt.scan(folder / "checkpoints") == [2, 4]
    assert "config differs from the checkpoint: max_iter was 2, now 4" in out
    assert (folder / "method.py").read_bytes() == file.read_bytes()

def test_other_data_are_refused_unless_forced(here):
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 1), np.uint8)
    for name, x in ("a", images), ("b", images), ("c", images[::-1]):
        np.savez(here / f"{name}.npz", image=x)
    method, cfg = setup("sft", max_iter=1, data="a.npz")
    run.run(method, cfg)
    run.run(method, cfg | dict(max_iter=2, data="b.npz"))               # moved
    other = cfg | dict(max_iter=3, data="c.npz")
    refused(run.run, method, other, says=["--data c.npz is not the data ", " began with, b.npz "])
    run.run(method, other | dict(resume="force"))

def test_a_finished_run_changes_nothing_and_two_runs_in_one_folder_are_refused(cli, fails, here, monkeypatch):
    assert cli(SFT, *TINY, "--max_iter", "3")[0] == 0
    before = contents()
    for extra in (("--max_iter", "3"), ("--stop_at", "2")):
        code, out, _ = cli(SFT, *TINY, *extra)
        assert code == 0 and contents() == before and "nothing to do" in out
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with open(here / "outputs" / "fewstep" / "digits" / "sft" / ".lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        fails("is in use by another run", SFT, *TINY, "--max_iter", "2")
    assert cli(SFT, *TINY, "--max_iter", "4")[0] == 0

# ---- checkpoints and pictures
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(outputs, capsys):
    """Other kinds of damage are in test_shard.py."""
    method, cfg = setup("sft", max_iter=6, save_every=2)
    file = run.run(method, cfg).folder / "checkpoints/0000006.pth"
    content, nets = file.read_bytes(), saved(outputs / "sft", 6)["nets"]
    file.write_bytes(content[:-100])
    assert run.its(run.run(method, cfg).lines) == [1, 2, 3, 4, 5, 6]
    assert re.search(r"WARNING: \S+0000006\.pth cannot be read .*falling back", capsys.readouterr().out)
    assert differing(saved(outputs / "sft", 6)["nets"], nets) == []     # repeated from 4

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

def test_a_picture_that_cannot_be_written_is_a_warning_and_those_past_the_checkpoint_go(outputs, capsys):
    samples = outputs / "sft" / "samples"
    method = stepping("sft", lambda values, nets, it: (shutil.rmtree(samples, True), values)[1])
    run.run(method, config(method, max_iter=2, sample_every=1))
    assert capsys.readouterr().out.count("WARNING: could not write") == 2
    samples.mkdir()
    (samples / "0000007.png").touch()
    run.run(*setup("sft", max_iter=3, sample_every=1))
    assert sorted(os.listdir(samples)) == ["0000002.png", "0000003.png"]

# ---- help and dry run
def test_help_lists_every_key_with_a_comment_and_dry_run_marks_what_changed(cli, here, name):
    method, path = load(name), trainer.ROOT / "methods" / f"{name}.py"
    code, out, _ = cli(path, "--help")
    listed = [line.split()[0][2:] for line in out.splitlines() if line.startswith("  --")]
    assert code == 0 and sorted(listed) == sorted({**trainer.defaults, **method.config})        # each once
    blank = [line for line in out.splitlines() if re.fullmatch(r"  --\w+ +(\S+|\(.*\))\s*", line)]
    assert not blank, "keys without a comment:\n" + "\n".join(blank)
    given = ("--teacher", run.teacher("toy:tiny"), "--data", config(method)["data"])
    before = contents()
    code, out, err = cli(path, *TINY, *given, "--lr", "0.5", "--dry_run")
    assert code == 0 and contents() == before, err
    for words in (f"* lr = 0.5   (default {method.config['lr']!r})\n", "\n  seed = 0\n", "student: ",
                  "batch 8 = 8 per rank x accum 1 x 1 ranks", "GB for weights"):
        assert words in out
