"""Wrong input ends with one sentence on stderr, exit code 2 and nothing created, before any work. Then a run
and its folder: whose it is, what is kept, what a bad end leaves, what a method file may return."""
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
import common
import resume
import run
import startup
import train
import trainer
from run import DMD2, SFT, config, differing, load, refused, saved, setup

ROOT = trainer.ROOT
TINY = ("--net", "toy:tiny", "--batch_size", "8", "--val_every", "0", "--sample_every", "0", "--log_every",
        "1", "--wandb", "disabled", "--device", "cpu", "--workers", "0")

@pytest.fixture(autouse=True)
def here(outputs, tmp_path, monkeypatch):
    """An empty working directory for each test; output goes to outputs/ below it. No test ends pytest."""
    monkeypatch.chdir(tmp_path)
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(os, "_exit", sys.exit)
    return tmp_path

@pytest.fixture
def cli(capsys):
    """cli(method, *args) -> (exit code, stdout, stderr) of `python train.py method args`, in this process."""
    def cli(*args):
        code = 0
        try:
            train.main([*map(str, args)])
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
        assert err.count("\n") == 1 and "Traceback" not in err and re.search(words, err), (words, err)
    return fails

def contents():
    return {p: p.read_bytes() if p.is_file() else None for p in Path.cwd().rglob("*")}

def mine(text="", source=SFT.read_text()):
    """mine.py: a copy of sft.py whose functions are followed (so replaced) by `text`."""
    Path("mine.py").write_text(f"{source}\n\n{text}")
    return Path("mine.py")

def python(*command, **kw):
    env = os.environ | dict(OMP_NUM_THREADS="1") | kw.pop("env", {})
    kw = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120) | kw
    return subprocess.run([sys.executable, *map(str, command)], env=env, **kw)

