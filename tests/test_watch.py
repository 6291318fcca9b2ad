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
from run import refused, setup
from test_preempt import until
from tools import bench

def stepping(before, *args, **changes):
    """setup(...) that calls before(it) before each step and multiplies the loss by its result, if any."""
    method, cfg = setup(*args, **changes)
    step = method.step
    def patched(nets, batch, it, cfg):
        factor, (loss, parts) = before(it), step(nets, batch, it, cfg)
        return loss * (factor or 1.0), parts
    method.step = patched
    return method, cfg

class Spoil(nn.Module):
    """Passes its input on, or nan, or what has the derivative 1 + 0 sqrt'(0), which is nan."""
    how = ""
    def forward(self, x):
        return {"": x + 0, "forward": x * float("nan"), "backward": x + (x * 0).sqrt()}[self.how]

def make_net():
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), Spoil()), nn.Linear(4, 4))

BLOCK, GRADIENT = (f"student.0.{what} is not finite" for what in (    # the module before it gets that
    "1 (Spoil): its output", "0 (Linear): the gradient of its output"))
NAMED = dict.fromkeys(("plain", "recomputed"), ["", GRADIENT, BLOCK]) | {
    "no grad": ["", "", BLOCK], "jvp": ["", BLOCK, BLOCK]}              # jvp: the tangent is nan

@pytest.mark.parametrize("kind", NAMED)
def test_the_first_module_of_the_first_micro_step_that_is_not_finite_is_named_at_one_sync(kind):
    """In micro-steps while a module is fine, bad backward, bad forward."""
    nets, x, names = dict(teacher=make_net(), student=make_net()), torch.randn(3, 4), []
    anomaly, net = watch.Anomaly(nets), nets["student"]
    if kind == "recomputed":
        net[0].forward = shard.recomputed(net[0].forward)
    for net[0][1].how in "", "backward", "forward":
        with torch.set_grad_enabled(kind != "no grad"), bench.Syncs() as syncs:
            anomaly.start()
            out = sum(torch.func.jvp(net, (x,), (torch.ones_like(x),)) if kind == "jvp" else
                      (net(x), net(2 * x)))             # two forwards, one backward
            if kind != "no grad":
                out.sum().backward()
            anomaly.stop()
        assert syncs.n <= 1 and anomaly.flags == []
        names.append(anomaly.found)
    assert names == NAMED[kind]
    anomaly.start(first=False)                          # what the micro-step before has found stays
    anomaly.stop()
    net(torch.ones(3, 4))                               # a validation
    assert anomaly.found == BLOCK and anomaly.flags == []

def two_ranks():
    """What a run says at the end, and of updates that it leaves out."""
    rank, said = os.environ["RANK"], open(f"{os.environ['FEWSTEP_OUTPUT_ROOT']}{os.environ['RANK']}", "w+")
    os.dup2(said.fileno(), 1)
    method, cfg = stepping(lambda it: float("nan") if rank == "1" and it in (1, 4, 5, 6) else 1.0, "sft",
                           max_iter=8, max_skipped=3, anomaly=True, accum=2, save_every=2, parallel="fsdp")
    return refused(run.run, method, cfg), said.seek(0) or said.read()

def test_two_ranks_name_the_module_of_a_sharded_net_and_the_rank_whose_loss_is_not_finite():
    (sentence, said), (sentence1, said1) = run.ranks(2, two_ranks)
    assert sentence == sentence1 and said1 == ""
    why = (r"\(rank 1: loss nan dsm [\d.]+ "
           r"\(first student\S* \(Toy\): the gradient of its output is not finite\)\)")
    assert re.search(rf"not finite 3 times in a row, last at it 6, phase 'student' {why}; --amp", sentence)
    skips = re.findall(rf"left out at it (.), phase 'student': the gradient was not finite {why}\n", said)
    assert skips == ["1", "4"] and said.count("left out") == 2          # the first of a row

def hang(folder):
    """A run of which rank 1 comes to it 2 and no further."""
    log = open(f"{folder}/said", "a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    def stuck(it):
        if it == 2 and os.environ["RANK"] == "1":
            time.sleep(100)
    run.run(*stepping(stuck, "sft", max_iter=4, timeout_s=5, parallel="fsdp"))

def test_a_hung_run_ends_with_a_line_per_rank(tmp_path):
    setup("sft")
    processes = run.start(2, tmp_path, hang, tmp_path)
    for process in processes:
        process.join(90)
        process.kill()
        process.join()
    said = (tmp_path / "said").read_text()              # 0: it heard that the other one had left
    assert tuple(p.exitcode for p in processes) in [(75, 75), (75, 0), (0, 75)] and "done: " not in said
    lines = sorted(line for line in said.splitlines() if "made no progress" in line)
    places = r"in \w+.py:\d+ predict <", r"in test_watch.py:\d+ stuck < .* < startup.py:\d+ call"
    for rank, (place, line) in enumerate(zip(places, lines, strict=True)):
        assert re.match(rf"rank {rank} made .* 5 s at it 2 \(phase 'student', step\): {place}", line), line

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
