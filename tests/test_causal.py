"""Causal video: the rollout and its four methods, against closed forms of the autoregressive Gaussian clip
x_1 ~ N(0, 1), x_f = a x_{f-1} + N(0, q^2), q^2 = 1 - a^2, whose frames are scalars (B, 1, F, 1, 1)."""
import numpy as np
import pytest
import torch

import common
import data
import make_pairs
import run
import sample
from nets import encoders
from run import batch_of, differing, gradients, nets_of, refused, setup, spy
from test_nets import shake

f64, A, FRAMES = torch.float64, 0.9, 5
SIGMA = A ** (torch.arange(FRAMES)[:, None] - torch.arange(FRAMES)).abs().to(f64)
VAR = torch.tensor([1.0, *[1 - A ** 2] * (FRAMES - 1)], dtype=f64)      # of a frame, given the one before
clip = lambda x: x[:, None, :, None, None]              # of (B, F)
flat = lambda x: x[:, 0, :, 0, 0]
process = lambda n: torch.randn(n, FRAMES, dtype=f64) @ torch.linalg.cholesky(SIGMA).T      # (n, F)
batch = lambda x0, **more: dict(x0=x0, cond={}, uncond={}) | more

class Net(torch.nn.Module):
    """f(net, x_t, t, the frame before, from the cache): of a masked clip, or of one frame in a rollout."""
    schedule, x_shape = "rf", (1, FRAMES, 1, 1)
    def __init__(self, f, pred="x0", chunk=1, **parameters):
        super().__init__()
        self.f, self.pred, self.chunk = f, pred, chunk
        for name, value in parameters.items():
            setattr(self, name, torch.nn.Parameter(torch.as_tensor(value, dtype=f64)))
    def forward(self, x_t, t, cond={}, start=0, cache=None, write=False):
        kv = x_t[:, 0, ..., None].detach()                                              # (B, F, 1, 1, 1)
        if cache:
            assert cache["pos"].tolist() == [*range(start)]
            kv = torch.cat([cache["kv"][0], kv], 1)
        if write:
            return dict(cache=dict(pos=torch.arange(kv.shape[1]), kv=[kv]))
        return self.f(self, x_t, t, kv[:, None, start - 1] if start else None)

def exact(net, y, t, before):
    """E[x | x_t, the frame before]."""
    t, mean, var = t[0], *((0, VAR[0]) if before is None else (A * before, VAR[1]))
    return mean + (1 - t) * var / ((1 - t) ** 2 * var + t ** 2) * (y - (1 - t) * mean)

def linear(pred, chunk, leak=0):
    """x_t -> W x_t over frames, W 0 where a frame does not see."""
    which = common.chunk_of(FRAMES, chunk, "cpu")
    sees = (which <= which[:, None]) | bool(leak)
    return Net(lambda net, x_t, t, _: clip(flat(x_t) @ (net.weight * sees).T), pred, chunk,
               weight=torch.zeros(FRAMES, FRAMES))

