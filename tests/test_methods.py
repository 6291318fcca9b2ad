"""The contract of a method file, for every file in methods/ on nets/toy.py; then oracles of each method."""
import json
import math
from types import SimpleNamespace

import pytest
import torch

import common
import judge
import run
import train
import trainer
from run import (assert_alike, batch_of, config, differing, gradients, load, nets_of, owned, phases, refused,
                 saved, setup, spy, turn)

# by config["recipes"], which a copied file keeps: the key that weighs a logged part, where it is not
# <part>_weight (no such key: 1); None: logged only
WEIGHS = dict(scm=dict(tangent=None), mean_flow=dict(fm=None, mse=None),
              **dict.fromkeys(("dmd2", "f_distill", "causvid", "self_forcing"),
                              dict(gan_g="gan_weight", gan_d="gan_d_weight")))

def one_step(method, nets, cfg, it, batch=None):
    """Loss, logs and gradients of iteration `it` after a reseed, without an update."""
    turn(nets, method.optimizers(nets, cfg), method.phase(it, cfg))
    common.seed_default(0)
    loss, logs = method.step(nets, batch or batch_of(cfg), it, cfg)
    loss.backward()
    return loss, logs, gradients(nets)

def weights_of(method):
    return [k for k, v in method.config.items() if k.endswith("_weight") and isinstance(v, (int, float))]

# ---- every method
def test_a_step_is_a_finite_weighted_sum_of_its_parts_with_gradients_for_its_optimizer_alone(name):
    method = load(name)
    for weights in ((), (0.5, 3.0, 7.0, 11.0, 13.0)):   # the method's own, and others
        cfg = config(method, **dict(zip(weights_of(method), weights)))
        nets = nets_of(method, cfg)
        names = owned(method, nets, cfg)
        assert phases(method, cfg).keys() == names.keys()
        for phase, it in phases(method, cfg).items():
            loss, logs, grads = one_step(method, nets, cfg, it)
            assert loss.shape == () and loss.isfinite() and logs
            assert all(v.shape == () and v.isfinite() for v in map(torch.as_tensor, logs.values())), logs
            keys = {part: WEIGHS.get(cfg["recipes"], {}).get(part, f"{part}_weight") for part in logs}
            total = sum(torch.as_tensor(v).item() * cfg.get(keys[part], 1.0) for part, v in logs.items()
                        if keys[part])
            assert loss.item() == pytest.approx(total, rel=1e-6)
            assert {*grads} == names[phase] and all(g.isfinite().all() for g in grads.values())

def test_an_iteration_moves_every_tensor_of_its_phase_and_no_other(name):
    method, cfg = setup(name, save_every=1, weight_decay=0.0, warmup=0, lr_schedule="constant")
    start, step, seen = {n: net.state_dict() for n, net in nets_of(method, cfg).items()}, method.step, []
    method.step = lambda nets, *args: seen.append(                      # what requires a gradient
        {f"{n}.{k}" for n, net in nets.items() for k, p in net.named_parameters() if p.requires_grad}
    ) or step(nets, *args)
    result = run.run(method, cfg)
    states, turns = [saved(result.folder, it)["nets"] for it in range(1, 13)], owned(method, result.nets, cfg)
    ever = {phase: set() for phase in turns}
    for it, (before, after) in enumerate(zip([{n: start[n] for n in states[0]}, *states], states)):
        moved = {path[1:].replace("/", ".", 1) for path in differing(before, after)}
        phase = method.phase(it, cfg)
        assert moved and moved <= turns[phase] == seen[it], it
        ever[phase] |= moved
    assert ever == turns
    frozen = {*start} - {name.split(".")[0] for names in turns.values() for name in names}
    assert not frozen & {*states[0]}                    # no checkpoint carries them
    assert differing({n: start[n] for n in frozen}, {n: result.nets[n].state_dict() for n in frozen}) == []

