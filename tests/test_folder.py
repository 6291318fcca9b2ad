"""A run and its folder: whose it is, what is kept, what a bad end leaves, what a method file may return."""
import gc
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
import common
import files
import run
import startup
import trainer
from run import config, load, saved


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out" / "fewstep" / "tests"


def refused(method, cfg):
    with pytest.raises(common.BadInput) as error:
        trainer.train(method, dict(cfg))
    sentence = str(error.value)
    del error
    gc.collect()                                        # the traceback holds the lock of the folder
    return sentence if "\n" not in sentence else None


def around_step(around, name="sft"):
    """A method whose step(nets, batch, it, cfg) returns around(old step's values, nets, it)."""
    method = load(name)
    step = method.step
    method.step = lambda nets, batch, it, cfg: around(step(nets, batch, it, cfg), nets, it)
    return method


def test_pruning_keeps_what_was_just_written_beside_a_damaged_later_one():
    method = load("sft")
    cfg = config(method, max_iter=100, save_every=2)
    folder = run.run(method, cfg | dict(stop_at=6)).folder / "checkpoints"
    ckpt.path(folder, 6).write_bytes(ckpt.path(folder, 6).read_bytes()[:-100])
    run.run(method, cfg | dict(stop_at=5, keep_last=1))
    assert ckpt.scan(folder) == [5, 6]


def test_a_checkpoint_that_is_no_dict_or_was_renamed_is_passed_over(capsys):
    method = load("sft")
    cfg = config(method, max_iter=9)
    folder = run.run(method, cfg | dict(stop_at=2)).folder / "checkpoints"
    shutil.copy(ckpt.path(folder, 2), ckpt.path(folder, 900))
    torch.save([torch.zeros(3)], ckpt.path(folder, 901))
    assert [line["it"] for line in run.run(method, cfg | dict(stop_at=3)).lines] == [1, 2, 3]
    assert capsys.readouterr().out.count("falling back") == 2


def test_weights_that_are_not_finite_are_not_saved(outputs):
    method = around_step(lambda v, nets, it: (next(nets["student"].parameters()).data.fill_(torch.nan), v)[1])
    sentence = refused(method, config(method, max_iter=1))
    assert re.search(r"1 weights of student are not finite \(\w+\.", sentence)
    assert ckpt.scan(outputs / "sft" / "checkpoints") == []


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", [common.BadInput, RuntimeError, KeyError])
def test_what_is_done_is_saved_before_a_bad_end(outputs, kind, at):
    method = around_step(lambda values, nets, it: values if it != at else (_ for _ in ()).throw(kind("gone")))
    cfg = config(method, max_iter=6)
    with pytest.raises(kind, match="gone"):
        trainer.train(method, dict(cfg))
    gc.collect()
    assert ckpt.scan(outputs / "sft" / "checkpoints") == ([at] if at else [])   # a method is being written
    states = [saved(run.run(load("sft"), cfg | dict(name=name)).folder, 6) for name in ("sft", "straight")]
    assert run.differing(*(state["nets"] for state in states)) == []


def test_a_picture_that_cannot_be_written_is_a_warning_after_the_save(outputs, capsys):
    samples = outputs / "sft" / "samples"
    method = around_step(lambda values, nets, it: (shutil.rmtree(samples, True), values)[1])
    run.run(method, config(method, max_iter=2, sample_every=1, save_every=1))
    assert ckpt.scan(outputs / "sft" / "checkpoints") == [1, 2]
    assert capsys.readouterr().out.count("WARNING: could not write") == 2


def test_a_full_disk_is_called_so(monkeypatch):
    monkeypatch.setattr(files, "open", lambda *_: open("/dev/full", "wb"), raising=False)
    with pytest.raises(common.BadInput, match="No space left on device.*free some space"):
        ckpt.save(Path("x.pth"), dict(a=torch.zeros(10 ** 5)))


