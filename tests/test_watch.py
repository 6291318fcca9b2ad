"""Anomalies, blame, hung ranks, profiles: what they say, and that they say nothing while all is well."""
import json
import os
import re
import threading
import time

import pytest
import torch
from torch import nn

import run
import shard
import watch
from run import refused, setup, stepping
from test_preempt import until
from tools import bench

class Spoil(nn.Module):
    """Passes its input on, or nan, or what has the derivative 1 + 0 sqrt'(0), which is nan."""
    how = ""
    def forward(self, x):
        return {"": x + 0, "forward": x * float("nan"), "backward": x + (x * 0).sqrt()}[self.how]

BLOCK, GRADIENT = (f"student.0.{what} is not finite" for what in (    # the module before it gets that
    "1 (Spoil): its output", "0 (Linear): the gradient of its output"))

@pytest.mark.parametrize("kind, expected", [
    ("plain", ["", GRADIENT, BLOCK]), ("recomputed", ["", GRADIENT, BLOCK]), ("no grad", ["", "", BLOCK]),
    ("jvp", ["", BLOCK, BLOCK])])                       # the tangent is nan
def test_the_first_module_of_the_first_micro_step_that_is_not_finite_is_named_at_one_sync(kind, expected):
    """In micro-steps while a module is fine, bad backward, bad forward."""
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Spoil()), nn.Linear(4, 4))
    x, anomaly = torch.randn(3, 4), watch.Anomaly(dict(teacher=nn.Linear(4, 4), student=net))
    if kind == "recomputed":
        net[0].forward = shard.recomputed(net[0].forward)
    for net[0][1].how, found in zip(("", "backward", "forward"), expected):
        with torch.set_grad_enabled(kind != "no grad"), bench.Syncs() as syncs:
            anomaly.start()
            out = sum(torch.func.jvp(net, (x,), (torch.ones_like(x),)) if kind == "jvp" else
                      (net(x), net(2 * x)))             # two forwards, one backward
            if kind != "no grad":
                out.sum().backward()
            anomaly.stop()
        assert syncs.n <= 1 and anomaly.flags == [] and anomaly.found == found
    anomaly.start(first=False)                          # what the micro-step before has found stays
    anomaly.stop()
    net(x)                                              # a validation
    assert anomaly.found == BLOCK and anomaly.flags == []

def redirected(file):
    """Makes this process say into a file what it says."""
    out = open(file, "a+")
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    return out

def two_ranks(folder):
    """What a run says at the end, and of updates that it leaves out."""
    rank = os.environ["RANK"]
    said, bad = redirected(f"{folder}/{rank}"), dict.fromkeys((1, 4, 5, 6) if rank == "1" else (), torch.nan)
    method = stepping("sft", lambda values, nets, it: (values[0] * bad.get(it, 1.0), values[1]))
    cfg = run.config(method, max_iter=8, max_skipped=3, anomaly=True, accum=2, save_every=2, parallel="fsdp")
    return refused(run.run, method, cfg), said.seek(0) or said.read()

def test_two_ranks_name_the_module_of_a_sharded_net_and_the_rank_whose_loss_is_not_finite(tmp_path):
    (sentence, said), (sentence1, said1) = run.ranks(2, two_ranks, tmp_path)
    assert sentence == sentence1 and said1 == ""
    why = (r"\(rank 1: loss nan dsm [\d.]+ "
           r"\(first student\S* \(Toy\): the gradient of its output is not finite\)\)")
    assert re.search(rf"not finite 3 times in a row, last at it 6, phase 'student' {why}; --amp", sentence)
    skips = re.findall(rf"left out at it (.), phase 'student': the gradient was not finite {why}\n", said)
    assert skips == ["1", "4"] and said.count("left out") == 2          # the first of a row

def stuck(values, nets, it):
    time.sleep(100 if it == 2 and os.environ["RANK"] == "1" else 0)
    return values

def hang(file):
    """A run of which rank 1 comes to it 2 and no further."""
    redirected(file)
    method = stepping("sft", stuck)
    run.run(method, run.config(method, max_iter=4, timeout_s=10, parallel="fsdp"))

def test_a_hung_run_ends_with_a_line_per_rank(tmp_path):
    with pytest.raises(AssertionError, match="exit code 75"):           # one may hear that the other left
        run.ranks(2, hang, tmp_path / "said")
    said = (tmp_path / "said").read_text()
    lines = sorted(line for line in said.splitlines() if "at it 2" in line)     # a slow start is told, too
    places = r"step\): in \w+.py:\d+ ", r"step\): in test_watch.py:\d+ stuck < .* < startup.py:\d+ call"
    for rank, (place, line) in enumerate(zip(places, lines, strict=True)):
        assert re.match(rf"rank {rank} made .* 10 s at it 2 \(phase 'student', {place}", line), line

def test_the_watchdog_is_quiet_while_marks_come_and_ends_with_the_run():
    class Dog(watch.Watchdog):
        end = lambda dog, *args: ended.append((dog.last, *args)) or dog.stop()         # noqa: E731
    before, ended, dog = threading.active_count(), [], Dog(0.5)
    for it in range(40):                                # longer than the limit in all
        dog.mark(it, "fake", "step")
        time.sleep(0.02)
    assert ended == [] and threading.active_count() == before + 1
    (last, idle, moment), = until(lambda: ended, 5)
    assert last == (39, "phase 'fake', step") and 0.5 <= idle < 0.6 and moment == 0.25
    del dog                                             # as where an error has ended a run
    until(lambda: threading.active_count() == before, 5)

def test_a_profile_has_the_iterations_of_its_window_and_a_deterministic_run_ends_with_itself():
    method, cfg = setup("dmd2", max_iter=5, update_ratio=1)
    folder = run.run(method, cfg | dict(profile=(1, 3), deterministic=True)).folder / "profile"
    assert torch.are_deterministic_algorithms_enabled()
    trace = json.loads((folder / "0000001-0000003.rank0.json").read_text())["traceEvents"]
    spans = [e["name"] for e in trace if e.get("cat") == "user_annotation" and e["name"][:3] == "it "]
    assert spans == ["it 1 student", "it 2 fake", "it 3 student"]
    assert "aten::convolution" in (folder / "0000001-0000003.rank0.txt").read_text()
    refused(run.run, method, cfg | dict(profile=(4, 2)), says=["is not first,last"])
    run.run(method, cfg | dict(name="next"))
    assert not torch.are_deterministic_algorithms_enabled()
