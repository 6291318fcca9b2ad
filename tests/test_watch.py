"""Anomalies, blame, hung ranks, profiles: what they say, and that they say nothing while all is well."""
import json
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import run
import shard
import watch
from run import refused, setup
from test_bench import bench
from test_preempt import until

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

class Sorts(nn.Linear):
    """Returns all sorts of things."""
    def forward(self, x):
        return {7: [(super().forward(x), "")], "": (None, torch.ones(0), torch.arange(3)), 0: self.weight}

def make_net():
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), Spoil()), Sorts(4, 4))

BLOCK, GRADIENT = (f"student.0.{what} is not finite" for what in (    # the module before it gets that
    "1 (Spoil): its output", "0 (Linear): the gradient of its output"))
NAMED = dict.fromkeys(("plain", "recomputed"), ["", GRADIENT, BLOCK]) | {
    "no grad": ["", "", BLOCK], "jvp": ["", BLOCK, BLOCK]}              # jvp: the tangent is nan

def found(anomaly, net, kind):
    """What is found in micro-steps of some kind while a module is fine, bad backward, bad forward; nothing of
    it is kept."""
    torch.manual_seed(0)
    block, call, x, names = net[0], lambda x: net(x)[7][0][0], torch.randn(3, 4), []
    block.forward = nn.Sequential.forward.__get__(block)
    if kind == "recomputed":
        block.forward = shard.recomputed(block.forward)
    for block[1].how in "", "backward", "forward":
        with torch.set_grad_enabled(kind != "no grad"), bench.Syncs() as syncs:
            anomaly.start()
            out = sum(torch.func.jvp(call, (x,), (torch.ones_like(x),)) if kind == "jvp" else
                      (call(x), call(2 * x)))           # two forwards, one backward
            if kind != "no grad":
                out.sum().backward()
            anomaly.stop()
        assert syncs.n <= 1 and anomaly.flags == [] and not any(p._backward_hooks for p in net.parameters())
        names.append(anomaly.found)
    return names

@pytest.mark.parametrize("kind", NAMED)
def test_the_first_module_of_the_first_micro_step_that_is_not_finite_is_named_at_one_sync(kind):
    nets = dict(teacher=make_net(), student=make_net())
    anomaly, net = watch.Anomaly(nets), nets["student"]
    assert found(anomaly, net, kind) == NAMED[kind]
    anomaly.start(first=False)                          # what the micro-step before has found stays
    anomaly.stop()
    net(torch.ones(3, 4))                               # a validation
    assert anomaly.found == BLOCK and anomaly.flags == []

