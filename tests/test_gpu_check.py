"""tools/gpu_check.py: its table, rehearsed on the CPU. What it finds on a GPU is for a GPU to say."""
import re

import pytest
import torch

from tools import gpu_check

def table(capsys, *argv):
    """Exit code, {case: the rest of its row}, the last line."""
    code = gpu_check.main(["--quick", *argv])
    _, _, *rows, last = capsys.readouterr().out.splitlines()
    return code, {row[:24].strip(): row[24:] for row in rows}, last

@pytest.mark.skipif(torch.cuda.is_available(), reason="would run for minutes")
def test_without_a_gpu_it_lists_what_it_would_run(capsys):
    assert gpu_check.main([]) == 0
    text = capsys.readouterr().out
    for words in "fp32", "fp16", "fsdp bf16", "resume fsdp", "jvp fused", "compiled bf16":
        assert "`python tools/gpu_check.py`" in text and f"\n  {words} " in text

def test_a_case_is_a_row_an_error_or_a_refusal_too_and_the_others_go_on(capsys, monkeypatch):
    case = gpu_check.cases(True)
    broken = dict(broken=(lambda at: torch.cuda.no_such_thing, {}), odd=(gpu_check.speed, dict(batch_size=0)),
                  plain=case["fp32"], other=(gpu_check.speed, dict(gan_d_weight=9.0)))
    monkeypatch.setattr(gpu_check, "PEAK", {"cpu": 0.01})
    monkeypatch.setattr(gpu_check, "cases", lambda quick: broken | {
        name: case[name] for name in ("fsdp bf16", "resume fsdp bf16 async")})
    code, rows, last = table(capsys)
    assert code == 1 and re.fullmatch(r"6 cases, \d+ s: 2 failed, 1 refused", last)
    assert "FAILED: AttributeError" in rows["broken"] and "refused: --batch_size 0" in rows["odd"]
    assert "FAILED: AssertionError: losses" in rows["other"]
    both = r"[1-9]\d*(\.\d)? / [1-9]\d*(\.\d)?"        # columns: s, ms, GB, MFU, syncs, verdict
    for name in "plain", "fsdp bf16":
        assert re.match(rf" +\d+ +{both} +- +{both} +1 / 1  loss 0", rows[name])
    assert "tensors bit for bit" in rows["resume fsdp bf16 async"]

@pytest.mark.slow
def test_the_whole_rehearsal_passes(capsys):
    assert table(capsys)[2].endswith(": 0 failed, 0 refused")
