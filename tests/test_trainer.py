"""The loop: exact resume, what a checkpoint holds, skipped updates, precision, logging, sources."""
import json
import os

import pytest
import torch

import ckpt
import common
import run
import trainer
from run import assert_alike, config, differing, load, refused, saved, setup, spy, stepping

EMAS = ("ema:0.9", "ema_power:power=0.1", "ema_half:half_kimg=0.05")

def poisoned(name, *its, by=float("nan")):
    """A method with a loss times `by` in these iterations."""
    return stepping(name, lambda values, nets, it: (values[0] * (by if it in its else 1.0), values[1]))

# ---- exact resume, in new processes
def train_parts(names, accum, parts):
    """Of every method the parts of a run, {name: changes}: one straight, one stopped and continued."""
    for name in names:
        for part, changes in parts.items():
            amp = "fp16" if name == "sft" else ""       # the scaler's state belongs to a run, too
            method, cfg = setup(name, lr_schedule="cosine:0.1", warmup=3, ema=EMAS, max_iter=20, val_every=5,
                                sample_every=10, accum=accum, amp=amp, name=f"{name}_{part}")
            run.run(method, cfg | changes)

@pytest.fixture(scope="module", params=[1, 2])
def continued(request, tmp_path_factory):
    """Folder of the runs above, in two launches of new processes."""
    root, world = tmp_path_factory.mktemp("continued"), request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEWSTEP_OUTPUT_ROOT", str(root))
        for name in run.METHODS:
            setup(name)                                 # makes the toy teachers
        run.ranks(world, train_parts, run.METHODS, 2 // world, dict(straight={}, parts=dict(stop_at=10)))
        run.ranks(world, train_parts, run.METHODS, 2 // world, dict(parts={}))
    return root / "fewstep" / "tests"

def test_a_stopped_and_continued_run_is_bit_identical_to_a_straight_one(name, continued):
    straight, parts = (continued / f"{name}_{part}" for part in ("straight", "parts"))
    assert ckpt.scan(straight / "checkpoints") == [20] and ckpt.scan(parts / "checkpoints") == [10, 20]
    a, b = saved(straight, 20), saved(parts, 20)
    assert sum(a["counts"].values()) == 20 and set(a["emas"]) == {"ema", "ema_power", "ema_half"}
    kept = ("it", "nets", "emas", "optims", "counts", "skipped", "scaler", "sources", "method", "format")
    assert differing({k: a[k] for k in kept}, {k: b[k] for k in kept}) == []
    assert bool(a["scaler"]) == (name == "sft")
    assert_alike(run.lines(straight), run.lines(parts))
    assert run.its(run.lines(straight), "val/student/loss") == [0, 5, 10, 15, 20]
    a, b = ([(f / f"samples/{it:07d}.png").read_bytes() for it in (0, 10, 20)] for f in (straight, parts))
    assert a == b and len({*a}) == 3                    # pictures change with the weights alone

def two_ranks():
    """What else is checked on two ranks."""
    a, b, c = params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    rank = float(os.environ["RANK"])
    torch.distributed.init_process_group()
    world = torch.distributed.group.WORLD
    a.grad = torch.full((2,), 1.0 + rank)               # 1 and 2
    if rank == 1:
        b.grad = torch.full((2,), 4.0)                  # none and 4
    trainer.average_gradients(params, 2)
    x = torch.tensor([1.0, 4.0]) * (rank + 1)
    told = common.from_rank0(["rank 0", 0] if rank == 0 else None, world), common.all_mean(x).tolist()
    return [p.grad for p in params], told

def test_two_ranks_agree_and_one_process_is_left_alone():
    grads, told = zip(*run.ranks(2, two_ranks))
    for a, b, c in grads:
        assert a.tolist() == [1.5, 1.5] and b.tolist() == [2, 2] and c is None      # None on every rank stays
    assert told == ((["rank 0", 0], [1.5, 6.0]),) * 2
    p = torch.nn.Parameter(torch.zeros(2))
    trainer.average_gradients([p], 1)
    assert p.grad is None and common.from_rank0("x", None) == "x" and common.all_mean(p) is p

def test_every_ema_is_the_chain_of_its_own_rates_also_over_a_resume(outputs):
    """One that the checkpoint lacks starts from the student there."""
    method, cfg = setup("dmd2", update_ratio=1, max_iter=12, save_every=1, ema=EMAS, lr=0.01)
    start = run.nets_of(method, dict(cfg))["student"].state_dict()
    run.run(method, cfg | dict(stop_at=6))
    run.run(method, cfg | dict(ema=(*EMAS, "ema_new:0.5")))
    students = [start, *(saved(outputs / "dmd2", 2 * n)["nets"]["student"] for n in range(1, 7))]
    for entry in (*EMAS, "ema_new:0.5"):
        first = 3 if entry == "ema_new:0.5" else 0      # of the student's updates
        ema = {k: v.double() for k, v in students[first].items()}
        for n in range(first + 1, 7):
            beta = common.ema_beta(entry, n, 8)
            ema = {k: beta * v + (1 - beta) * students[n][k] for k, v in ema.items()}
        for k, v in saved(outputs / "dmd2", 12)["emas"][entry.partition(":")[0]].items():
            torch.testing.assert_close(v.double(), ema[k], rtol=1e-5, atol=1e-6)

def test_new_hyper_parameters_win_from_the_first_step_of_a_resume(monkeypatch):
    method, cfg = setup("sft", lr=0.002, weight_decay=0.0, warmup=0, lr_schedule="cosine:0.5", max_iter=10)
    made = spy(monkeypatch, method, "optimizers")
    run.run(method, cfg | dict(stop_at=5))
    lines = run.run(method, cfg | dict(lr=0.05, weight_decay=0.3, betas=(0.8, 0.9))).lines
    for it in 5, 9:
        assert lines[it]["lr"] == pytest.approx(0.05 * common.lr_factor("cosine:0.5", it, 0, 10))
    opt = made[-1][1]["student"]
    assert opt.param_groups[0]["weight_decay"] == 0.3 and opt.param_groups[0]["betas"] == (0.8, 0.9)
    assert all(s["step"] == 10 for s in opt.state.values())

# ---- checkpoints
def test_a_start_on_the_meta_device_equals_a_plain_one(name):
    method, cfg = setup(name)
    held = lambda net: dict(training=net.training, **dict([*net.named_parameters(), *net.named_buffers()]))
    meta = {n: held(net) for n, net in run.nets_of(method, cfg).items()}
    torch.manual_seed(123)
    plain = {n: held(net) for n, net in run.nets_of(method, cfg, "cpu").items()}
    assert differing(meta, plain) == []

# ---- non-finite gradients
def test_a_gradient_that_is_not_finite_reaches_nothing(name, outputs):
    method, cfg = setup(name, max_iter=6, save_every=1, warmup=10, lr_schedule="constant", ema=EMAS)
    cfg |= dict(update_ratio=1) if "update_ratio" in cfg else {}
    _, it, later, *_ = [it for it in range(6) if method.phase(it, cfg) == "student"]
    lines = run.run(poisoned(name, it), cfg).lines
    before, after, end = (saved(outputs / name, n) for n in (it, it + 1, 6))
    assert [differing(before[key], after[key]) for key in ("nets", "emas", "optims", "counts")] == [[]] * 4
    assert [sum(state["skipped"].values()) for state in (before, after, end)] == [0, 1, 0]
    assert sum(end["counts"].values()) == 5
    assert [line.get("skipped") for line in lines] == [1.0 if n == it else None for n in range(6)]
    assert lines[later]["lr"] == pytest.approx(cfg["lr"] * 2 / 10)      # warm-up waits
    for state in (end["nets"]["student"], *end["emas"].values()):
        assert all(v.isfinite().all() for v in state.values())

def test_max_skipped_in_a_row_of_a_phase_end_the_run_and_count_over_a_resume():
    method = poisoned("dmd2", 1, 5, 7, 9, 11)           # of the student, who has the odd turns
    cfg = config(method, max_iter=20, max_skipped=3, update_ratio=1)
    assert "3 times in a row, last at it 9, phase 'student' (" in refused(run.run, method, cfg)
    assert "4 times in a row, last at it 11" in refused(run.run, method, cfg)

# ---- precision and clipping
def test_one_scaler_serves_two_optimizers_with_one_update_per_iteration(monkeypatch):
    method = poisoned("dmd2", 0, by=float("inf"))
    updates = spy(monkeypatch, torch.amp.GradScaler, "update")
    result = run.run(method, config(method, max_iter=4, amp="fp16", update_ratio=1))
    assert [line["scale"] for line in result.lines] == [32768.0] * 4 and len(updates) == 4
    assert saved(result.folder, 4)["counts"] == dict(student=2, fake=1)

def test_autocast_runs_with_float32_weights(name):
    method, losses = load(name), []
    for amp in "", "bf16", "fp16":
        result = run.run(method, config(method, name=f"amp{amp}", amp=amp))
        losses.append([v for line in result.lines for k, v in line.items() if k.startswith("loss")])
        state = saved(result.folder, 12)
        for tensors in (*state["nets"].values(), *state["emas"].values()):
            assert {v.dtype for v in tensors.values()} == {torch.float32}
        assert not amp or losses[0] != losses[-1] == pytest.approx(losses[0], rel=0.2, abs=0.02)

@pytest.mark.parametrize("limit, scale", [(0.05, 1), (0.05, 4), (1e6, 4)])
def test_clipping_is_torchs_and_takes_the_loss_scale_out(limit, scale):
    ours, theirs = ([torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)] for _ in range(2))
    for p, q in zip(ours, theirs):
        q.grad = torch.randn(len(q))
        p.grad = scale * q.grad
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    scaler.scale(torch.ones(()))                        # makes it ready
    norm = trainer.clip(ours, limit, scaler, None, torch.device("cpu"))
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, limit).item(), rel=1e-5)
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs], rtol=1e-4, atol=1e-9)

