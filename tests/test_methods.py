"""The contract of a method file, for every file in methods/ on nets/toy.py; what each refuses; SFT."""
import math

import pytest
import torch

import common
import judge
import run
import train
from gauss import Gauss, labelled
from run import (assert_alike, batch_of, config, differing, load, nets_of, one_step, owned, phases, refused,
                 saved, setup, spy)

LOGGED = "tangent", "fm", "mse"                         # parts that a loss does not sum
# values that build() refuses, one at a time
TANGENTS = dict(jvp="exact", jvp_step=0.0, tangent_warmup=-1, teacher="")
REFUSED = dict(
    sft=dict(cond_dropout=-1.0), kd=dict(target="state", norm="l3"), dmd2=dict(update_ratio=0),
    ladd=dict(guidance=2.0), f_distill=dict(divergence="tv", ratio_min=0.0),
    cm=dict(loss_weight="gaps", t_list=(80.0, 90.0), t_dist="logits", distill=True, guidance=2.0, grid_end=5),
    tcm=dict(loss_weight="gaps", t_list=(80.0, 0.5), tail_t_dist="x", boundary_prob=1.0, guidance=2.0),
    scm=TANGENTS | dict(tangent="clap", t_min=99.0, t_max=5.0),
    mean_flow=TANGENTS | dict(pairs="max", loss="l1", ratio=1.5, kappa=0.5, guidance_interval=(0.2,)))

# ---- every method
def test_a_loss_is_the_finite_weighted_sum_of_its_parts(name):
    method = load(name)
    keys = [k for k, v in method.config.items() if k.endswith("_weight") and isinstance(v, (int, float))]
    for weights in ((), (0.5, 3.0, 7.0, 11.0, 13.0)):   # the method's own, and others
        cfg = config(method, **dict(zip(keys, weights)))
        nets = nets_of(method, cfg)
        for it in phases(method, cfg).values():
            loss, logs, grads = one_step(method, nets, cfg, it)
            logs = {part: torch.as_tensor(value) for part, value in logs.items()}
            assert all(v.shape == () and v.isfinite() for v in (loss, *logs.values()))
            total = sum(v.item() * cfg.get(f"{part.replace('gan_g', 'gan')}_weight", 1.0)
                        for part, v in logs.items() if part not in LOGGED)
            assert loss.item() == pytest.approx(total, rel=1e-6)
            assert all(g.isfinite().all() for g in grads.values())

def test_an_iteration_moves_all_tensors_of_its_phase_alone_and_validation_and_samples_nothing(name):
    method, cfg = setup(name, save_every=1, weight_decay=0.0, warmup=0, lr_schedule="constant")
    modes = lambda nets: {n: net.training for n, net in nets.items()}
    start, step, seen = nets_of(method, cfg), method.step, {True: [], False: []}
    as_built, start = modes(start), {n: net.state_dict() for n, net in start.items()}
    method.step = lambda nets, *args: seen[torch.is_grad_enabled()].append(modes(nets)) or step(nets, *args)
    result = run.run(method, cfg)
    states, turns = [saved(result.folder, it)["nets"] for it in range(1, 13)], owned(method, result.nets, cfg)
    ever = {phase: set() for phase in turns}
    for it, (before, after) in enumerate(zip([{n: start[n] for n in states[0]}, *states], states)):
        moved = {path[1:].replace("/", ".", 1) for path in differing(before, after)}
        assert moved and moved <= turns[method.phase(it, cfg)], it
        ever[method.phase(it, cfg)] |= moved
    assert ever == turns and turns.keys() == phases(method, cfg).keys()
    frozen = {*start} - {name.split(".")[0] for names in turns.values() for name in names}
    assert not frozen & {*states[0]}                    # no checkpoint carries them
    assert differing({n: start[n] for n in frozen}, {n: result.nets[n].state_dict() for n in frozen}) == []

    looked = run.run(method, cfg | dict(name="looked", save_every=0, val_every=2, sample_every=3))
    assert as_built["student"] and seen[True] == [as_built] * 24
    assert len(seen[False]) == 7 * len(turns) and not any(any(each.values()) for each in seen[False])
    assert_alike(result.lines, [line for line in looked.lines if "norm" in " ".join(line)])
    assert differing(states[-1], saved(looked.folder, 12)["nets"]) == []
    assert run.its(looked.lines, "val/") == [0, 2, 4, 6, 8, 10, 12]
    assert sorted(int(f.stem) for f in (looked.folder / "samples").iterdir()) == [0, 3, 6, 9, 12]

