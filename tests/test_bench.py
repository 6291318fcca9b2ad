"""tools/bench.py: what its tables list. Speed itself is not tested."""
import re
import sys
from collections import Counter

import pytest
import torch

import run
import trainer

sys.path.insert(0, str(trainer.ROOT / "tools"))
import bench  # noqa: E402

PARTS = ["data + encode", "step", "backward", "average, clip + guard", "optimizer", "EMA + log",
         "= iteration"]
FAKE = ["student forward x 2", "fake_score forward + backward", "features forward + backward (real, r1)",
        "discriminator forward + backward (both, r1) x 2", "optimizer", "= passes"]
STUDENT = ["student forward, simulated steps", "student forward + backward", "fake_score forward",
           "teacher forward", "features forward + input gradient", "discriminator forward + input gradient",
           "optimizer", "= passes"]

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
    rows, syncs = table([run.DMD2, "--steps", "3"], capsys)
    assert syncs == dict(fake=1, student=1) and list(rows) == ["fake", "student"]
    for phase, names in dict(fake=FAKE, student=STUDENT).items():
        assert [name for name, _ in rows[phase]] == names + PARTS + ["ratio"]
        values, n = [value for _, value in rows[phase]], len(names) - 1
        assert sum(values[:n]) == pytest.approx(values[n], abs=0.005)   # of two blocks median = mean
        assert sum(values[n + 1:n + 7]) == pytest.approx(values[n + 7], abs=0.005)

@pytest.mark.parametrize("name, changes, student, fake", [      # nets called, in either phase
    ("cm", dict(distill=False, guidance=1.0), "student student", ""),
    ("cm", dict(guidance=1.0, solver="euler"), "student student teacher", ""),
    ("cm", {}, "student student teacher teacher teacher teacher", ""),
    ("tcm", dict(dropout=0.1), "student student stage1", ""), ("tcm", dict(stage1=""), "student student", ""),
    ("sft", {}, "student", ""), ("sft", dict(logvar=True), "student", ""),
    ("kd", dict(steps=2), "student", ""),
    ("f_distill", {}, "student fake teacher fake D D", "student fake fake D D"),
    ("f_distill", dict(divergence="rkl", gan_weight=0.0), "student fake teacher", "student fake fake D D"),
    ("ladd", {}, "student teacher D", "student teacher teacher teacher D D D"),
    ("ladd", dict(r1_weight=0.0, steps=2), "student teacher D", "student teacher teacher D D"),
    ("dmd2", dict(gan_weight=0.0), "student fake teacher", "student fake"),
    ("dmd2", dict(gan_weight=0.0, guidance=0.0), "student fake teacher", "student fake"),
    ("dmd2", dict(gan_weight=0.0, guidance=2.0), "student fake teacher teacher", "student fake"),
    ("dmd2", {}, "student fake teacher fake D", "student fake fake D D"),
    ("dmd2", dict(r1_weight=1.0), "student fake teacher fake D", "student fake fake fake D D D"),
    ("dmd2", dict(r1_weight=1.0, steps=2, student_input="data"), "student fake teacher fake D",
     "student fake fake fake D D D"),
    ("dmd2", dict(gan_features="teacher", guidance=2.0), "student fake teacher teacher teacher D",
     "student fake teacher teacher D D"),
    ("dmd2", dict(gan_features="teacher", r1_weight=1.0, guidance=0.0), "student fake teacher teacher D",
     "student fake teacher teacher teacher D D D")], ids=str)
def test_a_step_calls_each_net_as_its_docstring_says_and_the_passes_are_those(name, changes, student, fake):
    method, cfg = run.setup(name, **changes)
    nets, batch = run.nets_of(method, cfg), run.batch_of(cfg)
    assert ("discriminator" in nets) == bool(cfg.get("gan_weight") or name in ("f_distill", "ladd"))
    opts, calls, short = method.optimizers(nets, cfg), Counter(), dict(fake_score="fake", discriminator="D")
    for key, net in nets.items():       # per net: with a graph or without, whole or to the last tap
        net.register_forward_pre_hook(lambda module, args, kwargs, key=short.get(key, key): calls.update(
            {(key, torch.is_grad_enabled(), kwargs.get("stop", False)): weight}), with_kwargs=True)
    for phase, it in run.phases(method, cfg).items():
        run.turn(nets, opts, phase)
        weight = 1
        calls.clear()
        method.step(nets, batch, it, cfg)[0].backward()
        of_step, with_grad = Counter(calls), {*run.gradients(nets)}
        expected = dict(student=student, fake=fake)[phase].split()
        assert sorted(key for key, *_ in of_step.elements()) == sorted(expected)
        run.turn(nets, opts, phase)
        rows = bench.PASSES[name](bench.Passes(nets, batch), cfg)[phase]
        calls.clear()
        for _, weight, call in rows:
            if weight:
                call()
        assert calls == of_step and {*run.gradients(nets)} == with_grad

def test_a_method_without_an_entry_is_refused_and_a_copy_is_not(tmp_path, capsys):
    text = run.SFT.read_text()
    (tmp_path / "mine.py").write_text(text)
    rows, _ = table([tmp_path / "mine.py"], capsys)
    assert [row[0] for row in rows["student"][:3]] == ["student forward + backward", "optimizer", "= passes"]
    (tmp_path / "other.py").write_text(text.replace('recipes="sft"', 'recipes="other"'))
    run.refused(bench.main, [str(tmp_path / "other.py")],
                says=["other.py has recipes 'other'; ", "lists the passes of ", "PASSES"])
