"""tools/gpu_check.py: its table, rehearsed on the CPU. What it finds on a GPU is for a GPU to say."""
import re
import sys
import time
import warnings

import pytest
import torch

import run
import trainer

sys.path.insert(0, str(trainer.ROOT / "tools"))
import gpu_check  # noqa: E402

def table(capsys, *argv):
    """Exit code, {case: the rest of its row}, the last line."""
    code = gpu_check.main(["--quick", *argv])
    _, _, *rows, last = capsys.readouterr().out.splitlines()
    return code, {row[:24].strip(): row[24:] for row in rows}, last

@pytest.mark.skipif(torch.cuda.is_available(), reason="would run for minutes")
def test_without_a_gpu_it_lists_what_it_would_run(capsys):
    assert gpu_check.main([]) == 0
    text = capsys.readouterr().out
    for words in "fp32", "fp16", "fsdp bf16", "resume fsdp", "jvp fused attention", "compiled bf16":
        assert "`python tools/gpu_check.py`" in text and f"\n  {words} " in text

def test_a_case_is_a_row_an_error_too_and_the_others_go_on(capsys, monkeypatch):
    case = {name: (name, *rest) for name, *rest in gpu_check.cases(True)}
    broken = "broken", lambda at, name: torch.cuda.no_such_thing, {}
    monkeypatch.setattr(gpu_check, "PEAK", {"cpu": 0.01})
    monkeypatch.setattr(gpu_check, "cases", lambda quick: [
        broken, *(case[name] for name in ("fp32", "fsdp bf16", "resume fsdp", "jvp fsdp"))])
    code, rows, last = table(capsys)
    assert code == 1 and re.fullmatch(r"5 cases, \d+ s: 1 failed, 0 skipped or stopped", last)
    assert re.search(r"FAILED: AttributeError: .*no_such_thing.* \(test_gpu_check.py:\d+\)", rows["broken"])
    both = r"[1-9]\d*(\.\d)? / [1-9]\d*(\.\d)?"        # columns: s, ms, GB, MFU, syncs, verdict
    for name in "fp32", "fsdp bf16":
        assert re.match(rf" +\d+ +{both} +- +{both} +1 / 1  loss of fake 0", rows[name])
    assert "tensors bit for bit" in rows["resume fsdp"] and "central difference" in rows["jvp fsdp"]

def test_what_there_is_no_time_for_is_stopped_or_skipped(capsys, monkeypatch):
    sleepers = [(f"case {n}", lambda at, name: time.sleep(60), {}) for n in range(9)]
    monkeypatch.setattr(gpu_check, "cases", lambda quick: sleepers)
    code, rows, last = table(capsys, "--minutes", "0.02")
    assert not code and last.endswith("0 failed, 9 skipped or stopped")
    assert "stopped: 0 s are over" in rows["case 0"] and "skipped: no time left" in rows["case 8"]

def test_on_cuda_what_waits_is_counted_and_named(monkeypatch):
    """With stand-ins for torch.cuda's debug mode and its warnings."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn("Sync"))
    (method, cfg), step = run.setup("dmd2", update_ratio=1), run.load("dmd2").step
    method.step = lambda *args: warnings.warn("called a synchronizing CUDA operation") or step(*args)
    timed = gpu_check.Timed(method, gpu_check.argparse.Namespace(cuda=True, warm=2), 2, {})
    with pytest.raises(gpu_check.bench.Enough):
        trainer.train(timed, cfg)
    found = {phase: [re.sub(r"\d+", "N", where) for where in waits] for phase, waits in timed.syncs.items()}
    assert found == dict.fromkeys(("fake", "student"), ["test_gpu_check.py:N"])
    assert {*timed.flops} == {"fake", "student"} and min(timed.flops.values()) > 1e6

@pytest.mark.slow
def test_the_whole_rehearsal_passes(capsys):
    assert table(capsys)[2].endswith(": 0 failed, 0 skipped or stopped")
