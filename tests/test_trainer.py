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

# ---- exact resume, averages
def train_parts(names, accum, parts):
    """Of every method the parts of a run, {name: changes}: one straight, one stopped and continued."""
    for name in names:
        for part, changes in parts.items():
            amp = "fp16" if name == "sft" else ("bf16", "")[accum - 1]      # fp16: the scaler's state, too
            run.run(*setup(name, lr_schedule="cosine:0.1", warmup=3, ema=EMAS, max_iter=12, val_every=3,
                           sample_every=6, accum=accum, name=f"{name}_{part}", amp=amp, **changes))

@pytest.mark.parametrize("world", [1, 2])
def test_a_stopped_and_continued_run_is_bit_identical_to_a_straight_one(world, outputs):
    """Each part in new processes."""
    for name in run.METHODS:
        setup(name)                                     # makes the toy teachers
    for parts in dict(straight={}, parts=dict(stop_at=8)), dict(parts={}):
        run.ranks(world, train_parts, run.METHODS, 2 // world, parts)
    for name in run.METHODS:
        straight, parts = (outputs / f"{name}_{part}" for part in ("straight", "parts"))
        assert ckpt.scan(straight / "checkpoints") == [12] and ckpt.scan(parts / "checkpoints") == [8, 12]
        a, b = ({k: v for k, v in saved(f, 12).items() if k != "config"} for f in (straight, parts))
        assert differing(a, b) == [] and bool(a["scaler"]) == (name == "sft"), name
        assert {v.dtype for held in a["nets"].values() for v in held.values()} == {torch.float32}
        assert sum(a["counts"].values()) == 12 and {*a["emas"]} == {"ema", "ema_power", "ema_half"}
        assert_alike(run.lines(straight), run.lines(parts))
        assert run.its(run.lines(straight), "val/student/loss") == [0, 3, 6, 9, 12]
        a, b = ([(f / f"samples/{it:07d}.png").read_bytes() for it in (0, 6, 12)] for f in (straight, parts))
        assert a == b and len({*a}) == 3                # pictures change with the weights alone

def on_two_ranks():
    rank, (a, b, c) = int(os.environ["RANK"]), [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    torch.distributed.init_process_group()
    a.grad, b.grad = torch.full((2,), 1.0 + rank), torch.full((2,), 4.0) if rank else None
    trainer.average_gradients([a, b, c], 2)
    assert a.grad.tolist() == [1.5, 1.5] and b.grad.tolist() == [2, 2] and c.grad is None
    assert common.from_rank0(None if rank else ["x", 0], torch.distributed.group.WORLD) == ["x", 0]
    assert common.all_mean(torch.tensor([1.0, 4.0]) * (rank + 1)).tolist() == [1.5, 6.0]

def test_two_ranks_agree_and_one_process_is_left_alone():
    run.ranks(2, on_two_ranks)
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
    for entry, first in (*((entry, 0) for entry in EMAS), ("ema_new:0.5", 3)):      # the student's updates
        ema = {k: v.double() for k, v in students[first].items()}
        for n in range(first + 1, 7):
            beta = common.ema_beta(entry, n, 8)
            ema = {k: beta * v + (1 - beta) * students[n][k] for k, v in ema.items()}
        held = dict(saved(outputs / "dmd2", 12)["emas"][entry.partition(":")[0]])
        torch.testing.assert_close(held, ema, rtol=1e-5, atol=1e-6, check_dtype=False)

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

def test_a_start_on_the_meta_device_equals_a_plain_one(name):
    method, cfg = setup(name)
    held = lambda net: dict(training=net.training, **dict([*net.named_parameters(), *net.named_buffers()]))
    meta, plain = ({n: held(net) for n, net in run.nets_of(method, cfg, device).items()}
                   for device in ("meta", "cpu"))
    assert differing(meta, plain) == []

# ---- gradients: not finite, scaled, clipped
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
    assert all(v.isfinite().all() for each in (end["nets"]["student"], *end["emas"].values())
               for v in each.values())

def test_max_skipped_in_a_row_of_a_phase_end_the_run_and_count_over_a_resume():
    method = poisoned("dmd2", 1, 5, 7, 9, 11)           # of the student, who has the odd turns
    cfg = config(method, max_iter=20, max_skipped=3, update_ratio=1)
    refused(run.run, method, cfg, says=["3 times in a row, last at it 9, phase 'student' ("])
    refused(run.run, method, cfg, says=["4 times in a row, last at it 11"])

def test_one_scaler_serves_two_optimizers_with_one_update_per_iteration(monkeypatch):
    method = poisoned("dmd2", 0, by=float("inf"))
    updates = spy(monkeypatch, torch.amp.GradScaler, "update")
    result = run.run(method, config(method, max_iter=4, amp="fp16", update_ratio=1))
    assert [line["scale"] for line in result.lines] == [32768.0] * 4 and len(updates) == 4
    assert saved(result.folder, 4)["counts"] == dict(student=2, fake=1)

@pytest.mark.parametrize("limit, scale", [(0.05, 1), (0.05, 4), (1e6, 4)])
def test_clipping_is_torchs_and_takes_the_loss_scale_out(limit, scale):
    ours, theirs = ([torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)] for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    for p, q in zip(ours, theirs):
        q.grad = torch.randn(len(q))
        p.grad = scaler.scale(q.grad.clone())
    norm = trainer.clip(ours, limit, scaler, None, torch.device("cpu"))
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, limit).item(), rel=1e-5)
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs], rtol=1e-4, atol=1e-9)

# ---- what a run says
def test_log_lines_are_means_over_their_window_and_the_turns_in_it():
    method, cfg = setup("dmd2", update_ratio=2, max_iter=10, r1_weight=0.1)
    ones, fives = (run.run(method, cfg | dict(name=f"{n}", log_every=n)).lines for n in (1, 5))
    own = "loss norm lr loss_fake norm_fake lr_fake dm gan_g dsm gan_d r1".split()
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
    def start(source, it, kind, key, max_iter=1):
        """A run whose teacher must be what the checkpoint of iteration `it` holds."""
        result = run.run(*setup("dmd2", teacher=f"{first}{source}", max_iter=max_iter, name=key))
        assert differing(dict(result.nets["teacher"].state_dict()), saved(first, it)[kind][key]) == []
        pinned, = json.loads((result.folder / "config.json").read_text())["sources"].values()
        assert saved(result.folder, max_iter)["sources"] == {f"{first}{source}": pinned}
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
    torch.save(whole, file)
    run.run(method, cfg | dict(stop_at=2))
    torch.save({k: v + 1 for k, v in whole.items()}, file)
    refused(run.run, method, cfg, says=["teacher.pth is not the file it was since this run began"])
    torch.save(whole, file)
    assert run.run(method, cfg).lines[-1]["it"] == 4