@pytest.mark.parametrize("name, key", [(name, key) for name in run.METHODS for key in weights_of(load(name))])
def test_a_weight_reaches_the_gradients_and_0_makes_no_call(name, key):
    calls, grads = [], []
    for weight in (0.0, 1.0, 100.0):
        method, cfg = setup(name, **{key: weight})
        nets = nets_of(method, cfg)
        calls.append(trainer.watch_calls(nets))
        grads.append({it: one_step(method, nets, cfg, it)[2] for it in phases(method, cfg).values()})
    assert len(calls[0]) < len(calls[1]) == len(calls[2]) or key == "boundary_weight"   # it takes no call
    assert differing(grads[0], grads[1]) and differing(grads[1], grads[2])

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

def test_a_copied_file_runs_from_any_folder_by_its_path(name, tmp_path, outputs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(load(name).path.read_text() + '\nconfig["max_iter"] = 2\n')
    method, cfg = train.load_method("mine.py"), config(load(name))
    keys = {*run.TINY, *run.EXTRA.get(name, {}), "teacher", "data"} - {"max_iter"}
    mine, changed, _ = train.resolve(method, [f"--{key}={cfg[key]}" for key in keys])
    trainer.train(method, mine, changed)
    out = outputs / "mine"
    assert (out / "method.py").read_bytes() == (tmp_path / "mine.py").read_bytes()
    written = json.loads((out / "config.json").read_text())
    assert written["method"] == "mine" and written["max_iter"] == 2 and saved(out, 2)["it"] == 2
    for (owner, preset), values in train.recipes.presets.items():   # the original's presets are found
        if owner == name:
            mine = train.resolve(method, ["--preset", preset])[0]
            assert mine | values == mine

def test_validation_and_samples_disturb_nothing(name):
    method = load(name)
    step, seen = method.step, {True: [], False: []}
    modes = lambda nets: {n: net.training for n, net in nets.items()}
    as_built = modes(method.build(config(method, classes=10)))
    method.step = lambda nets, *args: seen[torch.is_grad_enabled()].append(modes(nets)) or step(nets, *args)
    plain = run.run(method, config(method, name="plain"))
    looked = run.run(method, config(method, name="looked", val_every=2, sample_every=3))
    assert as_built["student"] and seen[True] == [as_built] * 24
    assert len(seen[False]) == 7 * len(phases(method, config(method)))
    assert not any(any(each.values()) for each in seen[False])
    assert_alike(plain.lines, [line for line in looked.lines if "norm" in " ".join(line)])
    assert differing(saved(plain.folder, 12)["nets"], saved(looked.folder, 12)["nets"]) == []
    assert run.its(looked.lines, "val/") == [0, 2, 4, 6, 8, 10, 12]
    assert sorted(int(f.stem) for f in (looked.folder / "samples").iterdir()) == [0, 3, 6, 9, 12]

# ---- ranks and micro-steps
def on_two_ranks(names):
    """On one of two: lines and nets of every method with one and two micro-steps; exit steps, noise levels
    and noise that DMD2 draws."""
    result = {}
    for name, accum in ((name, accum) for name in names for accum in (1, 2)):
        out = run.run(*setup(name, max_iter=20, accum=accum, name=f"{name}_2x{accum}"))
        result[name, accum] = out.lines, {n: net.state_dict() for n, net in out.nets.items()}
    with pytest.MonkeyPatch.context() as patch:
        rollouts, times, noises = (spy(patch, common, f) for f in ("rollout", "sample_t", "add_noise"))
        run.run(*setup("dmd2", accum=2, steps=3, update_ratio=1, max_iter=24, dm_t_dist="lognormal"))
    return (result, [args[5] for args, _ in rollouts], torch.cat([t for _, t in times]).tolist(),
            [args[2].sum().item() for args, _ in noises])

def test_w_ranks_times_a_micro_steps_compute_what_one_rank_does_in_w_a_from_their_own_draws():
    for name in run.METHODS:
        setup(name)                                     # makes the toy teachers
    (results, exits, *draws), (others, exits1, *draws1) = run.ranks(2, on_two_ranks, run.METHODS)
    for (name, accum), (lines, nets) in results.items():
        assert differing(nets, others[name, accum][1]) == [], name  # replicas stay bit-identical
        assert run.its(lines, "it") == list(range(1, 21))
        alone = run.run(*setup(name, max_iter=20, accum=2 * accum, name=f"{name}_1x{2 * accum}"))
        assert_alike(alone.lines, lines, rel=1e-5)
    assert exits == exits1 and set(exits) == {0, 1, 2}
    for ours, others in zip(draws, draws1):             # no value twice over ranks, micro-steps, iterations
        assert len(ours) == len(others) >= 48 and len({*ours, *others}) == 2 * len(ours)

# ---- oracles: Gaussian data
class Gauss(torch.nn.Module):
    """The exact prediction for data N(mean, std^2) per element; mean 0 for the condition -1."""
    def __init__(self, mean, std, schedule="edm", pred="x0", learn=False):
        super().__init__()
        self.mean, self.std = (torch.nn.Parameter(torch.tensor(v), requires_grad=learn) for v in (mean, std))
        self.schedule, self.pred, self.sigma_data = schedule, pred, 0.5

    def forward(self, x_t, t, cond={}):
        alpha, sigma = (common.expand(c, x_t) for c in common.alpha_sigma(self.schedule, t))
        mean = self.mean * common.expand((cond["label"] >= 0).float(), x_t)
        x0 = mean + alpha * self.std ** 2 / (alpha ** 2 * self.std ** 2 + sigma ** 2) * (x_t - alpha * mean)
        return common.convert(self.schedule, x_t, x0, t, "x0", self.pred)

class Affine(Gauss):
    """A one-step student: G(z) = std z + mean."""
    def forward(self, x_t, t, cond={}):
        return self.std * x_t / common.expand(common.alpha_sigma(self.schedule, t)[1], x_t) + self.mean

def labelled(x0):
    label = torch.zeros(len(x0), dtype=torch.int64)
    return dict(x0=x0, cond=dict(label=label), uncond=dict(label=label - 1))

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

def test_sft_drops_the_condition_with_its_probability():
    method, cfg = setup("sft", cond_dropout=0.3, batch_size=1500)
    nets, batch, seen = nets_of(method, cfg), batch_of(cfg), []
    nets["student"].register_forward_pre_hook(lambda net, args: seen.append(args[2]["label"]))
    one_step(method, nets, cfg, 0, batch)
    gone = seen[0] == -1
    assert gone.float().mean().item() == pytest.approx(0.3, abs=0.04)
    assert torch.equal(seen[0][~gone], batch["cond"]["label"][~gone])

# ---- DMD2
def dmd2(**changes):
    """method, config, nets of a fresh start, one_step as step(it), first iterations of student and fake."""
    method, cfg = setup("dmd2", **changes)
    nets = nets_of(method, cfg)
    return SimpleNamespace(method=method, cfg=cfg, nets=nets, **phases(method, cfg),
                           step=lambda it: one_step(method, nets, cfg, it))

def test_dmd2_counts_its_turns_also_over_a_resume_and_its_ema_moves_on_the_students(
        outputs, monkeypatch, capsys):
    turns = [load("dmd2").phase(it, dict(update_ratio=5)) for it in range(60)]
    assert turns == (["fake"] * 5 + ["student"]) * 10   # the students come last
    refused(dmd2, update_ratio=0, says=["update_ratio 0 must be at least 1"])
    method, cfg = setup("dmd2", update_ratio=5, max_iter=20, accum=2, save_every=1, ema=("ema:0.5",))
    run.run(method, cfg | dict(stop_at=13))
    steps = spy(monkeypatch, method, "step")
    run.run(method, cfg)
    assert [args[2] for args, _ in steps] == [it for it in range(13, 20) for _ in range(2)]
    states = [saved(outputs / "dmd2", n) for n in range(1, 21)]
    assert [states[n]["counts"] for n in (12, 19)] == [dict(student=2, fake=11), dict(student=3, fake=17)]
    assert [n for n in range(1, 20) if differing(states[n - 1]["emas"], states[n]["emas"])] == [5, 11, 17]
    assert "WARNING" not in capsys.readouterr().out
    run.run(method, cfg | dict(name="short", max_iter=5))
    assert "--max_iter 5 ends before the first turn of phase 'student'" in capsys.readouterr().out

def test_dmd2_pulls_nowhere_while_the_fake_score_is_the_teacher():
    d = dmd2(gan_weight=0.0)
    loss, _, grads = d.step(d.student)
    assert loss == 0 and len(grads) == len(list(d.nets["student"].parameters()))
    assert not any(g.any() for g in grads.values())
    d.nets["fake_score"].out.weight.data.mul_(1.1)      # and somewhere once it is not
    loss, _, grads = d.step(d.student)
    assert loss > 0 and all(g.any() for g in grads.values())

def test_dmd2_student_gradient_is_the_closed_form_on_gaussians():
    """E[(F - T) z] = alpha^2 sigma^2 (q^2 - s^2) q / (V_q V_s), V_q = alpha^2 q^2 + sigma^2: 0.254224 at
    alpha 0.8, sigma 0.6, q 0.9, s 0.5. w is the same for every sample if a sample has many elements."""
    t = math.acos(0.8)
    method, cfg = setup("dmd2", t_list=(), t_dist="uniform", dm_t_dist="uniform", dm_t_min=t,
                        dm_t_max=t + 1e-9, gan_weight=0.0)
    nets = dict(student=Affine(0.0, 0.9, "trig", learn=True), teacher=Gauss(0.0, 0.5, "trig"),
                fake_score=Gauss(0.0, 0.9, "trig"))
    common.seed_default(0)
    method.step(nets, labelled(torch.zeros(64, 1, 64, 64)), 5, cfg)[0].backward()
    c = 0.8 * 0.25 / (0.64 * 0.25 + 0.36)               # T = c x_t, x - T = q (1 - c alpha) z - c sigma eps
    gap = math.sqrt(2 / math.pi) * math.hypot(0.9 * (1 - 0.8 * c), 0.6 * c)
    assert nets["student"].std.grad.item() == pytest.approx(0.254224 / gap, rel=0.01)

@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_dmd2_student_converges_to_the_guided_gaussian(guidance):
    """Data N(m, s^2), unconditionally N(0, s^2): under guidance w the target is N(w m, s^2)."""
    m, s, path = 0.4, 0.5, []
    method, cfg = setup("dmd2", gan_weight=0.0, guidance=guidance, update_ratio=2, lr=1e-2, lr_fake=2e-2,
                        weight_decay=0.0)
    student, fake_score = Affine(0.0, 1.0, learn=True), Gauss(0.0, 1.0, learn=True)
    nets = dict(student=student, teacher=Gauss(m, s), fake_score=fake_score)
    opts, batch = method.optimizers(nets, cfg), labelled(torch.zeros(64, 1, 16, 16))
    torch.manual_seed(0)
    for it in range(1000):
        turn(nets, opts, method.phase(it, cfg))
        method.step(nets, batch, it, cfg)[0].backward()
        opts[method.phase(it, cfg)].step()
        path.append((student.std.item(), student.mean.item()))
    assert torch.tensor(path[-200:]).mean(0).tolist() == pytest.approx([s, guidance * m], rel=1e-9, abs=0.01)

@pytest.mark.parametrize("name", ["dmd2", "f_distill"])
def test_student_and_fake_score_start_where_they_are_told_or_from_the_teacher(name, runs):
    method, cfg = setup(name, student=str(runs / "dmd2"), fake_score=f"{runs / 'dmd2'}#fake_score")
    nets, held = nets_of(method, cfg), saved(runs / "dmd2", 2)["nets"]
    for net in "student", "fake_score":
        assert differing(nets[net].state_dict(), held[net]) == []
        assert differing(held[net], nets["teacher"].state_dict())
    inits = method.init(load(name).config)
    assert inits["student"] == inits["fake_score"] == "teacher"

def test_dmd2_builds_a_graph_of_the_student_alone():
    d, kept = dmd2(gan_weight=0.0), []
    turn(d.nets, d.method.optimizers(d.nets, d.cfg), "student")
    batch = batch_of(d.cfg)
    x = batch["x0"]
    for f in (lambda: d.nets["student"](80 * torch.randn_like(x), common.t_like(80, x), batch["cond"]),
              lambda: d.method.step(d.nets, batch, d.student, d.cfg)):
        sizes = []                                      # of what autograd keeps for the backward pass
        with torch.autograd.graph.saved_tensors_hooks(lambda v: sizes.append(v.numel()) or v, lambda v: v):
            f()
        kept.append(sum(sizes))
    assert 100 * x.numel() < kept[0] <= kept[1] < kept[0] + 10 * x.numel()

@pytest.mark.parametrize("features", ["fake_score", "teacher"])
def test_dmd2_gan_trains_the_fake_score_only_where_the_features_are_its_own(features, monkeypatch):
    light, heavy = (dmd2(gan_features=features, gan_d_weight=weight, gan_weight=weight, r1_weight=weight)
                    for weight in (1.0, 100.0))
    assert differing(light.step(light.student)[2], heavy.step(heavy.student)[2])    # gan_g, through either
    apart = differing(light.step(light.fake)[2], heavy.step(heavy.fake)[2])
    assert {path[1:].split(".")[0] for path in apart} == {"discriminator", features} - {"teacher"}
    seen, batch = spy(monkeypatch, common, "gan_loss_d"), batch_of(light.cfg)
    for x0 in (batch["x0"], -batch["x0"]):              # real comes first, and alone depends on the data
        one_step(light.method, light.nets, light.cfg, light.fake, batch | dict(x0=x0))
    (real, generated), (other, same) = (args[:2] for args, _ in seen)
    assert torch.equal(generated, same) and not torch.equal(real, other)

@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("kind", ["simulation", "data"])
def test_dmd2_multi_step_input_is_the_students_own_or_noised_data(kind, amp):
    d = dmd2(steps=2, student_input=kind, gan_weight=0.0, t_list=())
    ts, calls, exits, every = common.t_list("edm", 2), [], set(), list(d.nets["student"].parameters())
    d.nets["student"].register_forward_pre_hook(
        lambda net, args: calls.append((torch.is_grad_enabled(), args[0].detach(), args[1].tolist())))
    for it in range(d.student, 120, d.cfg["update_ratio"] + 1):
        calls.clear()
        d.nets["fake_score"].out.weight.data.mul_(1.01)
        batch = batch_of(d.cfg, it)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            grads = one_step(d.method, d.nets, d.cfg, it, batch)[2]
        assert len(grads) == len(every)                 # autocast may not reuse what it cast without gradient
        one_step(d.method, d.nets, d.cfg, it, batch | dict(x0=torch.zeros_like(batch["x0"])))
        (*before, (grad, x_t, t)), other = calls[:len(calls) // 2], calls[-1]
        assert grad and not any(grad for grad, *_ in before)
        if kind == "simulation":
            assert [t for *_, t in before] + [t] == [[ts[k]] * 8 for k in range(len(before) + 1)]
            assert len(before) == torch.randint(2, (), generator=common.shared_generator(d.cfg["seed"], it))
        else:
            assert not before
        exits |= {*t}
        assert amp or torch.equal(x_t, other[1]) == (kind == "simulation")      # does it depend on the data?
    assert exits == {*ts[:-1]}

def test_dmd2_generates_alike_in_training_and_sampling_with_the_steps_it_was_trained_for():
    """Backward simulation to the last step is the sampler: same noise, same result."""
    d = dmd2(steps=3)
    batch = batch_of(d.cfg)
    it = next(i for i in range(99) if torch.randint(3, (), generator=common.shared_generator(0, i)) == 2)
    common.seed_default(5)
    x = d.method.generate(d.nets["student"], batch, it, d.cfg)
    common.seed_default(5)
    noise = common.train_noise(x.shape, "cpu")
    assert torch.equal(x, d.method.sample(d.nets["student"], noise, batch, d.cfg, 3))
    for steps in (1, 4):
        refused(d.method.sample, d.nets["student"], noise, batch, d.cfg, steps,
                says=[f"trained for 3 steps, not for --steps {steps}"])