def test_a_sample_keeps_shape_and_dtype_and_depends_on_seed_and_id_alone(name):
    method, cfg = setup(name)
    net = nets_of(method, cfg)["student"].eval().requires_grad_(False)
    draw = lambda ids, seed=3: judge.draw_samples(method, net, cfg, ids, [i % 10 for i in ids], cfg["steps"],
                                                  seed, "cpu")
    x = draw([0, 1, 2, 3, 12])
    assert x.shape == (5, *net.x_shape) and x.dtype == torch.float32 and x.isfinite().all()
    torch.manual_seed(99)
    assert (draw([3, 2]) - x[[3, 2]]).abs().max() < 1e-5 * x.abs().max()
    for other in (draw([3], seed=4), draw([13])):       # 13: another id of the same class
        assert (other - x[3]).abs().max() > 0.01 * x.abs().max()

def test_a_copied_file_runs_by_its_path_and_shows_help_and_a_dry_run_of_every_preset(
        name, tmp_path, outputs, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(load(name).path.read_text() + '\nconfig["max_iter"] = 2\n')
    method, cfg = train.load_method("mine.py"), config(load(name))
    recipes = [preset for owner, preset in train.recipes.presets if owner == name]      # it finds them
    for preset in (*getattr(method, "presets", {}), *recipes):
        train.main(["mine.py", f"--preset={preset}", "--help"])
        assert capsys.readouterr().out.count("\n  --") == len(cfg)
        refused(train.main, ["mine.py", f"--preset={preset}", "--dry_run"], says=["does not exist"])
        assert capsys.readouterr().out.count("\n* ") > 5        # what it sets is shown all the same
    keys = {*run.TINY, *run.EXTRA.get(name, {}), "teacher", "data"} - {"max_iter"}
    args = ["mine.py", *(f"--{key}={cfg[key]}" for key in keys)]
    train.main([*args, "--dry_run"])
    assert not outputs.exists() and "* net = 'toy:" in capsys.readouterr().out
    train.main(args)
    assert (outputs / "mine/method.py").read_bytes() == (tmp_path / "mine.py").read_bytes()
    assert saved(outputs / "mine", 2)["it"] == 2

@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_any_work(name):
    scratch = dict(cm=dict(distill=False, guidance=1.0, teacher=""), tcm=dict(stage1="", teacher=""))
    method, cfg = setup(name, classes=10, **scratch.get(name, {}))
    if name in scratch:                                 # no teacher is built or read
        assert {*method.build(cfg)} == {"student"} and method.init(cfg) == {}
        refused(method.build, cfg | dict(t_list=(80.0, 2.0), t_max=79.0), says=["at most 79 (--t_max)"])
        cfg |= dict(t_list=(), **dict(stage1="x") if name == "tcm" else {})
    for key, value in REFUSED[name].items():
        word = value if isinstance(value, str) and value else key
        refused(method.build, cfg | {key: value}, says=[word])

# ---- ranks and micro-steps
FSDP, ITERATIONS = dict(parallel="fsdp"), 8         # at least 6: of every phase one
JVP = [name for name in run.METHODS if "jvp" in load(name).config]
CASES = [                                               # in TCM's second a net may get no sample
    *((name, dict(accum=2)) for name in run.METHODS),
    *((name, FSDP | (dict(boundary_prob=0.0) if name == "tcm" else {})) for name in run.METHODS),
    *((name, FSDP | dict(recompute=True, jvp=jvp)) for name in JVP for jvp in ("apart", "fused"))]

def on_two_ranks():
    """On one of two: lines and nets (of replicas) in every case; exit steps and noise levels of DMD2."""
    ours = []
    for n, (name, changes) in enumerate(CASES):
        out = run.run(*setup(name, max_iter=ITERATIONS, name=f"case{n}", **changes))
        ours.append((out.lines, "accum" in changes and {n: net.state_dict() for n, net in out.nets.items()}))
    with pytest.MonkeyPatch.context() as patch:
        rollouts, times = (spy(patch, common, f) for f in ("rollout", "sample_t"))
        run.run(*setup("dmd2", accum=2, steps=3, update_ratio=1, max_iter=24, dm_t_dist="lognormal"))
    return ours, [args[5] for args, _ in rollouts], torch.cat([t for _, t in times]).tolist()

def test_two_ranks_in_every_way_compute_what_one_does_in_more_micro_steps_from_their_own_draws():
    for name in run.METHODS:
        setup(name)                                     # makes the toy teachers
    (results, exits, draws), (others, exits1, draws1) = run.ranks(2, on_two_ranks, timeout_s=500)
    for n, ((name, changes), (lines, nets), (_, other)) in enumerate(zip(CASES, results, others)):
        assert differing(nets, other) == [], name       # replicas stay bit-identical
        assert run.its(lines, "it") == list(range(1, ITERATIONS + 1))
        alone = dict(parallel="ddp", recompute=False, accum=2 * changes.get("accum", 1), name=f"alone{n}")
        lines1 = run.run(*setup(name, max_iter=ITERATIONS, **changes | alone)).lines
        assert_alike(lines1, lines, rel=1e-5 if nets else 1e-4)
    assert exits == exits1 and set(exits) == {0, 1, 2}
    assert len({*draws, *draws1}) == 2 * len(draws) > 96        # none twice: ranks, micro-steps, iterations

# ---- conditions, SFT
@pytest.mark.parametrize("name, p, changes", [
    ("sft", 0.3, {}), ("sft", 0.0, dict(cond_keep=("label",))), ("mean_flow", 0.3, dict(guidance=1.0)),
    ("mean_flow", 0.3, dict(distill=False, guidance=1.0))])
def test_conditions_are_dropped_with_their_probability_and_alike_for_every_net(name, p, changes):
    method, cfg = setup(name, cond_dropout=0.3, batch_size=1500, **changes)
    nets, batch, seen = nets_of(method, cfg), batch_of(cfg), []
    for net in nets.values():
        net.register_forward_pre_hook(lambda net, args: seen.append(args[2]["label"]))
    one_step(method, nets, cfg, 0, batch)
    every = max(seen, key=len)
    assert (every == -1).float().mean().item() == pytest.approx(p, abs=0.04)
    assert torch.equal(every[every >= 0], batch["cond"]["label"][every >= 0])
    assert all(torch.equal(labels, every[:len(labels)]) for labels in seen)

@pytest.mark.parametrize("schedule, pred, t, minimum", [
    ("edm", "x0", 0.3, 1.0), ("edm", "x0", 5.0, 1.0),   # EDM's weight: 1 at any t if sigma_data is the data's
    ("rf", "flow", 0.4, 0.25 / (0.36 * 0.25 + 0.16)),   # s^2 / V
    ("trig", "v", 0.7, 0.25 / (math.cos(0.7) ** 2 * 0.25 + math.sin(0.7) ** 2)),
    ("rf", "eps", 0.4, 0.36 * 0.25 / (0.36 * 0.25 + 0.16))])
def test_sft_at_the_exact_denoiser_of_gaussian_data_has_its_known_minimum(schedule, pred, t, minimum):
    method, cfg = setup("sft", t_dist="uniform", t_min=t, t_max=t + 1e-6, cond_dropout=0.0)
    torch.manual_seed(0)
    batch = labelled(0.5 * torch.randn(64, 1, 64, 64))
    def loss(std):
        common.seed_default(1)
        return method.step(dict(student=Gauss(0.0, std, schedule, pred)), batch, 0, cfg)[0].item()
    assert loss(0.5) == pytest.approx(minimum, rel=0.01) and loss(0.5) < min(loss(0.45), loss(0.55))