# ---- the command line, method files
@pytest.mark.parametrize("args, words, text", [(*row, "")[:3] for row in (     # text: after a copy of sft.py
    ("--max_itr 5", "--max_itr is not a config key of .*; did you mean --max_iter?"),
    ("--dryrun", "did you mean --dry_run?"), ("--zzz 1", "--zzz is not a config key of .*; --help lists"),
    ("--dry_run=true", "--dry_run takes no value"), ("--lr", "--lr needs a value"),
    ("--name --dry_run", "--name needs a value"), ("lr 1", "'lr' is not an option; write --key value"),
    ("--lr fast", "--lr 'fast' does not fit: .*methods/dmd2.py has 0.0006 there, so give a number"),
    ("--lr 1 --lr=2", "--lr is given twice"), ("--preset a --preset a", "--preset is given twice"),
    ("--preset cifar", "no preset 'cifar'; it has .*cifar10"), ("--ema ema:1.5", "0 <= RATE < 1"),
    ("--ema ema,ema:0.5", "names an average twice"), ("--ema average", "'average' is not NAME.* with ema"),
    ("--max_iter 10000000", "10000000 is more than 9999999"), ("--accum 0", "--accum 0 must be at least 1"),
    ("--steps 1" + 20 * "0", "is more than"), ("--workers 1000", "--workers 1000 is more than 256$"),
    ("--augment 2.0", "2.0 is more than 1$"), ("--classes -5", "--classes -5 must be at least -1"),
    ("--lr 1e300", r"--lr 1e\+300 is more"), ("--betas 0.9,nan", "--betas .* is not a number"),
    ("--seed -1", "--seed -1 must not be negative"), ("--lr -1e-3", "--lr -0.001 must not be negative"),
    ("--max_iter -1", "--max_iter -1 must not be negative$"), ("--weight_decay -1", "not be negative"),
    ("--lr_fake -1", "--lr_fake -1.0 must not"), ("--gan_weight -1", "--gan_weight -1.0 must not"),
    ("--batch_size 10 --accum 4", "10 is not divisible by 1 ranks x accum 4 = 4; nearest 8 or 12"),
    ("--batch_size 3 --accum 4", "= 4; nearest 4$"), ("--lr_schedule cosin", "cosin.*cosine"),
    ("--fake_weight emd", "loss weight 'emd' is not known"), ("--fake_pred vel", "prediction 'vel' is not"),
    ("--amp bf17", "--amp 'bf17' is not known; choose from '', 'bf16', 'fp16'"),
    ("--resume yes", "--resume 'yes' is not known; choose from 'auto', 'force', ''"),
    ("--device gpu", "--device 'gpu' is not known; choose from '', 'cuda', 'mps', 'cpu'"),
    ("--name a/b", "--name 'a/b' cannot be the name of a folder"), ("--group ..", "--group '..' cannot be"),
    ("--data nowhere.zip", "--data nowhere.zip does not exist"), ("--net edn:digits", "edn.*edm"),
    ("--net edm:cifar10", r"samples of shape \(1, 8, 8\), --net edm:cifar10 takes \(3, 32, 32\)"),
    ("--val_every 5 --val_data nowhere", "--val_data nowhere does"),
    ("--val_every 5 --val_data big.npz", "--val_data big.npz has samples of shape"),
    ("--teacher text.md", "text.md cannot be read as weights"), ("--teacher=", "'' does not exist"),
    ("--teacher #ema", "'#ema' does not exist"), ("--teacher " + "x" * 300, "does not exist"),
    ("--teacher list.pth", "list.pth holds a list"), ("--teacher mix.pth#epoch", "no entry epoch"),
    ("--teacher int.pth", "int.pth.* tensors by name"), ("--teacher mix.pth#more", "by name"),
    ("--teacher bad.safetensors", "bad.safetensors cannot be"),
    ("--teacher empty", "empty holds no checkpoints; make one with"),
    ("--teacher nowhere.pth", "nowhere.pth does not exist; make one with `torchrun train.py methods/sft.py "
                              r"--net toy.*--teacher PATH\[#ENTRY\]"),
    ("--val_settings guidence=2", "--val_settings names 'guidence'"),
    ("--val_settings guidance=two", "'two' does not fit"), ("--val_settings t_dist=foo", "foo"),
    ("--val_settings batch_size=4", "=4 changes nets"), ("--val_settings update_ratio=0", "least 1"),
    ("--val_settings update_ratio=2", "=2 changes"), ("--val_settings lr_fake=5", "changes nets, optimizers"),
    ("--gan_weight 0 --val_settings gan_weight=1", "--val_settings gan_weight=1 changes nets"),
    ("", "lr = 'fast', which is not of the type", "config['lr'] = 'fast'"),
    ("", "'12'", "config['max_iter'] = '12'"), ("", "8.5", "config['batch_size'] = 8.5"),
    ("", "True", "config['steps'] = True"), ("", "ema:0.9", "config['ema'] = 'ema:0.9'"),
    ("", "--lr nan is not a number", "config['lr'] = float('nan')"), ("", "config.*dict", "config = []"),
    ("", r"config\['betas'\] is a list; use int,", "config['betas'] = [0.9, 0.999]"),
    ("", "--preset", "config['preset'] = ''"), ("", r"calls sys.exit\(\)", "import sys; sys.exit(3)"),
    ("", "mine.py", "x = '\0'"), ("", "mine.py line", "x = ("),
    ("", "mine.py lacks init, step; a method file has config, build,", "del init, step"),
    ("--preset a", r"--lrate is not a config key of mine.py \(preset a\); did you mean --",
     "presets = dict(a=dict(lrate=1.0))"),
    ("--preset b", "preset b has warmup = 0.5", "presets = dict(b=dict(warmup=0.5))"))])
def test_a_mistake_on_the_command_line_or_in_the_method_file_is_one_sentence(fails, args, words, text):
    for name in "text.md", "bad.safetensors":
        Path(name).touch()
    Path("empty").mkdir()
    for name, content in ("list", [1]), ("mix", dict(epoch=3, more=dict(a=1))), ("int", {0: torch.ones(2)}):
        torch.save(content, f"{name}.pth")
    np.savez("big.npz", image=np.zeros((4, 16, 16, 1), np.uint8), y=range(4))
    args = [*args.split(), *(["--val_every", "5"] if "val_settings" in args else [])]
    given = dict(zip(TINY[::2], TINY[1::2])) | {"--teacher": run.teacher("toy:tiny")}
    given = [f"{k}={v}" for k, v in given.items() if not {k, f"{k}="} & {*args}]
    fails(words, mine(text) if text else DMD2, *given, *args)