# ---- what a run says
def test_log_lines_are_means_over_their_window_and_the_turns_in_it():
    method, cfg = setup("dmd2", update_ratio=2, max_iter=10, r1_weight=0.1)
    ones = run.run(method, cfg | dict(name="ones")).lines
    fives = run.run(method, cfg | dict(log_every=5)).lines
    own = {f"{kind}{of}" for kind in ("loss", "norm", "lr") for of in ("", "_fake")}
    own |= {"dm", "gan_g", "dsm", "gan_d", "r1"}
    for line, window in zip(fives, (ones[:5], ones[5:])):
        assert set(line) == {"it", *own, *run.TIMING}
        for key in own:                                 # its own turns only
            turns = [one[key] for one in window if key in one]
            assert line[key] == pytest.approx(sum(turns) / len(turns), rel=1e-5)
        assert line["img_per_s"] * line["ms_per_it"] == pytest.approx(8 * 1000)

# ---- sources
def test_a_run_is_a_source_of_its_student_and_its_emas_pinned_to_the_checkpoint_of_the_start():
    sft = load("sft")
    first = run.run(sft, config(sft, max_iter=4, save_every=2, ema=EMAS)).folder
    def start(source, it, kind, key, **changes):
        """A run whose teacher must be what the checkpoint of iteration `it` holds."""
        method, cfg = setup("dmd2", **dict(dict(teacher=f"{first}{source}", max_iter=1, name=key)) | changes)
        result = run.run(method, cfg)
        assert differing(dict(result.nets["teacher"].state_dict()), saved(first, it)[kind][key]) == []
        pinned = json.loads((result.folder / "config.json").read_text())["sources"][cfg["teacher"]]
        assert pinned == saved(result.folder, cfg["max_iter"])["sources"][cfg["teacher"]]
        assert pinned["file"].endswith(f"{it:07d}.pth")
    start("", 4, "nets", "student")
    start("#ema_power", 4, "emas", "ema_power")
    run.run(sft, config(sft, max_iter=6, ema=EMAS))     # the source goes on; a resume keeps to iteration 4
    start("#ema_power", 4, "emas", "ema_power", max_iter=2)
    start("/checkpoints/0000002.pth#ema", 2, "emas", "ema")

def test_a_source_that_changed_since_the_start_is_refused_on_resume(tmp_path):
    method, file = load("dmd2"), tmp_path / "teacher.pth"
    whole = torch.load(config(method)["teacher"], weights_only=True)
    cfg = config(method, teacher=str(file), max_iter=4)
    for more, stop_at in (0, 2), (1, 4), (0, 4):
        torch.save({k: v + more for k, v in whole.items()}, file)
        if more:
            refused(run.run, method, cfg, says=["teacher.pth is not the file it was since this run began"])
        else:
            assert run.run(method, cfg | dict(stop_at=stop_at)).lines[-1]["it"] == stop_at