def test_a_folder_of_another_method_is_refused_whatever_its_config_says(monkeypatch):
    sft, dmd2 = load("sft"), load("dmd2")
    folder = run.run(sft, config(sft, max_iter=1, name="one")).folder
    for text in "", "[]", '{"method": "sft"}':
        (folder / "method.py").unlink(missing_ok=True)
        (folder / "config.json").write_text(text)
        assert f"{folder} is a run of sft, not of dmd2" in refused(dmd2, config(dmd2, name="one"))
    (folder / "config.json").unlink()
    assert run.run(sft, config(sft, max_iter=2, name="one")).lines[-1]["it"] == 2
    lock = startup.take_lock                            # filled by another method while this run waits for it
    monkeypatch.setattr(startup, "take_lock", lambda here, *rest: (
        shutil.copytree(folder, here, dirs_exist_ok=True), lock(here, *rest))[1])
    assert "two is a run of sft, not of dmd2" in refused(dmd2, config(dmd2, name="two"))


def test_the_folder_keeps_the_file_that_ran(tmp_path):
    source, mine = load("sft").path.read_bytes(), shutil.copy(load("sft").path, tmp_path / "mine.py")
    method = run.train.load_method(mine)
    mine.write_text("later")
    for n in 1, 2:
        assert (run.run(method, config(method, max_iter=n)).folder / "method.py").read_bytes() == source


def test_other_data_are_refused_unless_forced(tmp_path, capsys):
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 1), np.uint8)
    for folder, x in ("a", images), ("b", images), ("c", images[::-1]):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "set.npz", image=x)
    method = load("sft")
    run.run(method, config(method, max_iter=1, data="a/set.npz"))
    run.run(method, config(method, max_iter=2, data="b/set.npz"))      # moved
    other = config(method, max_iter=3, data="c/set.npz")
    assert re.search(r"--data c/set.npz is not the data \S+ began with, b/set.npz .* --resume force",
                     refused(method, other))
    assert "score it" not in capsys.readouterr().out    # evaluate.py knows the digits only
    run.run(method, other | dict(resume="force"))


def test_a_source_of_equal_size_and_other_content_is_refused(tmp_path):
    method, file = load("dmd2"), tmp_path / "teacher.pth"
    whole = torch.load(config(method)["teacher"], weights_only=True)
    torch.save({k: v + 0 for k, v in whole.items()}, file)
    size, cfg = file.stat().st_size, config(method, teacher=str(file), max_iter=2)
    run.run(method, cfg | dict(stop_at=1))
    torch.save({k: v + 1 for k, v in whole.items()}, file)
    assert file.stat().st_size == size and "is not the file it was" in refused(method, cfg)


def test_pictures_of_a_start_that_was_lost_are_drawn_again(outputs):
    samples, method = outputs / "sft" / "samples", load("sft")
    samples.mkdir(parents=True)
    list(map(Path.touch, [samples / f"{name}.png" for name in ("0000000", "0000007", "0000007_ema_1")]))
    run.run(method, config(method, max_iter=1, sample_every=1))
    assert sorted(os.listdir(samples)) == ["0000000.png", "0000001.png", "0000007_ema_1.png"]
    assert (samples / "0000000.png").read_bytes() != b""


def test_skipped_updates_are_counted_by_phase(capsys):
    method = around_step(lambda values, nets, it: (values[0] * (torch.nan if it % 2 else 1), {}), "dmd2")
    cfg = config(method, max_iter=20, max_skipped=3, update_ratio=1)    # the student has the odd turns
    assert "not finite 3 times in a row, last at it 5, phase 'student'" in refused(method, cfg)
    assert "not finite 4 times in a row, last at it 7" in refused(method, cfg)
    folder = run.run(method, cfg | dict(name="a few", max_iter=2)).folder
    assert re.search(f"WARNING: no update of phase 'student' was applied\n(.*\n)*score it: .* '{folder}'",
                     capsys.readouterr().out)


@pytest.mark.parametrize("function, value, words", [
    ("build", torch.nn.Linear(1, 1), r"build\(\) returned Linear; it must return \{name: torch.nn.Module\}"),
    ("build", None, r"build\(\) returned NoneType"), ("build", dict(student=3), r"returned 'student': int"),
    ("init", None, r"init\(\) returned NoneType"), ("init", dict(student=3), "returned 'student': int"),
    ("init", dict(studnet="x"), r"init\(\) 'studnet' is not known; did you mean student\?"),
    ("optimizers", [1], r"optimizers\(\) returned list"), ("step", None, r"step\(\) returned NoneType"),
    ("step", torch.ones(()), r"step\(\) returned Tensor"), ("step", (0.5, {}), "returned a loss that"),
    ("step", dict(loss=1.0), r"step\(\) returned dict"),
    ("step", (torch.ones(2), {}), r"returned 'loss': torch.Size\(\[2\]\)"),
    ("step", (torch.ones(()), dict(a=torch.ones(3))), r"returned 'a': torch.Size\(\[3\]\)"),
    ("step", (torch.ones(()), dict(a="x")), "returned 'a': str"),
])
def test_what_a_method_file_returns_is_named_if_it_does_not_fit(function, value, words):
    method = load("sft")
    setattr(method, function, lambda *args: value)
    with pytest.raises(common.BadInput, match=words):
        trainer.train(method, config(method, max_iter=3))


