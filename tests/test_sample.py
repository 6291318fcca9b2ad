"""sample.py, on runs of two iterations of the toy net."""
import os
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ckpt
import fill
import sample
import trainer
from run import refused, saved, spy

def drawn(run, name, ids, steps, batch):
    net, labels = sample.load_net(run, name, torch.device("cpu")), torch.tensor([i % 10 for i in ids])
    parts = sample.draw(run, net, name, ids, labels, steps, 0, batch, torch.device("cpu"))
    return torch.cat([x0 for _, _, x0 in parts])

def pixels(file):
    with Image.open(file) as picture:
        return np.array(picture), picture.text

@pytest.mark.parametrize("name", ["sft", "dmd2"])
def test_by_default_the_samples_are_those_of_the_trainers_grid(runs, name, capsys):
    sample.main([str(runs / name), "--batch", "13"])
    file = Path(capsys.readouterr().out.split(":")[0])
    (ours, text), (trainers, _) = pixels(file), pixels(runs / name / "samples/0000002.png")
    assert np.array_equal(ours, trainers)
    assert (text["run"], text["checkpoint"], text["seed"]) == (name, "2", "0-79")

@pytest.mark.parametrize("name, steps", [("student", 1), ("teacher", 6)])
def test_a_sample_depends_on_seed_and_class_alone_not_on_batch_or_order(runs, name, steps):
    run, ids = sample.load_run(runs / "dmd2"), list(range(40))
    whole = drawn(run, name, ids, steps, 64)
    torch.testing.assert_close(drawn(run, name, ids, steps, 7), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(drawn(run, name, ids[::-1], steps, 9).flip(0), whole, rtol=0, atol=1e-5)
    assert whole[0].sub(whole[10]).abs().max() > 1e-2                   # same class, another seed

def test_separate_files_are_the_samples_of_the_sheet_and_say_what_they_are(runs, tmp_path):
    args = [str(runs / "dmd2"), "--net", "ema", "--classes", "3,7", "--seeds", "0-2,11", "--out"]
    sample.main([*args, str(tmp_path / "all")])
    sample.main([*args, str(tmp_path / "sheet.png")])
    sheet, text = pixels(tmp_path / "sheet.png")
    assert text["class"] == "3,7,3,7" and len(os.listdir(tmp_path / "all")) == 4
    for place, seed in enumerate((0, 1, 2, 11)):                # enlarged 8 times, 2 columns, 1 pixel gaps
        one, text = pixels(tmp_path / "all" / f"{seed:07d}.png")
        y, x = place // 2 * 9 + 1, place % 2 * 9 + 1
        assert np.array_equal(sheet[::8, ::8][y:y + 8, x:x + 8], one)
        assert text == {"run": "dmd2", "method": "dmd2", "checkpoint": "2", "net": "ema_slow", "steps": "1",
                        "guidance": "1.0", "seed": str(seed), "class": "37"[seed % 2]}

def test_only_the_wanted_net_is_made_and_no_source_is_read_for_a_student(runs, monkeypatch):
    made, read = spy(monkeypatch, fill, "draw"), spy(monkeypatch, ckpt, "read")
    run = sample.load_run(runs / "dmd2")
    assert list(run.names) == ["ema_slow", "student", "teacher", "fake_score"]
    student, average = (sample.load_net(run, n, "cpu").state_dict() for n in ("student", "ema_slow"))
    assert [args[2] for args, _ in made] == ["student", "student"] and read == []
    assert all(torch.equal(v, run.state["nets"]["student"][k]) for k, v in student.items())
    assert all(torch.equal(v, run.state["emas"]["ema_slow"][k]) for k, v in average.items())
    assert not all(torch.equal(student[k], average[k]) for k in student)
    assert all(p.is_meta for net in run.nets.values() for p in net.parameters())
    teacher, origin = sample.load_net(run, "teacher", "cpu").state_dict(), saved(runs / "sft", 2)
    assert [args[2] for args, _ in made[2:]] == ["teacher"] and len(read) == 1
    assert all(torch.equal(v, origin["nets"]["student"][k]) for k, v in teacher.items())

def test_frozen_parts_of_a_student_and_its_average_come_from_its_source(runs):
    run, origin = sample.load_run(runs / "parts"), saved(runs / "sft", 2)["nets"]["student"]
    for name, kept in (("student", run.state["nets"]["student"]), ("ema", run.state["emas"]["ema"])):
        assert "patch.weight" not in kept
        for k, v in sample.load_net(run, name, "cpu").state_dict().items():
            assert torch.equal(v, origin[k] if k.startswith("patch.") else kept[k])

def test_guidance_reaches_the_sampler_and_is_refused_where_it_changes_nothing(runs):
    x0 = {g: drawn(sample.load_run(runs / "parts", guidance=g), "ema", [0], 4, 1) for g in (None, 1.0, 2.0)}
    assert torch.equal(x0[None], x0[2.0]) and not torch.equal(x0[1.0], x0[2.0])
    drawn(sample.load_run(runs / "dmd2", guidance=2.0), "teacher", [0], 2, 1)
    says = ["--guidance 2 changes nothing for ema_slow"]
    refused(sample.main, [str(runs / "dmd2"), "--guidance", "2"], says=says)

@pytest.mark.parametrize("run, args, words", [
    ("nothing", "", ["nothing holds no checkpoints; give a run folder"]),
    ("dmd2", "--ckpt 7", ["no checkpoint 7; the nearest is 2, the newest 2"]),
    ("dmd2", "--net techer", ["--net techer is not in", "; it has ema_slow, student, teacher, fake_score"]),
    ("dmd2", "--steps 3", ["trained for 1 steps, not for --steps 3"]),
    ("dmd2", "--steps 0", ["--steps 0 ", "must be at least 1"]),
    ("dmd2", "--seeds 5-", ["--seeds '5-' is not a list"]),
    ("dmd2", "--seeds 9-3", ["--seeds '9-3' is not a list"]),
    ("dmd2", "--seeds 10000000", ["--seeds 10000000 is out of range; numbers go from 0 to 9999999"]),
    ("dmd2", "--classes 10", ["--classes 10 is out of range; numbers go from 0 to 9"]),
    ("dmd2", "--out {}/config.json/there", ["config.json/there cannot be written to"]),
])
def test_bad_input_is_one_sentence(runs, run, args, words):
    refused(sample.main, [str(runs / run), *args.format(runs / run).split()], says=words)

def test_a_vanished_teacher_exits_with_2_but_the_student_samples(runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs / "dmd2", tmp_path / "run")
    state = saved(tmp_path / "run", 2)
    next(iter(state["sources"].values()))["file"] = str(tmp_path / "gone.pth")
    torch.save(state, ckpt.path(tmp_path / "run/checkpoints", 2))
    sample.main([str(tmp_path / "run")])
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", ["sample.py", str(tmp_path / "run"), "--net", "teacher"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(trainer.ROOT / "sample.py"), run_name="__main__")
    assert end.value.code == 2 and "gone.pth is gone since this run began" in capsys.readouterr().err
