"""Wrong input ends with one sentence on stderr, exit code 2 and nothing created, before any work."""
import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ckpt
import resume
import train
import trainer
from run import DMD2, SFT, its, lines

TINY = ("--net", "toy:tiny", "--batch_size", "8", "--val_every", "0", "--sample_every", "0",
        "--log_every", "1", "--wandb", "disabled", "--device", "cpu", "--workers", "0")
CUDA = [a if a != "cpu" else "cuda" for a in TINY]

@pytest.fixture(autouse=True)
def here(outputs, tmp_path, monkeypatch):
    """An empty working directory for each test; output goes to outputs/ below it. No test ends pytest."""
    def leave(code):
        raise SystemExit(code)
    monkeypatch.chdir(tmp_path)
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(os, "_exit", leave)
    return tmp_path

@pytest.fixture
def run(capsys):
    """run(method, *args) -> (exit code, stdout, stderr) of `python train.py method args`, in this process."""
    def run(method, *args):
        code = 0
        try:
            train.main([str(method), *map(str, args)])
        except SystemExit as e:
            code = e.code
        return code, *capsys.readouterr()
    return run

@pytest.fixture
def refused(run):
    """refused(method, *args) -> the one sentence of a refusal, which leaves the directory as it was."""
    def refused(method, *args):
        before = sorted(Path.cwd().rglob("*"))
        code, _, err = run(method, "--stop_at=3", *args)        # where it is accepted it does not run on
        assert code == 2, (code, err)
        assert sorted(Path.cwd().rglob("*")) == before
        sentence = err.strip()
        assert sentence and "\n" not in sentence and "Traceback" not in sentence
        return sentence.partition(": ")[2]
    return refused

