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

@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folder of the runs sft, dmd2 (distils its student) and parts (sft of that with a frozen layer)."""
    root, text = tmp_path_factory.mktemp("runs"), run.SFT.read_text()
    text = text.replace("    return dict(", "    student.patch.requires_grad_(False)\n    return dict(", 1)
    (root / "parts.py").write_text(text.replace(
        '(nets["student"].parameters()', '([p for p in nets["student"].parameters() if p.requires_grad]'))
    of_sft = dict(teacher=str(root / "fewstep/tests/sft"))
    every = run.TINY | dict(max_iter=2, save_every=1, sample_every=2, lr_schedule="constant")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEWSTEP_OUTPUT_ROOT", str(root))
        for path, changes in ((run.SFT, {}), (run.DMD2, of_sft | dict(update_ratio=1, ema=("ema_slow:0.5",))),
                              (root / "parts.py", of_sft | dict(guidance=2.0))):
            method = run.train.load_method(path)
            run.trainer.train(method, run.train.resolve(method, [])[0] | every | changes)
    return root / "fewstep/tests"
