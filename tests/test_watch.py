"""Anomalies, blame, hung ranks, profiles: what they say, and that they say nothing while all is well."""
import gc
import gzip
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import common
import run
import trainer
import watch
from run import refused, setup

sys.path.insert(0, str(trainer.ROOT / "tools"))
import bench  # noqa: E402

# ---- the first module
class Spoil(nn.Module):
    """Passes its input on, what it gives is nan in one way or another."""
    how = ""
    def forward(self, x):
        x = x + 0
        if self.how == "forward":
            return x * float("nan")
        return x + (x * 0).sqrt() if self.how == "backward" else x      # 0 + 0 sqrt'(0): nan derivative

class Net(nn.Module):
    """Modules that return all sorts of things."""
    def __init__(self):
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), Spoil())
        self.sorts, self.wrap = Sorts(), lambda f, x: f(x)
    def forward(self, x, extra={}):
        x = self.first(x) + self.table(torch.arange(3))
        sorts = self.sorts(self.wrap(self.block, x))
        return self.last(sorts["list"][0][0] + sorts["none"][1])

class Sorts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def forward(self, x):
        return {"list": [(x * self.weight, "text")], "none": (None, x.sum()), "int": torch.arange(3),
                7: torch.ones(0), "leaf": self.weight}

def backward(net, x):
    (net(x) + net(x, dict(y=x))).sum().backward()       # two forwards, one backward

def jvp(net, x):
    with torch.no_grad():
        torch.func.jvp(net, (x,), (torch.ones_like(x),))
    out, tangent = torch.func.jvp(net, (x,), (torch.ones_like(x),))
    (net(x) - tangent.detach() + out).sum().backward()

def no_grad(net, x):
    with torch.no_grad():
        net(x)

def checkpointed(net, x, reentrant=False):
    net.wrap = lambda f, x: checkpoint(f, x, use_reentrant=reentrant)
    backward(net, x)

def reentrant(net, x):
    checkpointed(net, x, True)

def autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        backward(net, x)

def vmap(net, x):
    torch.vmap(net.block)(x)

PASSES = [backward, jvp, no_grad, checkpointed, reentrant, autocast, vmap]

def seen(anomaly, work, net, x):
    """What is found in one micro-step; nothing of it is kept."""
    anomaly.start()
    work(net, x)
    assert len(anomaly.flags) > 2
    anomaly.stop()
    assert anomaly.flags == [] and not any(p._backward_hooks for p in net.parameters())
    return anomaly.found

@pytest.mark.parametrize("work", PASSES)
def test_the_first_module_that_is_not_finite_is_named(work):
    torch.manual_seed(0)
    nets = dict(teacher=Net(), student=Net())
    anomaly, net, x = watch.Anomaly(nets), nets["student"], torch.randn(3, 4)
    assert seen(anomaly, work, net, x) == ""
    net.block[1].how = "forward"
    assert seen(anomaly, work, net, x) == "student.block.1 (Spoil): its output is not finite"
    net.block[1].how = "backward"                       # so the module before it gets the first bad gradient
    assert seen(anomaly, work, net, x) == {
        no_grad: "", vmap: "", jvp: "student.block.1 (Spoil): its output is not finite",    # the tangent
        }.get(work, "student.block.0 (Linear): the gradient of its output is not finite")
    net.block[1].how = ""
    x[1] = float("inf")
    start = "student.block.0 (Linear): its output" if work is vmap else "student: its input"
    assert seen(anomaly, work, net, x) == start + " is not finite"
    net(x)                                              # a validation
    assert anomaly.flags == []

def test_the_first_micro_step_counts_and_costs_one_sync():
    net, x = Net(), torch.randn(3, 4)
    anomaly = watch.Anomaly(dict(student=net))
    with bench.Syncs() as syncs:
        for micro, module in enumerate((None, net.first, net.last, None)):
            anomaly.start(first=micro == 0)
            hook = module and module.register_forward_hook(lambda *args: args[2] * float("nan"), prepend=True)
            net(x).sum().backward()
            anomaly.stop()
            if hook:
                hook.remove()
            assert syncs.n == min(micro + 1, 2)         # the first that was found is enough
    assert anomaly.found == "student.first (Linear): its output is not finite"
    anomaly.start()
    assert anomaly.found == ""