@pytest.mark.parametrize("default, values, bad, kind", [
    (0.1, {"1e-4": 1e-4, "1E-4": 1e-4, ".5": 0.5, "-1": -1.0, "-1e-3": -1e-3, "3": 3.0},
     ("fast", "inf", "nan", "", "None", "1e-4x", "1,5"), "a number"),
    (1, {"1e4": 10000, "10e2": 1000, "1_000": 1000, "-1": -1, "4.0": 4,
         "9007199254740993": 9007199254740993},                     # above 2 ** 53: not by way of a float
     ("3.5", "None", "inf", "true"), "a whole number"),
    (False, {"True": True, "true": True, "1": True, "False": False, "0": False}, ("yes", "2", ""), "true, "),
    ("x", {text: text for text in ("None", "1e-4", "", "b=c", "my run")}, (), ""),
    ((), {"0.999,0.75,0": (0.999, 0.75, 0), "[0.999,0.75,0]": (0.999, 0.75, 0), "(1, 2)": (1, 2),
          "": (), "[]": (), "a,b": ("a", "b")}, (), ""),
    ((0.9, 0.999), {"0,0.99": (0, 0.99)}, ("0.9,high", "(0.9", "((1, 2),)"), "a list a,b of such values"),
    (("ema",), {"0.9": ("0.9",), "ema:0.999,ema_long": ("ema:0.999", "ema_long"), "('a', 'b')": ("a", "b")},
     (), "")])
def test_the_type_of_the_default_decides_what_a_value_means(default, values, bad, kind):
    typed = lambda value: [(type(v), v) for v in (value, *(value if isinstance(value, tuple) else ()))]
    for text, value in values.items():
        assert typed(train.parse("key", text, default, "here")) == typed(value)
    for text in bad:
        says = f"--key {text!r} does not fit: here has {default!r} there, so give {kind}"
        refused(train.parse, "key", text, default, "here", says=[says])

def test_authority_is_defaults_then_method_then_preset_then_command_line(here, monkeypatch):
    small = "presets = dict(small=dict(lr=3, warmup=7, seed=5), "
    method = train.load_method(mine(source=SFT.read_text().replace("presets = dict(", small)))
    cfg, changed, options = train.resolve(method, ["--warmup", "9", "--preset", "small"])
    assert (cfg["seed"], cfg["lr"], cfg["warmup"], cfg["steps"]) == (5, 3.0, 9, 18)
    assert type(cfg["lr"]) is float and cfg["clip"] == trainer.defaults["clip"]
    assert (cfg["name"], cfg["group"]) == ("mine_small", "digits")
    assert changed.keys() == {"seed", "lr", "warmup", "name", "group"} and options == {"preset": "small"}
    (here / "up" / "in").mkdir(parents=True)
    monkeypatch.chdir(here / "up" / "in")
    for data, group in {"set.v1": "set.v1", "set.v1.zip": "set.v1", "x.npz": "x", ".": "in", "..": "up",
                        "/": "root"}.items():           # a data set names its group
        assert train.resolve(method, [f"--data={data}"])[0]["group"] == group

def test_what_is_no_method_file_is_one_sentence(fails):
    fails(f"nosuch.py does not exist; there are .*{re.escape(os.path.relpath(DMD2))}", "nosuch.py")
    fails("cannot be read", "m" * 300 + ".py")
    fails("README.md line", ROOT / "README.md")
    fails("--max_iter is no method file; write train.py methods/NAME.py --max_iter", "--max_iter", "5", SFT)

def test_the_bytes_that_ran_are_kept_whatever_the_file_is_later():
    method, source = train.load_method(mine("answer = 42")), Path("mine.py").read_bytes()
    Path("mine.py").write_text("raise SystemExit")
    assert method.source == source and method.answer == 42 and train.comments(method.source, "config")["lr"]
    for n in 1, 2:
        assert (run.run(method, config(method, max_iter=n)).folder / "method.py").read_bytes() == source

def optimizers(more=0, **shares):
    """optimizers() with these shares of the student's parameters, and as many of no net."""
    return lambda nets, cfg: {phase: common.optimizer(
        [*nets["student"].parameters()][share] + [torch.nn.Parameter(torch.ones(2))] * more)
        for phase, share in shares.items()}