def fitted(method, net, some, cfg, **nets):
    """The loss of the best weights on one batch."""
    opt = torch.optim.LBFGS(net.parameters(), 1, 100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")
    def loss():
        opt.zero_grad()
        common.seed_default(1)
        value = method.step(dict(student=net) | nets, some, 0, cfg)[0]
        value.backward()
        return value
    return opt.step(loss) and loss().item()

def flow_error(weight, cov, t):
    """Mean squared error, over frames of this covariance at times t (F,), of the flow that a matrix (F, F)
    reads off x_t; None: the best one."""
    alpha, sigma = 1 - t, torch.diag(t)
    seen, both = alpha[:, None] * cov * alpha + sigma ** 2, sigma - alpha[:, None] * cov
    weight = torch.linalg.solve(seen, both).T if weight is None else weight
    return (weight @ seen @ weight.T - 2 * weight @ both + cov).diagonal().mean().item() + 1

# ---- the rollout
def by_hand(net, noise, ts, cond, uncond, guidance=1.0, kind="sde", context_noise=0.0):
    """The same without a cache, by forwards of the whole beginning under the mask."""
    seen, done = noise(0)[:, :, :0], []
    for size in common.chunks(noise(0).shape[2], net.chunk):
        start = seen.shape[2]
        new = lambda k: noise(k)[:, :, start:start + size]
        y = ts[0] * new(0)
        for k, (t, t_next) in enumerate(zip(ts, ts[1:])):
            t_all = torch.tensor([[context_noise] * start + [t] * size], dtype=f64).expand(len(y), -1)
            flow, free = (net(torch.cat([seen, y], 2), t_all, c)[:, :, start:] for c in (cond, uncond))
            flow = free + guidance * (flow - free)
            x = y - t * flow
            y = (1 - t_next) * x + t_next * (new(k + 1) if kind == "sde" else x + flow)
        done.append(x)
        seen = torch.cat([seen, (1 - context_noise) * x + context_noise * new(len(ts) - 1)], 2)
    return torch.cat(done, 2)

WAN = "wan:t2v_1_3b,x_shape=(1,6,8,8),depth=2,dim=24,heads=3,hidden=32,text_dim=20,freq=16"

@pytest.mark.parametrize("spec, frames, chunk, changes", [
    ("toy:video", 20, 3, dict(kind="ode")), ("toy:video", 3, 1, dict(context_noise=0.1)), (WAN, 1, 2, {}),
    (WAN, 6, 2, dict(guidance=2.5, kind="ode")), ("toy:video", 4, 2, dict(guidance=0.0)),
    (WAN, 9, 2, dict(window=5, sink=1)), (WAN, 7, 2, dict(window=2))])
def test_a_rollout_is_the_masked_forward_and_repeats_itself(spec, frames, chunk, changes):
    """A window of the rollout is that of a net which is built with it, and so trained under its mask."""
    own = {k: v for k, v in changes.items() if k in ("window", "sink")}
    net, masked = (common.make_net(spec, label_dim=3, chunk=chunk, **kw).double() for kw in ({}, own))
    masked.load_state_dict(shake(net).state_dict())
    draws, text = (torch.randn(*shape, dtype=f64, generator=torch.Generator().manual_seed(0))
                   for shape in ((5, 3, 1, frames, 8, 8), (3, 17, 20)))
    def roll(f, net, first=0, **how):
        cond, uncond = (dict(label=torch.tensor(labels[first:]), text=sign * text[first:])
                        for labels, sign in (([0, 2, 1], 1), ([-1, -1, -1], -1)))
        return f(net, lambda k: draws[k, first:], [0.999, 0.8, 0.5, 0.0], cond, uncond=uncond, **how)
    with torch.no_grad():
        copy, x, again = draws.clone(), *(roll(common.causal_rollout, net, **changes) for _ in range(2))
        expected = roll(by_hand, masked, **{k: v for k, v in changes.items() if k not in own})
        assert expected.std() > 0.1 and (x - expected).abs().max() < 1e-10
        assert torch.equal(again, x) and torch.equal(draws, copy)
        assert (roll(common.causal_rollout, net, 1, **changes) - x[1:]).abs().max() < 1e-10

def test_a_window_and_a_sink_are_what_a_chunk_sees_and_the_first_frames_stay_as_given():
    net, seen = common.make_net("toy:video", label_dim=3), []
    noise, first = common.train_noise((2, 1, 9, 8, 8), "cpu"), torch.randn(2, 1, 1, 8, 8)
    net.register_forward_pre_hook(lambda net, args, kw: seen.append(
        (kw["start"], kw["cache"]["pos"].tolist() if kw["cache"] else [])), with_kwargs=True)
    roll = lambda **kw: common.causal_rollout(net, noise, [0.9, 0.0], {}, **kw)
    x = roll(first=first, window=5, sink=2)
    assert torch.equal(x[:, :, :1], first) and x.shape == (2, 1, 9, 8, 8)
    past = {0: [], 1: [0], 3: [0, 1, 2], 5: [0, 1, 2, 3, 4], 7: [0, 1, 4, 5, 6]}
    assert seen == [(start, past[start]) for start in (0, 1, 1, 3, 3, 5, 5, 7)]     # is read, then written
    assert not torch.equal(roll(first=first)[:, :, 7:], roll(first=-first)[:, :, 7:])

FOUR, FIFTY = (0.999, 0.937, 0.833, 0.624), (*np.linspace(0.999, 0.02, 50),)

@pytest.mark.parametrize("ts, kind, variance, mean", [
    (FOUR[:1], "sde", 0.0, 1.0), (FOUR[::2], "sde", 0.007521, 1.0), (FOUR[::2], "ode", 0.007522, 0.999962),
    (FOUR, "sde", 0.060401, 1.0), (FOUR, "ode", 0.062432, 0.999891), (FIFTY, "sde", 0.457077, 1.0),
    (FIFTY, "ode", 0.939099, 0.999577)])
def test_few_steps_of_the_exact_denoiser_have_the_moments_of_the_recursion(ts, kind, variance, mean):
    """Variance of the innovation over q^2, coefficient of a x_{f-1}. Sample b < K has noise b alone, the last
    one the frame before alone: so their x are coefficients."""
    basis = torch.eye(len(ts) + 1, dtype=f64)
    x = common.causal_rollout(Net(exact), lambda k: clip(basis[k, :, None].expand(-1, 2)), [*ts, 0.0], {},
                              kind, first=clip(basis[-1, :, None]))
    *noises, before = flat(x)[:, 1].tolist()
    assert sum(c * c for c in noises) / VAR[1].item() == pytest.approx(variance, abs=2e-6)
    assert before / A == pytest.approx(mean, abs=2e-6)

# ---- causal_sft
def test_one_chunk_of_all_frames_is_sft_to_the_bit():
    losses, grads = [], []
    for name, changes in (("sft", dict(net="toy:video,chunk=0", data=run.clips("toy:video"))),
                          ("causal_sft", dict(chunk=6, clean_prefix=0.0))):
        method, cfg = setup(name, t_dist="shifted", t_shift=3.0, dropout=0.1, cond_dropout=0.2, **changes)
        nets = nets_of(method, cfg)
        common.seed_default(0)
        losses.append(method.step(nets, batch_of(cfg), 0, cfg)[0])
        losses[-1].backward()
        grads.append(gradients(nets))
    assert torch.equal(*losses) and differing(*grads) == []

@pytest.mark.parametrize("forcing, p", [("diffusion", 0.0), ("diffusion", 0.5), ("teacher", 0.0)])
def test_clean_frames_are_context_and_the_loss_is_a_mean_over_the_others_or_one_chunk(forcing, p):
    seen, (method, cfg) = [], setup("causal_sft", forcing=forcing, clean_prefix=p, cond_dropout=0.0)
    x0 = clip(torch.randn(900, 6, dtype=f64))
    out = torch.zeros_like(x0, requires_grad=True)
    blind = Net(lambda net, x_t, t, _: seen.extend([x_t, t]) or out, chunk=2)
    loss, (x_t, t) = method.step(dict(student=blind), batch(x0), 0, cfg)[0], seen
    weight = flat(torch.autograd.grad(loss, out)[0] / x0) * -450        # of a frame, over 6
    own, clean = weight > 0, t == 0
    assert torch.equal(flat(x_t == x0), clean) and torch.equal(t[:, ::2], t[:, 1::2])
    assert torch.allclose(weight, own / own.sum(1, keepdim=True, dtype=f64))
    share = dict(diffusion=p, teacher=1.0)[forcing] / 3                 # of 2, and of 4 clean frames
    for n in (2, 4):
        assert (clean.sum(1) == n).double().mean().item() == pytest.approx(share, abs=0.05)
    assert forcing == "teacher" or torch.equal(own, ~clean)
    assert forcing == "diffusion" or torch.equal(own.int().argmax(1), clean.sum(1)) and own.sum() == 1800

@pytest.mark.parametrize("chunk, leak, floor", [(1, 0, 0.959272), (5, 0, 0.904540), (1, 1, 0.904540)])
def test_causal_sft_reaches_the_causal_minimum_and_passes_it_by_a_leak_alone(chunk, leak, floor, monkeypatch):
    t = torch.tensor([0.3, 0.9, 0.5, 0.999, 0.7], dtype=f64)
    monkeypatch.setattr(common, "per_chunk", lambda draw, x, chunk: t.expand(len(x), -1))
    method, cfg = setup("causal_sft", clean_prefix=0.0, cond_dropout=0.0)
    torch.manual_seed(0)
    net = linear("flow", chunk, leak)
    assert fitted(method, net, batch(clip(process(20000))), cfg) == pytest.approx(floor, abs=0.02)
    assert floor - 1e-6 < flow_error(net.weight, SIGMA, t) < floor + 2e-3   # of the process, not of the batch
    assert chunk + 4 * leak == 1 or flow_error(None, SIGMA, t) == pytest.approx(floor, abs=1e-6)

def test_the_bell_has_mean_one_its_top_in_the_middle_and_nothing_at_pure_noise():
    method, cfg = setup("causal_sft", t_shift=5.0)
    bell = lambda t: method.bell_of(t, "rf", cfg)
    assert bell(w := torch.linspace(0, 1, 1001, dtype=f64)).argmax() == 500 and bell(w)[-1] == 0
    drawn = common.sample_t(100000, schedule="rf", device="cpu", **method.times(cfg))
    assert bell(drawn).mean().item() == pytest.approx(1, abs=0.01)

@pytest.mark.parametrize("name", ["causal_sft", "causal_kd", "causvid"])
def test_a_window_that_training_under_the_mask_does_not_have_is_refused(name):
    def build(net, **changes):
        method = run.load(name)
        return method.build(run.train.resolve(method, [])[0] | dict(net=net, classes=10) | changes)
    refused(build, "toy:video", window=5, sink=1, says=["--window 5 --sink 1", "6 frames", "window=5,sink=1"])
    refused(build, WAN + ",window=5", window=4, says=["--window 4"])
    for net, changes in (("toy:video", dict(window=6)), (WAN + ",window=5,sink=1", dict(window=5, sink=1))):
        build(net, **changes)

# ---- causal_kd
RESIDUAL = {(0.999, 1): (.4000, .3190, .2623, .1877, 0), (0.999, 2): (.1114, .1576, .2623, 0, 0),
            (0.833, 1): (.3717, .2873, .2332, .1670, 0), (0.624, 1): (.2312, .1532, .1211, .0911, 0),
            (0.999, FRAMES): (0,)}

@pytest.mark.parametrize("t, chunk", RESIDUAL)
def test_pairs_of_a_bidirectional_teacher_leave_a_causal_student_its_residual(t, chunk, monkeypatch):
    values, u = torch.linalg.eigh(SIGMA)
    std = ((1 - t) ** 2 * values + t ** 2).sqrt()
    n = torch.randn(20000, FRAMES, dtype=f64, generator=torch.Generator().manual_seed(0))
    x_t, x0 = (clip(n * s @ u.T) for s in (std, values.sqrt()))         # where the ODE ends
    monkeypatch.setattr(common, "per_chunk", lambda draw, x, chunk: torch.zeros(*x.shape[:3:2]).long())
    method, cfg = setup("causal_kd", pairs="clip", steps=1, t_list=(t,))
    pairs = batch(x0, path=x_t[:, None], path_t=torch.tensor([t], dtype=f64))
    loss = fitted(method, linear("x0", chunk), pairs, cfg)
    assert loss == pytest.approx(0.5 * sum(RESIDUAL[t, chunk]) / FRAMES, rel=0.03, abs=1e-6)

def test_a_causal_teachers_pairs_follow_from_the_datas_past_and_leave_no_residual():
    torch.manual_seed(0)
    x0, ts, seen = process(64), [0.999, 0.8, 0.0], []
    def solution(x_t, t, past):
        """Where the ODE ends from x_t at t, in closed form, after clean frames of `past`."""
        mean = torch.cat([torch.zeros(64, 1), A * past[:, :-1]], 1)
        return mean + (VAR / ((1 - t) ** 2 * VAR + t ** 2)).sqrt() * (x_t - (1 - t) * mean)
    meta = dict(labels=None, classes=0, seed=0, shape=Net.x_shape, guidance=1.0, path_t=ts, solver="heun",
                steps=300)
    path = torch.from_numpy(make_pairs.solve(Net(exact), meta, range(64), "cpu", clip(x0))).double()
    assert torch.allclose(flat(path[:, 3]), x0) and all(
        torch.allclose(solution(flat(path[:, k]), ts[k], x0), flat(path[:, 2]), atol=2e-3) for k in (0, 1))
    method, cfg = setup("causal_kd", steps=2, t_list=ts)
    student = Net(lambda net, x_t, t, _: seen.append(t) or clip(solution(flat(x_t), t, flat(x_t))))
    for past, low, high in ((x0, 0, 1e-5), (-x0, 0.1, 9)):              # another past is another future
        pairs = batch(clip(past), path=path[:, :3], path_t=torch.tensor(ts, dtype=f64))
        assert low <= method.step(dict(student=student), pairs, 0, cfg)[0] < high
    assert {*seen[0].flatten().tolist()} == {*ts}

def test_pairs_of_other_chunks_are_refused():
    for name, pairs, words in (("causal_kd", "toy:video,chunk=0", "chunk 0, this run has 2"),
                               ("kd", "toy:video", "chunk 2, this run has 0")):
        method, cfg = setup(name, net="toy:video", data=run.pairs(pairs), steps=1, t_list=(0.999,))
        refused(method.check, data.load(cfg), nets_of(method, cfg), cfg, says=[words])

# ---- causvid, self_forcing
def test_causvid_sees_chunks_of_the_data_at_its_own_times_or_clean_and_the_first_as_pure_noise():
    method, cfg = setup("causvid", clean_prefix=0.0)
    x0, seen, ts = clip(torch.randn(900, 7, dtype=f64)), [], [*cfg["t_list"], 0.0]
    student = Net(lambda net, x_t, t, _: seen.extend([flat(x_t), t]) or x_t, chunk=3)
    for x in (x0, -x0):
        common.seed_default(0)
        method.generate(student, batch(x), 0, cfg)
    x_t, t, other, _ = seen
    assert torch.allclose(x_t - other, 2 * (1 - t) * (t < ts[0]) * flat(x0), atol=1e-6)
    assert torch.allclose((x_t + other).std(0), 2 * t.square().mean(0).sqrt(), rtol=0.1)
    assert torch.equal(t, t[:, [0] * 4 + [4] * 3]) and torch.corrcoef(t[:, ::4].T)[0, 1].abs() < 0.1
    assert [(t == s).double().mean().item() for s in ts] == pytest.approx([0.2] * 5, abs=0.04)
    method.generate(student, batch(x0), 0, cfg | dict(clean_prefix=0.5))        # half of half begin clean
    clean = (seen[-1] == 0).double().mean(0)[[0, 6]].tolist()
    assert clean == pytest.approx([0.25 + 0.75 * 0.2, 0.2], abs=0.04)

@pytest.mark.parametrize("name", ["causvid", "self_forcing"])
def test_the_fake_score_learns_the_clips_that_the_student_makes(name):
    """Its loss ends at that of the best linear score for their covariance, not the data's."""
    method, cfg = setup(name, steps=1, t_list=(0.999,), t_min=0.5, t_max=0.5, gan_weight=0.0,
                        **dict(frames_max=0) if name == "self_forcing" else dict(clean_prefix=0.0))
    torch.manual_seed(0)
    maker, t = torch.randn(FRAMES, FRAMES, dtype=f64).tril(), torch.full((FRAMES,), 0.5, dtype=f64)
    student, real = Net(lambda net, x_t, *_: clip(flat(x_t) @ maker.T)), process(20000)
    cov = maker @ ((SIGMA + torch.eye(FRAMES) * (1 + 2 * 0.999 ** 2)) / 4) @ maker.T    # half are noise
    if name == "self_forcing":                              # x_1 = e_1, x_f = 0.5 x_{f-1} + 0.7 e_f
        student = Net(lambda net, y, t, x: y.double() / t[0] if x is None else 0.5 * x + 0.7 * y / t[0])
        lower = (0.5 ** (SIGMA.log() / np.log(A))).tril() * torch.tensor([1, 0.7, 0.7, 0.7, 0.7])
        cov = lower @ lower.T
    fake = linear("flow", FRAMES)
    loss = fitted(method, fake, batch(clip(real)), cfg, student=student, fake_score=fake)
    floor = flow_error(None, cov, t)
    assert loss == pytest.approx(floor, rel=0.02) and abs(flow_error(None, SIGMA, t) / floor - 1) > 0.05
    assert floor - 1e-6 < flow_error(fake.weight, cov, t) < 1.005 * floor

def trained(changes):
    changes = dict(max_iter=2, update_ratio=1, amp="bf16", frames_max=10) | changes
    return run.run(*setup("self_forcing", **changes)).lines

def test_a_rollout_in_shards_gathered_in_bf16_is_that_of_one_process():
    one = trained(dict(accum=2, name="one"))
    ours = run.ranks(2, trained, dict(parallel="fsdp", name="shards"), timeout_s=900)[0]
    for line, same, keys in zip(one, ours, (("loss_fake", "norm_fake"), ("loss", "norm")), strict=True):
        assert [same[k] for k in keys] == pytest.approx([line[k] for k in keys], rel=0.05)

@pytest.mark.parametrize("call, changes", [(0, {}), (3, {}), (2, dict(grad_chunks=1)), (1, dict(
    last_step_only=True)), (1, dict(frames_max=11)), (1, dict(frames_max=10, grad_chunks=1))])
def test_the_graph_is_of_the_exit_call_of_each_chunk_alone(call, changes, monkeypatch):
    method, cfg = setup("self_forcing", **dict(frames_max=0) | changes)
    nets, calls, rolled = nets_of(method, cfg), [], spy(monkeypatch, common, "causal_rollout")
    nets["student"].register_forward_hook(
        lambda net, args, out: calls.append((torch.is_grad_enabled(), common.prediction(out))))
    draws = iter([call, 99])                            # the exit, as many further chunks as there may be
    monkeypatch.setattr(torch, "randint", lambda high, *a, **k: torch.tensor(min(next(draws), high - 1)))
    x = method.generate(nets["student"], batch_of(cfg), 0, cfg)
    n = 3 + max(cfg["frames_max"] - 6, 0) // 2          # chunks
    last, outs = 3 if cfg["last_step_only"] else call, [out for grad, out in calls if grad]
    assert len(outs) == (cfg["grad_chunks"] or (2 if n > 3 else 3))     # a window's first chunk has none
    assert len(calls) == n * (last + 2) - 1 and torch.equal(x, rolled[0][1][:, :, -6:])
    for i, out in enumerate(outs, 3 - len(outs)):       # a chunk depends on its own call alone
        grad = torch.autograd.grad(x[:, :, 2 * i:2 * i + 2].sum(), outs, retain_graph=True)
        assert [g is out or bool(g.any()) for g in grad] == [other is out for other in outs]

def test_memory_depends_on_the_chunks_with_a_gradient_and_their_cache_alone():
    def kept(frames, call, grad_chunks):
        sizes, noise = [], common.train_noise((2, 1, frames, 8, 8), "cpu")
        with torch.autograd.graph.saved_tensors_hooks(lambda v: sizes.append(v.numel()) or v, lambda v: v):
            common.causal_rollout(common.make_net("toy:video"), noise, [*FOUR, 0.0], {}, call=call,
                                  grad_chunks=grad_chunks)
        return sum(sizes)
    assert kept(8, 0, 0) == kept(8, 3, 0) > 3.5 * kept(2, 0, 0)
    one, two, four = (kept(frames, 3, 1) for frames in (8, 16, 32))
    assert four - two == 2 * (two - one) and two - one < kept(8, 3, 0) / 4

@pytest.mark.parametrize("changes", [{}, dict(window=4, sink=1, context_noise=0.1, sampler="ode"),
                                     dict(first_frame=True)])
def test_training_generates_as_the_sampler_does_where_the_exit_is_the_last_step(changes):
    method, cfg = setup("self_forcing", last_step_only=True, frames_max=0, **changes)
    net, some = nets_of(method, cfg)["student"], batch_of(cfg)
    common.seed_default(5)
    x = method.generate(net, some, 0, cfg)
    common.seed_default(5)
    assert torch.equal(x, method.sample(net, common.train_noise(x.shape, "cpu"), some, cfg, 4))
    assert torch.equal(x[:, :, :1], some["x0"][:, :, :1]) == cfg["first_frame"]
    refused(method.sample, net, None, some, cfg, 2, says=["trained for 4 steps"])
    some["cond"] |= dict(first_frame=some["x0"][:, :, :3])              # given, whatever the training had
    x = method.sample(net, common.train_noise(x.shape, "cpu"), some, cfg, 4)
    assert torch.equal(x[:, :, :3], some["x0"][:, :, :3])

def test_a_longer_clips_window_begins_with_a_frame_encoded_as_an_image(tmp_path):
    vae = pytest.importorskip("diffusers").AutoencoderKLWan(
        base_dim=4, z_dim=2, dim_mult=[1] * 4, num_res_blocks=1, latents_mean=[.1] * 2, latents_std=[2.] * 2)
    vae.eval().save_pretrained(tmp_path)
    cfg = dict(encoders=str(tmp_path), encoder_dtype="", offline=True, encoder_offload=False)
    with torch.no_grad():
        pixels = vae.decode(2 * (z := torch.randn(2, 2, 3, 2, 2)) + 0.1).sample
        expected = vae.encode(pixels[:, :, 8:]).latent_dist.mean / 2 - 0.05
    assert torch.allclose(encoders.last_frame(z, cfg), expected, atol=1e-5)
    assert sample.pixels(cfg, 2) == 5 and encoders.moments(pixels[:, :, -5:], cfg, "cpu").shape[2] == 2
    assert torch.equal(encoders.last_frame(z, dict(encoders="")), z[:, :, 2:])

def test_skip_layer_guidance_leaves_blocks_out_of_the_unconditional_pass():
    net, x, t = common.make_net("toy:video", label_dim=3), torch.randn(2, 1, 6, 8, 8), torch.full((2,), 0.6)
    cond, uncond = (dict(label=torch.full((2,), n)) for n in (1, -1))
    out = common.predict(net, x, t, cond, "flow", uncond, 3.0, dict(skip=(1,)))
    assert torch.allclose(out, 3 * net(x, t, cond) - 2 * net(x, t, uncond, skip=(1,)), atol=1e-5)

@pytest.mark.slow
def test_self_forcing_ends_at_the_process():
    """x_1 = c0 e_1, x_f = b x_{f-1} + c e_f, both scores exact: c0, b, c end at 1, a, q."""
    method, cfg = setup("self_forcing", steps=1, t_list=(0.999,), frames_max=0, gan_weight=0.0)
    student = Net(lambda net, y, t, x: net.c0 * y / t[0] if x is None else net.b * x + net.c * y / t[0],
                  c0=0.5, b=0.2, c=1.0)
    def score(cov):
        (values, u), square = torch.linalg.eigh(cov), lambda t: (1 - t) ** 2 * values + t ** 2
        return lambda net, x_t, t, _: clip((flat(x_t).double() @ u) * (
            (1 - t[:, None]) * values / square(t[:, None])) @ u.T)
    opt, lag = torch.optim.Adam(student.parameters(), betas=(0.0, 0.999)), SIGMA.log() / np.log(A)
    nets = dict(student=student, teacher=Net(score(SIGMA)), fake_score=Net(None))
    torch.manual_seed(0)
    for it in range(3000):
        opt.param_groups[0]["lr"] = 5e-3 * (1 - it / 3000)
        c0, b, c = (p.detach() for p in student.parameters())
        lower = (b ** lag).tril() * torch.stack([c0, c, c, c, c])       # what it makes now: x = lower e
        nets["fake_score"].f = score(lower @ lower.T)
        opt.zero_grad()
        method.step(nets, batch(torch.zeros(256, 1, FRAMES, 1, 1)), 5, cfg)[0].backward()
        opt.step()
    assert [p.item() for p in student.parameters()] == pytest.approx([1, A, VAR[1].item() ** 0.5], abs=2e-3)