@pytest.mark.parametrize("changes, words", [
    (dict(lr="fast"), "lr = 'fast' in the method file is not of the type of 0.0001"),
    (dict(max_iter="12"), "max_iter = '12'"), (dict(batch_size=8.5), "8.5"), (dict(steps=True), "= True"),
    (dict(ema="ema:0.9"), "ema = 'ema:0.9'"), (dict(lr=float("nan")), "--lr nan is not a number"),
    (dict(betas=(0.9, float("nan"))), "--betas .* is not a number"), (dict(lr=1e300), "--lr 1e.300 is more"),
    (dict(classes=-5), "--classes -5 must be at least -1"), (dict(steps=10 ** 20), "is more than"),
    (dict(workers=1000), "--workers 1000 is more than 256$"), (dict(augment=2.0), "2.0 is more than 1$"),
    (dict(max_iter=-1), "--max_iter -1 must not be negative$"), (dict(weight_decay=-1.0), "not be negative"),
    (dict(lr_fake=-1.0), "--lr_fake -1.0 must not"), (dict(gan_weight=-1.0), "--gan_weight -1.0 must not"),
    (dict(teacher="text.md"), "text.md cannot be read as weights"), (dict(teacher=""), "'' does not exist"),
    (dict(teacher="#ema"), "'#ema' does not exist"), (dict(teacher="x" * 300), "does not exist"),
    (dict(teacher="list.pth"), "list.pth holds a list"), (dict(teacher="mix.pth#epoch"), "no entry epoch"),
    (dict(teacher="int.pth"), "int.pth.* tensors by name"), (dict(teacher="mix.pth#more"), "by name"),
    (dict(teacher="bad.safetensors"), "bad.safetensors cannot be"), (dict(val_data="nowhere"), "nowhere"),
    (dict(val_data="big.npz"), "--val_data big.npz has samples of shape"),
    (dict(gan_weight=0.0, val_settings=("gan_weight=1",)), "--val_settings gan_weight=1 changes nets"),
    (dict(val_settings=("t_dist=foo",)), "foo"), (dict(val_settings=("batch_size=4",)), "=4 changes nets"),
    (dict(val_settings=("update_ratio=0",)), "least 1"), (dict(val_settings=("update_ratio=2",)), "=2 cha"),
    (dict(val_settings=("lr_fake=5",)), "changes nets, optimizers"),
    (dict(max_iter=3000), r"phase 'other' \(it 1500\) has no optimizer"),
])
def test_bad_input_is_found_before_work(outputs, tmp_path, changes, words):
    for name in "text.md", "bad.safetensors":
        (tmp_path / name).touch()
    for name, content in ("list", [1]), ("mix", dict(epoch=3, more=dict(a=1))), ("int", {0: torch.ones(2)}):
        torch.save(content, tmp_path / f"{name}.pth")
    np.savez(tmp_path / "big.npz", image=np.zeros((4, 16, 16, 1), np.uint8), y=range(4))
    method = load("dmd2")
    cfg, phase = config(method, val_every=5) | changes, method.phase
    method.phase = lambda it, cfg: "other" if it == 1500 else phase(it, cfg)
    assert re.search(words, refused(method, cfg)) and not outputs.exists()


def rank_logs_more():
    method = around_step(lambda values, nets, it: (values[0], {f"extra{os.environ['RANK']}": 1.0}))
    return refused(method, config(method, max_iter=2))


def test_ranks_that_log_different_keys_are_told_so():
    assert all("step() logs extra0, extra1 on some ranks only" in s for s in run.ranks(2, rank_logs_more))