@pytest.mark.parametrize("function, value, words", [        # value: what it returns, or the function itself
    ("build", torch.nn.Linear(1, 1), r"build\(\) returned Linear; it must return \{name: torch.nn.Module\}"),
    ("build", None, r"build\(\) returned NoneType"), ("build", dict(student=3), r"returned 'student': int"),
    ("build", lambda cfg: dict(generator=load("sft").build(cfg)["student"]),
     r"build\(\) returns generator; the net that samples is named student"),
    ("build", lambda cfg: dict(student=load("sft").build(cfg)["student"].requires_grad_(False)),
     r"parameter student\.\S+ is frozen and in 1 optimizers"),
    ("init", None, r"init\(\) returned NoneType"), ("init", dict(student=3), "returned 'student': int"),
    ("init", dict(studnet="x"), r"init\(\) 'studnet' is not known; did you mean student\?"),
    ("optimizers", [1], r"optimizers\(\) returned list"),
    ("optimizers", optimizers(student=slice(-1)), r"parameter student\.\S+ is trainable and in 0 optimizers"),
    ("optimizers", optimizers(student=slice(99), fake=slice(1)), r"student\.\S+ is trainable and in 2 optim"),
    ("optimizers", optimizers(1, student=slice(99)), r"optimizers\(\) holds 1 parameters of no net"),
    ("phase", lambda it, cfg: "fake" if it == 1500 else "student", r"phase 'fake' \(it 1500\) has no optim"),
    ("step", None, r"step\(\) returned NoneType"), ("step", torch.ones(()), r"step\(\) returned Tensor"),
    ("step", dict(loss=1.0), r"step\(\) returned dict"), ("step", (0.5, {}), "returned a loss that"),
    ("step", (torch.ones(()), {}), r"step\(\) at it 0 \(phase 'student'\) returned a loss that"),
    ("step", (torch.ones(2), {}), r"returned 'loss': torch.Size\(\[2\]\)"),
    ("step", (torch.ones(()), dict(a=torch.ones(3))), r"returned 'a': torch.Size\(\[3\]\)"),
    ("step", (torch.ones(()), dict(a="x")), "returned 'a': str")])
def test_what_a_method_file_gives_is_named_if_it_does_not_fit(outputs, function, value, words):
    method, cfg = setup("sft", max_iter=3000)
    setattr(method, function, value if hasattr(value, "__code__") else lambda *args: value)
    assert re.search(words, refused(trainer.train, method, cfg)) and outputs.exists() == (function == "step")

def around_step(around, name="sft"):
    """A method whose step(nets, batch, it, cfg) returns around(old step's values, nets, it)."""
    method = load(name)
    step = method.step
    method.step = lambda nets, batch, it, cfg: around(step(nets, batch, it, cfg), nets, it)
    return method

def rank_logs_more():
    method = around_step(lambda values, nets, it: (values[0], {f"extra{os.environ['RANK']}": 1.0}))
    return refused(run.run, method, config(method, max_iter=2))

def test_ranks_that_log_different_keys_are_told_so():
    assert all("step() logs extra0, extra1 on some ranks only" in s for s in run.ranks(2, rank_logs_more))

def test_skipped_updates_are_counted_by_phase(capsys):
    method = around_step(lambda values, nets, it: (values[0] * (torch.nan if it % 2 else 1), {}), "dmd2")
    cfg = config(method, max_iter=20, max_skipped=3, update_ratio=1)    # the student has the odd turns
    refused(run.run, method, cfg, says=["not finite 3 times in a row, last at it 5, phase 'student'"])
    folder = run.run(method, cfg | dict(name="a few", max_iter=2)).folder
    assert re.search(f"WARNING: no update of phase 'student' was applied\n(.*\n)*score it: .* '{folder}'",
                     capsys.readouterr().out)

# ---- whose folder it is
def test_an_output_folder_that_cannot_be_written_is_named(fails, here, monkeypatch):
    (here / "file").touch()
    for root in (here / "file" / "below", "/proc/nowhere"):
        monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", str(root))
        fails(f"output folder {root}/fewstep/digits/sft is not writable.*set FEWSTEP_OUTPUT_ROOT", SFT, *TINY)