def files(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

def write_method(folder, text=""):
    """A copy of sft.py whose functions are followed (so replaced) by `text`."""
    (folder / "mine.py").write_text(SFT.read_text() + "\n\n" + text)
    return folder / "mine.py"

# ---- the command line
@pytest.mark.parametrize("args, words", [
    ("--max_itr 5", "--max_itr is not a config key of .*; did you mean --max_iter?"),
    ("--dryrun", "did you mean --dry_run?"),
    ("--zzz 1", "--zzz is not a config key of .*; --help lists them"),
    ("--lr 1 --lr=2", "--lr is given twice"),
    ("--preset cifar10 --preset cifar10", "--preset is given twice"),
    ("--lr", "--lr needs a value"),
    ("--name --dry_run", "--name needs a value"),
    ("lr 1", "'lr' is not an option; write --key value"),
    ("--preset cifar", "no preset 'cifar'; it has .*cifar10"),
    ("--ema ema,ema:0.5", "names an average twice"),
    ("--ema average", "'average' is not NAME.* beginning with ema"),
    ("--ema ema:1.5", "0 <= RATE < 1"),
    ("--max_iter 10000000", "10000000 is more than 9999999"),
    ("--seed -1", "--seed -1 must not be negative"),
    ("--lr -1e-3", "--lr -0.001 must not be negative"),
    ("--accum 0", "--accum 0 must be at least 1"),
    ("--batch_size 10 --accum 4", "10 is not divisible by 1 ranks x accum 4 = 4; nearest 8 or 12"),
    ("--batch_size 3 --accum 4", "= 4; nearest 4$"),
    ("--amp bf17", "--amp 'bf17' is not known; choose from '', 'bf16', 'fp16'"),
    ("--resume yes", "--resume 'yes' is not known; choose from 'auto', 'force', ''"),
    ("--lr_schedule cosin", "cosin.*cosine"),
    ("--device gpu", "--device 'gpu' is not known; choose from '', 'cuda', 'mps', 'cpu'"),
    ("--name a/b", "--name 'a/b' cannot be the name of a folder"),
    ("--group ..", "--group '..' cannot be the name of a folder"),
    ("--data nowhere.zip", "--data nowhere.zip does not exist"),
    ("--net edn:digits", "edn.*edm"),
    ("--net edm:cifar10", r"samples of shape \(1, 8, 8\), --net edm:cifar10 takes \(3, 32, 32\)"),
    ("--val_settings guidence=2", "--val_settings names 'guidence'"),
    ("--val_settings guidance=two", "'two' does not fit"),
])
def test_a_mistake_on_the_command_line_is_one_sentence(refused, args, words):
    args = args.split()
    given = [a for pair in zip(TINY[::2], TINY[1::2]) if pair[0] not in args for a in pair]
    assert re.search(words, refused(SFT, *given, *args)), words

@pytest.mark.parametrize("default, values", [
    (0.1, {"1e-4": 1e-4, "1E-4": 1e-4, ".5": 0.5, "-1": -1.0, "-1e-3": -1e-3, "3": 3.0}),
    (1, {"1e4": 10000, "10e2": 1000, "1_000": 1000, "-1": -1, "4.0": 4,
         "9007199254740993": 9007199254740993}),                    # above 2 ** 53: not by way of a float
    (False, {"True": True, "true": True, "1": True}), (True, {"False": False, "0": False}),
    ("x", {text: text for text in ("None", "1e-4", "", "b=c", "my run")}),
    ((), {"0.999,0.75,0": (0.999, 0.75, 0), "[0.999,0.75,0]": (0.999, 0.75, 0), "(1, 2)": (1, 2),
          "": (), "[]": (), "a,b": ("a", "b")}),
    ((0.9, 0.999), {"0,0.99": (0, 0.99)}), (("a",), {"('a', 'b')": ("a", "b")}),
    (("ema",), {"0.9": ("0.9",), "ema:0.999,ema_long": ("ema:0.999", "ema_long")}),
])
def test_the_type_of_the_default_decides_what_a_value_means(default, values):
    typed = lambda value: [(type(v), v) for v in (value, *(value if isinstance(value, tuple) else ()))]
    for text, value in values.items():
        assert typed(train.parse("key", text, default, "here")) == typed(value)

@pytest.mark.parametrize("key, texts, kind", [
    ("lr", ("fast", "inf", "nan", "", "None", "1e-4x", "1,5"), "a number"),
    ("max_iter", ("3.5", "None", "inf", "true"), "a whole number"),
    ("xflip", ("yes", "2", ""), "true, false"), ("betas", ("0.9,high", "(0.9", "((1, 2),)"), "a list a,b"),
])
def test_a_value_of_the_wrong_type_is_refused(refused, key, texts, kind):
    for text in texts:
        sentence = refused(SFT, f"--{key}={text}")
        assert sentence.startswith(f"--{key} {text!r} does not fit") and kind in sentence.split("give ")[1]

def test_authority_is_defaults_then_method_then_preset_then_command_line(here):
    small = "presets = dict(small=dict(lr=3, warmup=7, seed=5), "
    (here / "mine.py").write_text(SFT.read_text().replace("presets = dict(", small))
    method = train.load_method(here / "mine.py")
    cfg, changed, options = train.resolve(method, ["--warmup", "9", "--preset", "small"])
    assert (cfg["seed"], cfg["lr"], cfg["warmup"], cfg["steps"]) == (5, 3.0, 9, 18)
    assert type(cfg["lr"]) is float and cfg["clip"] == trainer.defaults["clip"]
    assert (cfg["name"], cfg["group"]) == ("mine_small", "digits")
    assert changed.keys() == {"seed", "lr", "warmup", "name", "group"} and options == {"preset": "small"}

# ---- method files
def test_a_method_file_that_is_missing_or_incomplete_or_has_bad_presets_is_refused(refused, here):
    assert "nosuch.py does not exist; there are" in refused("nosuch.py")
    path, text = here / "mine.py", SFT.read_text()
    for content, words, *args in (
            ("config = dict(\ndef build(cfg): pass\n", "mine.py line"),
            (text.replace("def step(", "def stepp(").replace("def init(", "def ini("),
             "mine.py lacks init, step; a method file has config, build,"),
            (text.replace("betas=(0.9, 0.999)", "betas=[0.9, 0.999]"), "config['betas'] is a list; use int,"),
            (text + "\npresets = dict(a=dict(lrate=1.0))\n",
             "--lrate is not a config key of mine.py (preset a); did you mean --", "--preset", "a"),
            (text + "\npresets = dict(b=dict(warmup=0.5))\n", "preset b has warmup = 0.5", "--preset", "b")):
        path.write_text(content)
        assert words in refused(path, *args)

@pytest.mark.parametrize("text, words", [
    ("def phase(it, cfg): return 'fake' if it == 3 else 'student'",
     r"phase 'fake' \(it 3\) has no optimizer"),
    ("def optimizers(nets, cfg):\n    *most, last = nets['student'].parameters()\n"
     "    return dict(student=common.optimizer(most))",
     r"parameter student\.\S+ is trainable and in 0 optimizers"),
    ("def optimizers(nets, cfg):\n    ps = list(nets['student'].parameters())\n"
     "    return dict(student=common.optimizer(ps), fake=common.optimizer(ps[:1]))",
     r"parameter student\.\S+ is trainable and in 2 optimizers"),
    ("old_build = build\ndef build(cfg):\n    nets = old_build(cfg)\n"
     "    next(nets['student'].parameters()).requires_grad_(False)\n    return nets",
     r"parameter student\.\S+ is frozen and in 1 optimizers"),
    ("old_optimizers = optimizers\ndef optimizers(nets, cfg):\n"
     "    own = [torch.nn.Parameter(torch.ones(2))]\n"
     "    return old_optimizers(nets, cfg) | dict(fake=common.optimizer(own))",
     "optimizers.. holds 1 parameters of no net"),
    ("old_build = build\ndef build(cfg): return dict(generator=old_build(cfg)['student'])",
     "build.. returns generator; the net that samples is named student"),
])
def test_a_method_whose_optimizers_or_nets_break_the_contract_is_refused(refused, here, text, words):
    assert re.search(words, refused(write_method(here, text), *TINY))

def test_a_loss_that_depends_on_no_parameter_is_named(run, here):
    path = write_method(here, "def step(nets, batch, it, cfg):\n    return torch.ones(()), {}")
    code, _, err = run(path, *TINY, "--max_iter", "2")
    assert code == 2 and err.count("\n") == 1
    assert "step() at it 0 (phase 'student') returned a loss that" in err

# ---- files and folders
def test_a_missing_teacher_names_the_command_that_makes_one(refused):
    sentence = refused(DMD2, *TINY, "--teacher", "nowhere.pth")
    assert "nowhere.pth does not exist; make one with `torchrun train.py methods/sft.py --net toy" in sentence
    assert "--teacher PATH[#ENTRY]" in sentence
    Path("empty").mkdir()
    assert "empty holds no checkpoints; make one with" in refused(DMD2, *TINY, "--teacher", "empty")

def test_an_output_folder_that_cannot_be_written_is_named(refused, here, monkeypatch):
    (here / "file").touch()
    for root in (here / "file" / "below", "/proc/nowhere"):
        monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", str(root))
        sentence = refused(SFT, *TINY)
        assert f"output folder {root}/fewstep/digits/sft is not writable" in sentence
        assert "set FEWSTEP_OUTPUT_ROOT" in sentence

def test_a_folder_of_another_run_is_refused_and_the_ways_on_work(run, refused, here):
    """One folder with a checkpoint meets another method, a changed method file, --resume "" and a net of
    another size."""
    mine, folder = write_method(here), here / "outputs" / "fewstep" / "digits" / "run"
    command = (*TINY, "--name", "run", "--save_every", "2")
    assert run(mine, *command, "--max_iter", "2")[0] == 0
    assert ckpt.scan(folder / "checkpoints") == [2]
    assert "is a run of mine, not of sft; use --name NEW" in refused(SFT, *command)
    assert re.search("holds checkpoints.*(--name NEW.*--resume auto|--resume auto.*--name NEW)",
                     refused(mine, *command, "--resume", ""))
    wider = [a.replace("toy:tiny", "toy:tiny,dim=48") for a in command]
    before = files(folder)
    assert re.search("weights of student .* do not fit the net: .*misshapen", refused(mine, *wider))
    assert files(folder) == before
    mine.write_text(mine.read_text() + "\n# changed\n")
    assert re.search("has changed since.*(--name NEW.*--resume force|--resume force.*--name NEW)",
                     refused(mine, *command, "--max_iter", "4"))
    code, out, _ = run(mine, *command, "--max_iter", "4", "--resume", "force")
    assert code == 0 and "continuing at iteration 2" in out and ckpt.scan(folder / "checkpoints") == [2, 4]
    assert (folder / "method.py").read_bytes() == mine.read_bytes()
    code, out, _ = run(mine, *command, "--max_iter", "5", "--log_level", "warning")
    assert code == 0 and "config differs from the checkpoint: max_iter was 4, now 5" in out

def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(run, refused, here):
    command = (SFT, *TINY, "--save_every", "2", "--log_level", "warning", "--max_iter", "6")
    folder = here / "outputs" / "fewstep" / "digits" / "sft"
    assert run(*command)[0] == 0
    file = ckpt.path(folder / "checkpoints", 6)
    student = torch.load(file)["nets"]["student"]
    file.write_bytes(file.read_bytes()[:-100])
    code, out, err = run(*command)
    assert code == 0, err
    assert re.search(r"WARNING: \S+0000006\.pth cannot be read .*falling back", out)
    again = torch.load(file)["nets"]["student"]                     # repeated from 4, to the same weights
    assert all(torch.equal(a, student[k]) for k, a in again.items())
    assert its(lines(folder)) == [1, 2, 3, 4, 5, 6]
    data = bytearray(file.read_bytes())     # one flipped byte of a weight: the archive still opens
    data[data.find(again["out.weight"].numpy().tobytes()[:64])] ^= 1
    file.write_bytes(data)
    assert "0000006.pth is damaged (wrong checksum" in run(*command)[1]
    for n in ckpt.scan(folder / "checkpoints"):
        ckpt.path(folder / "checkpoints", n).write_bytes(b"")
    assert f"no checkpoint in {folder} can be read" in refused(*command)

def test_a_finished_run_says_so_and_changes_nothing(run, here):
    assert run(SFT, *TINY, "--max_iter", "3")[0] == 0
    before = files(here)
    for extra in (("--max_iter", "3"), ("--max_iter", "2"), ("--stop_at", "2")):
        code, out, _ = run(SFT, *TINY, *extra)
        assert code == 0 and "nothing to do" in out and "has done 3 iterations" in out
        assert files(here) == before

def test_a_mistake_that_only_another_rank_sees_is_said_after_all(run, monkeypatch):
    """Rank 1 keeps quiet while torchrun ends it on rank 0's account, and speaks when nobody does."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(resume, "requested", lambda: True)
    assert run(SFT, "--max_itr", "5") == (2, "", "")
    monkeypatch.setattr(resume, "requested", lambda: False)
    now = iter(range(1000))
    monkeypatch.setattr(time, "time", lambda: next(now))
    code, _, err = run(SFT, "--max_itr", "5")
    assert code == 2 and "--max_itr is not a config key" in err and next(now) > 10

def test_a_device_that_is_not_there_and_more_ranks_than_gpus_are_refused(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")         # by every rank alike
    assert "this node has 1 GPUs for 2 ranks; lower --nproc_per_node to 1" in refused(SFT, *CUDA)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch, "empty",
                        lambda *args, device: (_ for _ in ()).throw(RuntimeError("No driver")))
    assert "--device cuda cannot be used (No driver); give another one" in refused(SFT, *CUDA)

def test_two_runs_in_one_folder_are_refused(run, refused, here, monkeypatch):
    assert run(SFT, *TINY, "--max_iter", "1")[0] == 0
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with open(here / "outputs" / "fewstep" / "digits" / "sft" / ".lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "is in use by another run" in refused(SFT, *TINY, "--max_iter", "2")
    assert run(SFT, *TINY, "--max_iter", "2")[0] == 0

# ---- help and dry run
def test_help_lists_every_key_with_a_comment_and_dry_run_marks_what_changed(run, here, name):
    path = trainer.ROOT / "methods" / f"{name}.py"
    code, out, _ = run(path, "--help")
    config = train.load_method(path).config
    listed = [line.split()[0][2:] for line in out.splitlines() if line.startswith("  --")]
    assert code == 0 and not list(here.iterdir())
    assert sorted(listed) == sorted({**trainer.defaults, **config})             # each once
    blank = [line for line in out.splitlines() if re.fullmatch(r"  --\w+ +(\S+|\(.*\))\s*", line)]
    assert not blank, "keys without a comment:\n" + "\n".join(blank)
    assert run(SFT, *TINY, "--max_iter", "1", "--name", "teacher")[0] == 0
    before = sorted(here.rglob("*"))
    teacher = ("--teacher", "outputs/fewstep/digits/teacher")
    code, out, err = run(path, *TINY, *teacher, "--lr", "0.5", "--name=a=b c", "--dry_run")
    assert code == 0, err
    assert sorted(here.rglob("*")) == before
    for words in (f"* lr = 0.5   (default {config['lr']!r})\n", "\n  seed = 0\n", "student: ",
                  "* name = 'a=b c'", "outputs/fewstep/digits/a=b c",
                  "batch 8 = 8 per rank x accum 1 x 1 ranks", "GB for weights"):
        assert words in out

def test_no_arguments_print_the_usage(capsys):
    with pytest.raises(SystemExit) as leave:
        train.main([])
    assert leave.value.code == 2 and "torchrun train.py methods/dmd2.py" in capsys.readouterr().out

def test_under_torchrun_the_sentence_appears_once_and_soon(here):
    began, env = time.time(), os.environ | dict(OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               trainer.ROOT / "train.py", SFT, *TINY[:2], "--batch_size", "9"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and time.time() - began < 15
    assert said.count("batch_size 9 is not divisible by 2 ranks x accum 1 = 2; nearest 8 or 10") == 1
    assert done.stderr.count("Traceback") == 1          # torchrun's own report of a failed worker
    assert list(here.iterdir()) == []