# ---- on two ranks
def two_ranks():
    """What is found in a sharded net, what a run says of a skipped update, and at the end."""
    dist.init_process_group()
    torch.manual_seed(0)
    rank, net, x, found = dist.get_rank(), Net(), torch.randn(3, 4), []
    for part in (net.block[0], net.block, net.last, net):
        fully_shard(part, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    anomaly = watch.Anomaly(dict(student=net))
    for work in (backward, jvp, checkpointed):
        for how in ("", "forward", "backward"):
            net.block[1].how = how
            net.wrap = lambda f, x: f(x)
            anomaly.start()
            work(net, x)
            anomaly.stop()
            found.append(anomaly.found)
    dist.destroy_process_group()

    method, cfg = setup("sft", max_iter=8, max_skipped=3, anomaly=True, accum=2, save_every=2, name="blame")
    build, step, said = method.build, method.step, tempfile.TemporaryFile("w+")
    def spoilt(nets, batch, it, cfg):
        loss, parts = step(nets, batch, it, cfg)
        return loss * (float("nan") if rank == 1 and it in (1, 4, 5, 6) else 1.0), parts
    method.step = spoilt
    os.dup2(said.fileno(), 1)                           # rank 0 alone speaks
    sentence = refused(run.run, method, cfg)
    said.seek(0)
    return found, sentence, said.read()

def test_two_ranks_name_the_module_of_a_sharded_net_and_the_rank_whose_loss_is_not_finite():
    (found, sentence, said), (found1, sentence1, said1) = run.ranks(2, two_ranks)
    block = "student.block.1 (Spoil): its output is not finite"
    gradient = "student.block.0 (Linear): the gradient of its output is not finite"
    assert found == found1 == ["", block, gradient, "", block, block, "", block, gradient]
    assert sentence == sentence1 and said1 == ""
    why = (r"\(rank 1: loss nan dsm [\d.]+; first of all rank 1: student\S* \(Toy\): "
           r"the gradient of its output is not finite\)")
    assert re.search(rf"not finite 3 times in a row, last at it 6, phase 'student' {why}; --amp", sentence)
    skips = [line for line in said.splitlines() if "left out" in line]
    assert len(skips) == 2                              # the first of a row
    for it, line in zip((1, 4), skips):
        assert re.fullmatch(f"update left out at it {it}, phase 'student': .* not finite {why}", line)

def test_blame_of_one_process_and_of_losses_that_are_all_finite():
    nan, own = float("nan"), [dict(loss=torch.tensor(1.0), dm=2), dict(loss=torch.tensor(3.0), dm=4)]
    assert watch.blame(own, None) == "all losses are finite, rank 0: loss 2 dm 3"
    said = watch.blame([*own, dict(loss=1, dm=nan)], None, "x")
    assert said == "rank 0: loss 1.667 dm nan; first of all rank 0: x"
    x = torch.ones(2, requires_grad=True)
    assert not watch.detached(x.sum(), dict(dm=x.mean()))["dm"].requires_grad

# ---- hung runs
def hang(folder, kind):
    """A run of which the last rank comes to it 2 and no further."""
    rank, world, log = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), open(f"{folder}/said", "a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    parallel = "fsdp" if kind == "sharded" else "ddp"
    method, cfg = setup("sft", max_iter=4, timeout_s=3, name=kind, parallel=parallel)
    step = method.step
    def stuck(nets, batch, it, cfg):
        if it == 2 and rank == world - 1:
            if kind in ("sleeps", "sharded"):
                time.sleep(100)
            elif kind == "asks":
                dist.barrier()
            else:
                time.sleep(0.5)                         # on both sides of it the watchdog looks
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(0.5)
        return step(nets, batch, it, cfg)
    method.step = stuck
    run.run(method, cfg)

def test_a_hung_run_ends_with_a_line_per_rank_and_a_suspended_one_goes_on(tmp_path):
    setup("sft")
    runs = {}
    for kind, world in dict(sleeps=2, sharded=2, asks=2, stopped=2, suspended=1).items():
        (folder := tmp_path / kind).mkdir()
        runs[kind] = [run.SERVER.Process(target=run.child, args=(
            rank, world, folder, dict(os.environ), hang, (folder, kind))) for rank in range(world)]
        for process in runs[kind]:
            process.start()
    said = lambda kind: (tmp_path / kind / "said").read_text()         # noqa: E731
    def status(process):
        return Path(f"/proc/{process.pid}/stat").read_text().split(")")[1].split()[0]
    alone, (_, frozen) = runs["suspended"][0], runs["stopped"]
    until = time.time() + 60
    while status(alone) != "T" and time.time() < until:
        time.sleep(0.05)
    time.sleep(5)                                       # longer than timeout_s
    os.kill(alone.pid, signal.SIGCONT)
    for process in [p for ps in runs.values() for p in ps if p is not frozen]:
        process.join(60)
    for process in [p for ps in runs.values() for p in ps]:
        process.kill()
        process.join()
    assert alone.exitcode == 0 and "no progress" not in said("suspended") and "done: " in said("suspended")
    for kind in ("sleeps", "sharded", "asks", "stopped"):
        codes = {p.exitcode for p in runs[kind]}        # 0: it left when it heard that the other one had
        assert {75} <= codes <= {75, -signal.SIGKILL if kind == "stopped" else 0}, codes
        ours, *other = sorted(line for line in said(kind).splitlines() if "no progress" in line)
        place = (r"step\): in \w+.py:\d+ predict < .*all_gather" if kind == "sharded" else
                 r"waiting for the other ranks\): in trainer.py:\d+ \w+ < .*, waiting in \S+ all_reduce")
        assert re.match(rf"rank 0 made no progress for 3 s at it 2 \(phase 'student', {place}", ours)
        assert len(other) == (kind != "stopped")
        if other:
            assert re.match(r"rank 1 made no progress for 3 s at it 2 \(phase 'student', step\): "
                            r"in test_watch.py:\d+ stuck < .*trainer.py:\d+ train", other[0])
        assert ("no word from rank 1: stopped or dead" in said(kind)) == (kind == "stopped")
    assert re.search("stuck .*, waiting in .* barrier", said("asks"))

# ---- a stage in time, the end of a run
def test_the_watchdog_ends_with_the_run_and_is_quiet_while_marks_come(monkeypatch):
    ended = []
    monkeypatch.setattr(watch.Watchdog, "end",
                        lambda dog, *args: ended.append((dog.last, *args)) or dog.stop())
    before = threading.active_count()
    dog, off = watch.Watchdog(0.5), watch.Watchdog(0)
    assert threading.active_count() == before + 1
    time.sleep(0.6)
    for it in range(40):                                # longer than the limit in all
        dog.mark(it, "fake", "step")
        time.sleep(0.02)
    assert ended == []
    dog.mark(12, "fake", "step")
    dog.mark(12, "fake", "saving")                      # its first time: twice as long
    time.sleep(0.8)
    assert ended == []
    time.sleep(0.4)
    (last, idle, moment), = ended
    assert last == (12, "fake", "saving", 2) and 1 <= idle < 1.1 and moment == 0.25
    def fails():
        run_of_its_own = watch.Watchdog(0.5)
        run_of_its_own.mark(0, "", "start-up")
        raise common.BadInput("x")
    refused(fails)
    del dog
    gc.collect()
    time.sleep(0.1)
    assert threading.active_count() == before and len(ended) == 1

def test_group_timeouts_come_after_the_watchdog():
    assert watch.group_timeout(1800).total_seconds() > 1800 * watch.FIRST + 30
    assert watch.group_timeout(0).days == 7

# ---- profile, determinism, device
def spans(folder):
    """{file: its iterations} of the traces in a run folder."""
    traces = {f.name: json.loads(gzip.decompress(f.read_bytes())) for f in folder.glob("profile/*.json.gz")}
    return {name: [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"
                   and e["name"].startswith("it ")] for name, trace in traces.items()}

def test_a_profile_has_the_iterations_of_its_window_also_over_a_resume(capfd):
    method, cfg = setup("dmd2", max_iter=4, profile=(1, 2), update_ratio=1)
    step, there = method.step, []
    method.step = lambda nets, batch, it, cfg: (
        there.append((run.startup.output_folder(cfg) / "profile").exists()), step(nets, batch, it, cfg))[1]
    whole = run.run(method, cfg).folder
    assert spans(whole) == {"0000001-0000002.rank0.json.gz": ["it 1 student", "it 2 fake"]}
    assert there == [False, False, False, True]         # written right after the window
    table = (whole / "profile" / "0000001-0000002.rank0.txt").read_text()
    assert "aten::convolution" in table and "CPU Mem" in table
    method, cfg = setup("sft", max_iter=5, profile=(2, 9))
    for stop in (3, 5):
        parts = run.run(method, cfg | dict(name="parts", stop_at=stop)).folder
    assert spans(parts) == {"0000002-0000002.rank0.json.gz": ["it 2 student"],
                            "0000003-0000004.rank0.json.gz": ["it 3 student", "it 4 student"]}
    run.run(method, cfg | dict(name="parts", max_iter=6, profile=(2, 4)))       # after the window
    assert len(spans(parts)) == 2
    assert "profile of it 1 to 2: " in capfd.readouterr().out

def test_an_error_inside_the_window_leaves_its_trace_and_off_is_off(monkeypatch):
    method, cfg = setup("sft", max_iter=6, profile=(2, 4))
    step = method.step
    method.step = lambda nets, batch, it, cfg: step(nets, batch, it, cfg) if it < 3 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.run(method, cfg)
    folder = run.startup.output_folder(cfg)
    assert spans(folder) == {"0000002-0000003.rank0.json.gz": ["it 2 student", "it 3 student"]}
    monkeypatch.setattr(torch.profiler, "profile", None)
    assert spans(run.run(*setup("sft", max_iter=2, name="off")).folder) == {}

@pytest.mark.parametrize("window", [(3,), (4, 2), (0, 1, 2), (1.0, 2), (-1, 2), ("a", "b")])
def test_a_window_that_is_none_is_refused(window):
    assert "is not first,last" in refused(run.run, *setup("sft", profile=window))

def test_a_deterministic_run_sets_what_it_needs_and_the_next_one_resets_it(name, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for on in (True, False):
        run.run(*setup(name, max_iter=2, deterministic=on, name=f"{on}"))
        assert torch.are_deterministic_algorithms_enabled() == torch.backends.cudnn.deterministic == on
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

def test_device_values_leave_out_what_the_device_does_not_tell(monkeypatch):
    assert watch.device_values(torch.device("cpu")) == {}
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 ** 31)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    cuda = SimpleNamespace(type="cuda")
    assert watch.device_values(cuda) == dict(gpu_util=97, reserved_gb=2.0)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: exec("import no_such_module"))
    assert watch.device_values(cuda) == dict(reserved_gb=2.0)
