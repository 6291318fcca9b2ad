"""tools/bench.py: what its tables list. Speed itself is not tested."""
import re

import pytest

import run
from tools import bench
from tools import table as results_table

PARTS = ["data + encode", "step", "backward", "average, clip + guard", "optimizer", "EMA + log",
         "= iteration"]
FAKE = {"student forward": 1, "fake_score forward + backward": 1, "fake_score forward to a tap + backward": 1,
        "discriminator forward + backward": 2}
STUDENT = {"student forward + backward": 1, "fake_score forward": 1, "teacher forward": 1,
           "fake_score forward to a tap + input gradient": 1, "discriminator forward + input gradient": 1}

def table(argv, capsys):
    """{phase: [(row, median)]} and {phase: device syncs} of what bench prints."""
    bench.main([*map(str, argv), "--net", "toy:tiny", "--batch_size", "4", "--blocks", "2", "--iters", "2"])
    rows, syncs = {}, {}
    for line in capsys.readouterr().out.splitlines()[1:-1]:
        if head := re.match(r"(\w+): (\d+) device sync", line):
            rows[head[1]], syncs[head[1]] = [], int(head[2])
        else:
            name, *values = re.fullmatch(r"  (\S.*?) +([\d.]+)  \[([\d.]+) ([\d.]+)\]", line).groups()
            mid, low, high = map(float, values)
            assert low <= mid <= high
            rows[[*rows][-1]].append((name, mid))
    return rows, syncs

def test_the_table_lists_every_pass_every_part_and_their_ratio_with_one_sync(capsys):
    rows, syncs = table([run.DMD2], capsys)
    assert syncs == dict(fake=1, student=1) and list(rows) == ["fake", "student"]
    for phase, calls in dict(fake=FAKE, student=STUDENT).items():
        names = [f"{name} x {n}" if n > 1 else name for name, n in calls.items()] + ["optimizer", "= passes"]
        assert [name for name, _ in rows[phase]] == names + PARTS + ["ratio"]
        values, n = [value for _, value in rows[phase]], len(names) - 1
        assert sum(values[:n]) == pytest.approx(values[n], abs=0.005)   # of two blocks median = mean
        assert sum(values[n + 1:n + 7]) == pytest.approx(values[n + 7], abs=0.005)

MARKS = {"*": "backward", "!": "input gradient", "~": "-mode", ".": "to a tap"}

@pytest.mark.parametrize("name, changes, student, fake", [      # nets called, in either phase
    ("cm", dict(distill=False, guidance=1.0), "student* student", ""),
    ("cm", dict(guidance=1.0, solver="euler"), "student* student teacher", ""),
    ("cm", {}, "student* student teacher teacher teacher teacher", ""),
    ("tcm", dict(dropout=0.1), "student* student stage1", ""), ("tcm", {}, "student* student stage1", ""),
    ("tcm", dict(stage1=""), "student* student", ""), ("sft", dict(logvar=True), "student*", ""),
    ("sft", {}, "student*", ""), ("kd", dict(steps=2), "student*", ""),
    ("scm", dict(guidance=2.0), "student* student~ teacher teacher", ""),
    ("scm", dict(jvp="fused", distill=False), "student*~", ""),
    ("scm", dict(jvp="difference"), "student* student student teacher", ""),
    ("mean_flow", dict(guidance=1.0), "student* student~ teacher", ""),
    ("mean_flow", dict(distill=False, kappa=0.5), "student* student~ student student", ""),
    ("f_distill", {}, "student* fake teacher fake!. D! D", "student fake* fake*. D* D*"),
    ("f_distill", dict(divergence="rkl", gan_weight=0.0), "student* fake teacher",
     "student fake* fake*. D* D*"),
    ("ladd", {}, "student* teacher!. D!", "student teacher. teacher. teacher. D* D* D*"),
    ("ladd", dict(r1_weight=0.0, steps=2), "student* teacher!. D!", "student teacher. teacher. D* D*"),
    ("dmd2", dict(gan_weight=0.0), "student* fake teacher", "student fake*"),
    ("dmd2", dict(gan_weight=0.0, guidance=2.0), "student* fake teacher teacher", "student fake*"),
    ("dmd2", {}, "student* fake teacher fake!. D!", "student fake* fake*. D* D*"),
    ("dmd2", dict(r1_weight=1.0), "student* fake teacher fake!. D!",
     "student fake* fake*. fake*. D* D* D*"),
    ("dmd2", dict(r1_weight=1.0, steps=2, student_input="data"), "student* fake teacher fake!. D!",
     "student fake* fake*. fake*. D* D* D*"),
    ("dmd2", dict(gan_features="teacher", guidance=2.0), "student* fake teacher teacher teacher!. D!",
     "student fake* teacher. teacher. D* D*"),
    ("dmd2", dict(gan_features="teacher", r1_weight=1.0, guidance=0.0), "student* fake teacher teacher!. D!",
     "student fake* teacher. teacher. teacher. D* D* D*")], ids=str)
def test_a_step_makes_the_calls_that_it_must_and_bench_makes_the_same(name, changes, student, fake):
    method, cfg = run.setup(name, **changes)
    nets, batch = run.nets_of(method, cfg), run.batch_of(cfg)
    assert ("discriminator" in nets) == bool(cfg.get("gan_weight") or name in ("f_distill", "ladd"))
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

def test_the_readmes_table_takes_new_figures_into_its_row_alone():
    text, row = results_table.README.read_text(), dict(fd=9.87, fd_std=0.65, command="a", minutes=7.4)
    new = results_table.rewrite(text, dict(cm=[row | dict(steps=n) for n in (1, 4)], nobody=[]))
    (line,), lines = set(new.splitlines()) - set(text.splitlines()), len(text.splitlines())
    assert "`methods/cm.py`" in line and line.count("9.87 ± 0.65") == 2 and " | 7 | " in line
    assert len(new.splitlines()) == lines and results_table.rewrite(text, {}) == text
    assert {*run.METHODS} - {*results_table.RUNS} == {"causal_kd", "causal_sft", "causvid", "self_forcing"}