def test_a_folder_of_another_run_is_refused_and_the_ways_on_work(cli, fails, here):
    """One folder with a checkpoint meets another method, a changed method file, --resume "" and a net of
    another size."""
    file, folder = mine(), here / "outputs" / "fewstep" / "digits" / "run"
    command = (*TINY, "--name", "run", "--save_every", "2")
    assert cli(file, *command, "--max_iter", "2")[0] == 0
    assert ckpt.scan(folder / "checkpoints") == [2]
    fails("is a run of mine, not of sft; use --name NEW", SFT, *command)
    fails("holds checkpoints.*--name NEW.*--resume auto", file, *command, "--resume", "")
    fails("weights of student .* do not fit the net: .*misshapen", file,
          *(a.replace("toy:tiny", "toy:tiny,dim=48") for a in command))
    mine("# changed")
    fails("has changed since.*--name NEW.*--resume force", file, *command, "--max_iter", "4")
    code, out, _ = cli(file, *command, "--max_iter", "4", "--resume", "force")
    assert code == 0 and ckpt.scan(folder / "checkpoints") == [2, 4] and "continuing at iteration 2" in out
    assert "config differs from the checkpoint: max_iter was 2, now 4" in out
    assert (folder / "method.py").read_bytes() == file.read_bytes()

def test_a_folder_of_another_method_is_refused_whatever_its_config_says(monkeypatch):
    sft, dmd2 = load("sft"), load("dmd2")
    folder = run.run(sft, config(sft, max_iter=1, name="one")).folder
    for text in "", "[]", '{"method": "sft"}':
        (folder / "method.py").unlink(missing_ok=True)
        (folder / "config.json").write_text(text)
        refused(run.run, dmd2, config(dmd2, name="one"), says=[f"{folder} is a run of sft, not of dmd2"])
    (folder / "config.json").unlink()
    assert run.run(sft, config(sft, max_iter=2, name="one")).lines[-1]["it"] == 2
    lock = startup.take_lock                            # filled by another method while this run waits for it
    monkeypatch.setattr(startup, "take_lock", lambda here, *rest: (
        shutil.copytree(folder, here, dirs_exist_ok=True), lock(here, *rest))[1])
    refused(run.run, dmd2, config(dmd2, name="two"), says=["two is a run of sft, not of dmd2"])

def test_other_data_are_refused_unless_forced_and_a_source_of_equal_size_and_other_content(here, capsys):
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 1), np.uint8)
    for folder, x in ("a", images), ("b", images), ("c", images[::-1]):
        (here / folder).mkdir()
        np.savez(here / folder / "set.npz", image=x)
    method, cfg = setup("sft", max_iter=1, data="a/set.npz")
    run.run(method, cfg)
    run.run(method, cfg | dict(max_iter=2, data="b/set.npz"))           # moved
    other = cfg | dict(max_iter=3, data="c/set.npz")
    assert re.search(r"--data c/set.npz is not the data \S+ began with, b/set.npz .* --resume force",
                     refused(run.run, method, other))
    assert "score it" not in capsys.readouterr().out    # evaluate.py knows the digits only
    run.run(method, other | dict(resume="force"))
    (method, cfg), file = setup("dmd2", max_iter=2), here / "teacher.pth"
    whole = torch.load(cfg["teacher"], weights_only=True)
    torch.save({k: v + 0 for k, v in whole.items()}, file)
    size, cfg = file.stat().st_size, cfg | dict(teacher=str(file))
    run.run(method, cfg | dict(stop_at=1))
    torch.save({k: v + 1 for k, v in whole.items()}, file)
    refused(run.run, method, cfg, says=["is not the file it was"])
    assert file.stat().st_size == size

def test_a_finished_run_changes_nothing_and_two_runs_in_one_folder_are_refused(cli, fails, here, monkeypatch):
    assert cli(SFT, *TINY, "--max_iter", "3")[0] == 0
    before = contents()
    for extra in (("--max_iter", "3"), ("--max_iter", "2"), ("--stop_at", "2")):
        code, out, _ = cli(SFT, *TINY, *extra)
        assert code == 0 and contents() == before
        assert "nothing to do" in out and "has done 3 iterations" in out
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with open(here / "outputs" / "fewstep" / "digits" / "sft" / ".lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        fails("is in use by another run", SFT, *TINY, "--max_iter", "2")
    assert cli(SFT, *TINY, "--max_iter", "4")[0] == 0

# ---- checkpoints and pictures
def test_a_damaged_or_renamed_newest_checkpoint_is_named_and_the_one_before_it_used(outputs, capsys):
    method, cfg = setup("sft", max_iter=6, save_every=2)
    file = run.run(method, cfg).folder / "checkpoints/0000006.pth"
    content, student = file.read_bytes(), saved(outputs / "sft", 6)["nets"]["student"]
    file.write_bytes(content[:-100])
    assert run.its(run.run(method, cfg).lines) == [1, 2, 3, 4, 5, 6]
    assert re.search(r"WARNING: \S+0000006\.pth cannot be read .*falling back", capsys.readouterr().out)
    assert differing(saved(outputs / "sft", 6)["nets"]["student"], student) == []   # repeated from 4
    place = content.find(student["out.weight"].numpy().tobytes()[:64])
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1:])   # a flipped bit
    shutil.copy(ckpt.path(file.parent, 4), ckpt.path(file.parent, 900))
    torch.save([torch.zeros(3)], ckpt.path(file.parent, 901))
    run.run(method, cfg | dict(stop_at=5, keep_last=1))     # pruning keeps what was just written
    said = capsys.readouterr().out
    assert "0000006.pth is damaged (wrong checksum" in said and said.count("falling back") == 3
    assert ckpt.scan(file.parent) == [5, 6, 900, 901]
    for n in ckpt.scan(file.parent):
        ckpt.path(file.parent, n).write_bytes(b"")
    refused(run.run, method, cfg, says=[f"no checkpoint in {outputs / 'sft'} can be read"])

