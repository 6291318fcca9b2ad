"""tools/bench.py, table.py and gpu_check.py: what they list. Speed is not tested, and GPUs only rehearsed."""
import re

import pytest
import torch

import run
from tools import bench, gpu_check
from tools import table as results_table

MARKS = {"*": "backward", "!": "input gradient", "~": "-mode", ".": "to a tap"}

@pytest.mark.parametrize("name, changes, student, fake", [      # nets called, in either phase
    ("cm", dict(distill=False, guidance=1.0), "student* student", ""),
    ("cm", {}, "student* student teacher teacher teacher teacher", ""),
    ("tcm", {}, "student* student stage1", ""), ("tcm", dict(stage1=""), "student* student", ""),
    ("sft", {}, "student*", ""), ("kd", dict(steps=2), "student*", ""),
    ("scm", dict(guidance=2.0), "student* student~ teacher teacher", ""),
    ("scm", dict(jvp="fused", distill=False), "student*~", ""),
    ("scm", dict(jvp="difference"), "student* student student teacher", ""),
    ("mean_flow", dict(guidance=1.0), "student* student~ teacher", ""),
    ("mean_flow", dict(distill=False, kappa=0.5), "student* student~ student student", ""),
    ("f_distill", {}, "student* fake teacher fake!. D! D", "student fake* fake*. D* D*"),
    ("ladd", {}, "student* teacher!. D!", "student teacher. teacher. teacher. D* D* D*"),
    ("dmd2", dict(gan_weight=0.0, guidance=2.0), "student* fake teacher teacher", "student fake*"),
    ("dmd2", {}, "student* fake teacher fake!. D!", "student fake* fake*. D* D*"),
    ("dmd2", dict(r1_weight=1.0, steps=2, student_input="data"), "student* fake teacher fake!. D!",
     "student fake* fake*. fake*. D* D* D*"),
    ("dmd2", dict(gan_features="teacher", r1_weight=1.0, guidance=0.0), "student* fake teacher teacher!. D!",
     "student fake* teacher. teacher. teacher. D* D* D*")], ids=str)
def test_a_step_makes_the_calls_that_it_must_and_bench_makes_the_same(name, changes, student, fake):
    method, cfg = run.setup(name, **changes)
    nets, batch = run.nets_of(method, cfg), run.batch_of(cfg)
    opts, calls = method.optimizers(nets, cfg), bench.Calls(nets)
    for phase, it in run.phases(method, cfg).items():
        run.turn(nets, opts, phase)
        calls.take()
        method.step(nets, batch, it, cfg)[0].backward()
        with_grad, seen, made = {*run.gradients(nets)}, sorted(map(repr, calls.seen)), []
        run.turn(nets, opts, phase)
        for text, functions in calls.take().items():
            net, marks = text.split()[0], "".join(mark for mark, word in MARKS.items() if word in text)
            made += [dict(fake_score="fake", discriminator="D").get(net, net) + marks] * len(functions)
            for f in functions:
                f()
        assert sorted(made) == sorted(dict(student=student, fake=fake)[phase].split()), " ".join(made)
        assert sorted(map(repr, calls.seen)) == seen and {*run.gradients(nets)} == with_grad

def test_the_table_lists_every_pass_every_part_and_their_ratio_with_one_sync(capsys):
    words = "--net toy:tiny --batch_size 4 --blocks 2 --iters 2 --optimizer radam"  # it reads its counters
    bench.main([str(run.DMD2), *words.split()])
    heads, *tables = re.split(r"(\w+: \d+ device sync)", capsys.readouterr().out)
    assert tables[::2] == ["fake: 1 device sync", "student: 1 device sync"]
    for text, passes in zip(tables[1::2], (5, 6)):
        names, values = zip(*re.findall(r"^  (\S.*?) +([\d.]+)  \[[\d.]+ [\d.]+\]$", text, re.M))
        n, values = names.index("= passes"), [float(value) for value in values]
        assert n == passes and names[n + 1:] == ("data + encode", "step", "backward", "average, clip + guard",
                                                 "optimizer", "EMA + log", "= iteration", "ratio")
        assert sum(values[:n]) == pytest.approx(values[n], abs=0.005)   # of two blocks median = mean
        assert sum(values[n + 1:n + 7]) == pytest.approx(values[n + 7], abs=0.005)

def test_the_clips_without_a_cache_are_those_with_it_and_both_are_timed():
    method, cfg = run.setup("self_forcing")
    net, batch = run.nets_of(method, cfg)["student"], run.batch_of(cfg)
    (x, fps), (y, others) = bench.frames_per_second(method, cfg | dict(blocks=2), net, batch, "cpu").values()
    assert torch.allclose(x, y, atol=1e-5) and x.shape[2] == 2 * batch["x0"].shape[2] and x.std() > 0.1
    assert len(fps) == len(others) == 2

def test_the_readmes_table_takes_new_figures_into_its_row_alone():
    text, row = results_table.README.read_text(), dict(fd=9.87, fd_std=0.65, command="a", minutes=7.4)
    new = results_table.rewrite(text, dict(cm=[row | dict(steps=n) for n in (1, 4)], nobody=[]))
    line, = set(new.splitlines()) - set(text.splitlines())
    assert "`methods/cm.py`" in line and line.count("9.87 ± 0.65") == 2 and " | 7 | " in line
    row = dict(fd=[8.76] * 8, motion=7.65, track=[6.54] * 8, identity=0.1234, command="a")
    row |= dict(minutes=None, steps=4)
    new = results_table.rewrite(text, dict(causal_sft=[row]))
    line, = set(new.splitlines()) - set(text.splitlines())      # of the row of 32 steps nothing
    assert " | 4 | 8.76 | 8.76 | 8.76 | 7.65 | 6.54 | 0.12 | 31 |" in line

def test_a_gpu_check_has_its_verdict_and_one_that_fails_does_not_end_the_others(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "RUNS", dict(odd=("dmd2", "--amp=fp7"), fp32=gpu_check.RUNS["fp32"]))
    assert gpu_check.main(["--quick"]) == 1
    odd, fp32, last = capsys.readouterr().out.splitlines()
    assert "FAILED: " in odd and "fp7" in odd and last == "2 runs, 1 failed"
    assert re.search(r" s  [\d.]+ ms, [\d.]+ GB, loss [\d.]+, first off 0e\+00", fp32)
