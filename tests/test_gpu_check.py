"""tools/gpu_check.py: rehearsed on the CPU. What it finds on a GPU is for a GPU to say."""
import re

from tools import gpu_check

def test_a_run_has_its_verdict_and_one_that_fails_does_not_end_the_others(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "RUNS", dict(odd=("dmd2", "--amp=fp7"), fp32=gpu_check.RUNS["fp32"]))
    assert gpu_check.main(["--quick"]) == 1
    odd, fp32, last = capsys.readouterr().out.splitlines()
    assert "FAILED: " in odd and "fp7" in odd and last == "2 runs, 1 failed"
    assert re.search(r" s  [\d.]+ ms, [\d.]+ GB, loss [\d.]+, first off 0e\+00", fp32)