def test_weights_that_are_not_finite_are_not_saved(outputs):
    method = around_step(lambda v, nets, it: (next(nets["student"].parameters()).data.fill_(torch.nan), v)[1])
    sentence = refused(run.run, method, config(method, max_iter=1))
    assert re.search(r"1 weights of student are not finite \(\w+\.", sentence)
    assert ckpt.scan(outputs / "sft" / "checkpoints") == []

@pytest.mark.parametrize("at, kind, how", [
    *((at, kind, {}) for at in (0, 3) for kind in (common.BadInput, RuntimeError, KeyError)),
    (3, common.BadInput, dict(async_save=True, save_every=3))])         # being written when the error comes
def test_what_is_done_is_saved_before_a_bad_end(outputs, monkeypatch, kind, at, how):
    method = around_step(lambda values, nets, it: values if it != at else (_ for _ in ()).throw(kind("gone")))
    cfg, save = config(method, max_iter=6, **how), ckpt.save
    monkeypatch.setattr(ckpt, "save", lambda *args: time.sleep(0.5 if how else 0) or save(*args))
    refused(run.run, method, cfg, says=["gone"], error=kind)
    assert ckpt.scan(outputs / "sft" / "checkpoints") == ([at] if at else [])   # a method is being written
    states = [saved(run.run(load("sft"), cfg | dict(name=name)).folder, 6) for name in ("sft", "straight")]
    assert differing(*(state["nets"] for state in states)) == []

def test_a_picture_that_cannot_be_written_is_a_warning_and_a_lost_one_is_drawn_again(outputs, capsys):
    samples = outputs / "sft" / "samples"
    method = around_step(lambda values, nets, it: (shutil.rmtree(samples, True), values)[1])
    run.run(method, config(method, max_iter=2, sample_every=1, save_every=1))
    assert ckpt.scan(outputs / "sft" / "checkpoints") == [1, 2]
    assert capsys.readouterr().out.count("WARNING: could not write") == 2
    samples = outputs / "again" / "samples"             # as a killed start leaves it
    samples.mkdir(parents=True)
    for name in ("0000000", "0000007", "0000007_ema_1"):
        (samples / f"{name}.png").touch()
    run.run(*setup("sft", max_iter=1, sample_every=1, name="again"))
    assert sorted(os.listdir(samples)) == ["0000000.png", "0000001.png", "0000007_ema_1.png"]
    assert (samples / "0000000.png").read_bytes() != b""