def two_ranks():
    """What is found in a sharded net; what a run says at the end, and of updates that it leaves out."""
    dist.init_process_group()
    torch.manual_seed(0)
    rank, net = dist.get_rank(), make_net()
    for part in (net[0][0], net[0], net):
        fully_shard(part, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    anomaly, said = watch.Anomaly(dict(student=net)), open(f"{os.environ['FEWSTEP_OUTPUT_ROOT']}{rank}", "w+")
    seen = {kind: found(anomaly, net, kind) for kind in ("plain", "jvp", "recomputed")}
    dist.destroy_process_group()
    os.dup2(said.fileno(), 1)
    method, cfg = stepping(lambda it: float("nan") if rank == 1 and it in (1, 4, 5, 6) else 1.0, "sft",
                           max_iter=8, max_skipped=3, anomaly=True, accum=2, save_every=2)
    return seen, refused(run.run, method, cfg), said.seek(0) or said.read()

def test_two_ranks_name_the_module_of_a_sharded_net_and_the_rank_whose_loss_is_not_finite():
    (seen, sentence, said), (seen1, sentence1, said1) = run.ranks(2, two_ranks)
    assert seen == seen1 == {kind: NAMED[kind] for kind in seen} and sentence == sentence1 and said1 == ""
    why = (r"\(rank 1: loss nan dsm [\d.]+ "
           r"\(first student\S* \(Toy\): the gradient of its output is not finite\)\)")
    assert re.search(rf"not finite 3 times in a row, last at it 6, phase 'student' {why}; --amp", sentence)
    skips = re.findall(rf"left out at it (.), phase 'student': the gradient was not finite {why}\n", said)
    assert skips == ["1", "4"] and said.count("left out") == 2          # the first of a row

def test_blame_is_of_means_over_micro_steps_and_names_few_ranks(monkeypatch):
    own = [dict(loss=torch.tensor(1.0), dm=2), dict(loss=3, dm=4)]
    assert watch.blame(own, None) == "all losses are finite, rank 0: loss 2 dm 3"
    monkeypatch.setattr(watch, "everyone", lambda value, group: [value] * 9)
    assert watch.blame([dict(loss=torch.nan)], None).endswith("rank 3: loss nan; 5 more ranks")

HUNG = dict(            # exit codes (0: it heard that the other one had left), where the ranks stand
    sleeps=([(75, 75), (75, 0), (0, 75)], [r"step\): in \w+.py:\d+ predict < .*all_gather",
                                           r"step\): in test_watch.py:\d+ stuck < .* < startup.py:\d+ call"]),
    stopped=([(75, -signal.SIGKILL)], [r"waiting for the other ranks\): in trainer.py:\d+ \w+ < .*, "
                                       r"waiting in \S+ all_reduce"]))

def hang(folder, kind):
    """A run of which rank 1 comes to it 2 and no further."""
    log = open(f"{folder}/said", "a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    def stuck(it):
        if it == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP) if kind == "stopped" else time.sleep(100)
    run.run(*stepping(stuck, "sft", max_iter=4, timeout_s=3, name=kind,
                      parallel="fsdp" if kind == "sleeps" else "ddp"))

@pytest.mark.parametrize("kind", HUNG)
def test_a_hung_run_ends_with_a_line_per_rank(kind, tmp_path):
    setup("sft")
    codes, places = HUNG[kind]
    processes = run.start(2, tmp_path, hang, tmp_path, kind)
    for process in processes:
        process.join(60 if kind == "sleeps" or process is processes[0] else 0)
        process.kill()
        process.join()
    said = (tmp_path / "said").read_text()
    assert tuple(p.exitcode for p in processes) in codes and "done: " not in said
    assert ("no word from rank 1: stopped or dead" in said) == (kind == "stopped")
    lines = sorted(line for line in said.splitlines() if "made no progress" in line)
    assert len(lines) == len(places)
    for rank, (place, line) in enumerate(zip(places, lines)):
        assert re.match(rf"rank {rank} made no progress for 3 s at it 2 \(phase 'student', {place}", line)

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

def test_a_profile_has_the_iterations_of_its_window_also_over_an_error_and_a_resume(capfd):
    there, bad = [], [4]
    method, cfg = stepping(lambda it: there.append(len([*folder.glob("*.json")])) or 1 / (it not in bad),
                           "dmd2", max_iter=8, profile=(1, 5), update_ratio=1)
    folder = run.startup.output_folder(cfg) / "profile"
    with pytest.raises(ZeroDivisionError):
        run.run(method, cfg)
    bad.clear()
    run.run(method, cfg)
    assert there == [0, 0, 0, 0, 0, 1, 1, 2, 2]         # written right after the window
    events = {f.name: json.loads(f.read_text())["traceEvents"] for f in folder.glob("*.json")}
    assert {name: [e["name"] for e in trace if e.get("cat") == "user_annotation" and e["name"][:3] == "it "]
            for name, trace in events.items()} == {
        "0000001-0000004.rank0.json": ["it 1 student", "it 2 fake", "it 3 student", "it 4 fake"],
        "0000004-0000005.rank0.json": ["it 4 fake", "it 5 student"]}
    table = (folder / "0000001-0000004.rank0.txt").read_text()
    assert "aten::convolution" in table and "CPU Mem" in table
    assert "profile of it 1 to 4: " in capfd.readouterr().out
    for window in ((3,), (4, 2), (1.0, 2), (-1, 2), ("a", "b")):
        refused(run.run, method, cfg | dict(profile=window), says=["is not first,last"])

def test_a_deterministic_run_sets_what_it_needs_and_the_next_one_resets_it(name, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for on in (True, False):
        run.run(*setup(name, max_iter=2, deterministic=on, name=f"{on}"))
        assert torch.are_deterministic_algorithms_enabled() == on
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
