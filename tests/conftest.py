import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)
pytest.register_assert_rewrite("run")
import run  # noqa: E402

@pytest.fixture(params=run.METHODS)
def name(request):
    """A test that takes `name` runs once for every file in methods/."""
    return request.param

@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    """Every test has an output root of its own; -> where its tiny runs lie."""
    monkeypatch.setenv("FEWSTEP_OUTPUT_ROOT", str(tmp_path / "outputs"))
    return tmp_path / "outputs" / "fewstep" / "tests"