# ---- ranks, devices, schedulers
def test_a_mistake_that_only_another_rank_sees_is_said_after_all(cli, monkeypatch):
    """Rank 1 keeps quiet while torchrun ends it on rank 0's account, and speaks when nobody does."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(resume, "requested", lambda: True)
    assert cli(SFT, "--max_itr", "5") == (2, "", "")
    monkeypatch.setattr(resume, "requested", lambda: False)
    now = iter(range(1000))
    monkeypatch.setattr(time, "time", lambda: next(now))
    code, _, err = cli(SFT, "--max_itr", "5")
    assert code == 2 and "--max_itr is not a config key" in err and next(now) > 10

def test_a_device_that_is_not_there_and_more_ranks_than_gpus_are_refused(fails, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")         # by every rank alike
    fails("this node has 1 GPUs for 2 ranks; lower --nproc_per_node to 1", SFT, "--device", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch, "empty",
                        lambda *args, device: (_ for _ in ()).throw(RuntimeError("No driver")))
    fails(r"--device cuda cannot be used \(No driver\); give another one", SFT, "--device", "cuda")

def test_under_torchrun_the_sentence_appears_once_and_soon(here):
    began = time.time()
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "train.py",
                  SFT, *TINY[:2], "--batch_size", "9")
    assert done.returncode == 1 and time.time() - began < 15
    sentence = "batch_size 9 is not divisible by 2 ranks x accum 1 = 2; nearest 8 or 10"
    assert (done.stdout + done.stderr).count(sentence) == 1
    assert done.stderr.count("Traceback") == 1          # torchrun's own report of a failed worker
    assert list(here.iterdir()) == []

def test_a_closed_terminal_is_a_request_to_stop_unless_nohup_says_otherwise():
    for before, asked in ("SIG_DFL", True), ("SIG_IGN", False):
        code = (f"import os, resume, signal; signal.signal(signal.SIGHUP, signal.{before}); resume.install();"
                "os.kill(os.getpid(), signal.SIGHUP); print(resume.requested())")
        assert python("-c", code, cwd=ROOT).stdout == f"{asked}\n"

def test_a_scheduler_without_its_program_only_warns_and_a_margin_that_is_no_number_is_refused(
        monkeypatch, capsys):
    for key, value in dict(SLURM_JOB_ID="77", FEWSTEP_REQUEUE="1", PATH="/nowhere").items():
        monkeypatch.setenv(key, value)
    slurm = resume.Slurm()
    slurm.init()
    slurm.request_resume()
    assert "scontrol cannot be run" in capsys.readouterr().out
    done = python("-c", "import resume", cwd=ROOT, env=dict(FEWSTEP_STOP_BEFORE_END_S="2m"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("FEWSTEP_STOP_BEFORE_END_S=2m is not a number of seconds")

# ---- help and dry run
def test_help_lists_every_key_with_a_comment_and_dry_run_marks_what_changed(cli, here, name):
    path = ROOT / "methods" / f"{name}.py"
    code, out, _ = cli(path, "--help")
    method = load(name)
    listed = [line.split()[0][2:] for line in out.splitlines() if line.startswith("  --")]
    assert code == 0 and not list(here.iterdir())
    assert sorted(listed) == sorted({**trainer.defaults, **method.config})      # each once
    blank = [line for line in out.splitlines() if re.fullmatch(r"  --\w+ +(\S+|\(.*\))\s*", line)]
    assert not blank, "keys without a comment:\n" + "\n".join(blank)
    given = ("--teacher", run.teacher("toy:tiny"), "--data", config(method)["data"])
    before = contents()
    code, out, err = cli(path, *TINY, *given, "--lr", "0.5", "--name=a=b c", "--dry_run")
    assert code == 0 and contents() == before, err
    for words in (f"* lr = 0.5   (default {method.config['lr']!r})\n", "\n  seed = 0\n", "student: ",
                  "* name = 'a=b c'", "outputs/fewstep/digits/a=b c",
                  "batch 8 = 8 per rank x accum 1 x 1 ranks", "GB for weights"):
        assert words in out

def test_no_arguments_print_the_usage_and_dry_run_what_a_preset_sets_also_without_its_data(cli):
    code, out, _ = cli()
    assert code == 2 and "torchrun train.py methods/dmd2.py" in out
    code, out, err = cli(DMD2, "--preset", "cifar10", "--dry_run")
    assert code == 2 and "* gan_features = 'teacher'" in out
    assert err.count("\n") == 1 and "cifar10-32x32.zip does not exist" in err

def test_a_reader_that_leaves_is_no_error_and_a_tool_does_nothing_that_was_not_asked():
    for option in "-h", "--dry_run":
        reader, writer = os.pipe()
        os.close(reader)
        done = python(ROOT / "train.py", SFT, "--net=toy:tiny", option, stdout=writer)
        os.close(writer)
        assert done.returncode == -signal.SIGPIPE and done.stderr == ""
    for tool, *args in ("make_digits.py",), ("bench.py", DMD2, "--dry_run"):
        done = python(ROOT / "tools" / tool, *args)
        assert done.returncode == 2 and "Traceback" not in done.stderr
