"""Causal video: the rollout and its four methods, against closed forms of the autoregressive Gaussian clip
x_1 ~ N(0, 1), x_f = a x_{f-1} + N(0, q^2), q^2 = 1 - a^2, whose frames are scalars (B, 1, F, 1, 1)."""
import math

import numpy as np
import pytest
import torch

import common
import data
import make_pairs
import run
from nets import encoders
from run import batch_of, differing, gradients, load, nets_of, refused, setup, spy, turn

f64, A, FRAMES = torch.float64, 0.9, 5
SIGMA = A ** (torch.arange(FRAMES)[:, None] - torch.arange(FRAMES)).abs().to(f64)
METHODS = "causal_sft", "causal_kd", "causvid", "self_forcing"

def clip(x):
    """(B, F) as a clip."""
    return x[:, None, :, None, None]

def process(n):
    """n clips (n, F) of the process."""
    return torch.randn(n, FRAMES, dtype=f64) @ torch.linalg.cholesky(SIGMA).T

class Frames(torch.nn.Module):
    """A causal net of scalar frames, one a chunk: x0 = f(x_t, t, the clean frame before, None at the first)."""
    schedule, pred, chunk, x_shape = "rf", "x0", 1, (1, FRAMES, 1, 1)
    def __init__(self, f, **parameters):
        super().__init__()
        self.f = f
        for name, value in parameters.items():
            setattr(self, name, torch.nn.Parameter(torch.tensor(value, dtype=f64)))
    def forward(self, x_t, t, cond={}, start=0, cache=None, write=False):
        kv = x_t[:, 0, :, :, :, None].detach()                                          # (B, F, 1, 1, 1)
        if cache:
            assert cache["pos"].tolist() == [*range(start)]
            kv = torch.cat([cache["kv"][0], kv], 1)
        if write:
            return dict(cache=dict(pos=torch.arange(kv.shape[1]), kv=[kv]))
        return self.f(self, x_t, common.expand(t, x_t), kv[:, None, start - 1:start] if start else None)

def exact(net, y, t, before):
    """E[x | x_t, the frame before]."""
    mean, var = (0, 1.0) if before is None else (A * before[..., 0], 1 - A ** 2)
    return mean + (1 - t) * var / ((1 - t) ** 2 * var + t ** 2) * (y - (1 - t) * mean)

class Linear(torch.nn.Module):
    """out = W x_t over frames, W 0 where a frame does not see."""
    schedule = "rf"
    def __init__(self, pred, chunk, leak=False):
        super().__init__()
        which = common.chunk_of(FRAMES, chunk, "cpu")
        self.pred, self.chunk, self.sees = pred, chunk, leak | (which <= which[:, None])
        self.weight = torch.nn.Parameter(torch.zeros(FRAMES, FRAMES, dtype=f64))
    def forward(self, x_t, t, cond):
        return clip(x_t[:, 0, :, 0, 0] @ (self.weight * self.sees).T)

def fitted(method, net, batch, cfg):
    """The loss of the best weights on one batch."""
    opt = torch.optim.LBFGS(net.parameters(), max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")
    def closure():
        opt.zero_grad()
        common.seed_default(1)
        loss = method.step(dict(student=net), batch, 0, cfg)[0]
        loss.backward()
        return loss
    opt.step(closure)
    return closure().item()

def batch(x0, **more):
    return dict(x0=x0, cond={}, uncond={}) | more

# ---- chunks
def test_chunks_and_what_is_drawn_for_them():
    assert [common.chunks(*n) for n in ((8, 3), (2, 3), (6, 2), (7, 0), (5, 1))] == [
        [5, 3], [2], [2, 2, 2], [7], [1] * 5]
    x = torch.zeros(4000, 1, 8, 1, 1)
    torch.manual_seed(0)
    k = common.per_chunk(lambda n: torch.randint(5, (n,)), x, 3)
    assert k.shape == (4000, 8) and (k[:, :5] == k[:, :1]).all() and (k[:, 5:] == k[:, 5:6]).all()
    assert (k.flatten().bincount() / k.numel()).tolist() == pytest.approx([0.2] * 5, abs=0.01)
    assert torch.corrcoef(k[:, [0, 5]].T.double())[0, 1].abs() < 0.05
    clean, own = common.split_at_chunk(x, 3)
    assert {(*map(int, row),) for row in torch.cat([clean, own], 1)} == {
        (0,) * 8 + (1,) * 5 + (0,) * 3, (1,) * 5 + (0,) * 3 + (0,) * 5 + (1,) * 3}
    assert own[:, 0].double().mean().item() == pytest.approx(0.5, abs=0.03)
    weight = common.over_frames(own)
    assert torch.equal(weight > 0, own) and torch.allclose(weight.mean(1), torch.ones(4000))
    assert not common.over_frames(own & clean).any()

# ---- the rollout
def by_hand(net, noise, ts, cond, uncond, guidance=1.0, kind="sde", context_noise=0.0):
    """The same without a cache, by forwards of the whole beginning under the mask."""
    seen, done = noise(0)[:, :, :0], []
    for size in common.chunks(noise(0).shape[2], net.chunk):
        start = seen.shape[2]
        new = lambda k: noise(k)[:, :, start:start + size]
        y = ts[0] * new(0)
        for k, (t, t_next) in enumerate(zip(ts, ts[1:])):
            x_all = torch.cat([seen, y], 2)
            t_all = torch.tensor([[context_noise] * start + [t] * size], dtype=f64).expand(len(y), -1)
            flow, free = (net(x_all, t_all, c)[:, :, start:] for c in (cond, uncond))
            flow = free + guidance * (flow - free)
            x = y - t * flow
            y = (1 - t_next) * x + t_next * (new(k + 1) if kind == "sde" else x + flow)
        done.append(x)
        seen = torch.cat([seen, (1 - context_noise) * x + context_noise * new(len(ts) - 1)], 2)
    return torch.cat(done, 2)

@pytest.mark.parametrize("frames, chunk, changes", [
    (6, 2, {}), (7, 3, dict(kind="ode")), (3, 1, dict(context_noise=0.1)), (2, 3, {}),
    (6, 2, dict(guidance=2.5, kind="ode")), (4, 2, dict(guidance=0.0))])
def test_a_rollout_is_the_masked_forward_and_repeats_itself(frames, chunk, changes):
    net = common.make_net(f"toy:video,chunk={chunk}", label_dim=3).double()
    draws = torch.randn(5, 2, 1, frames, 8, 8, dtype=f64, generator=torch.Generator().manual_seed(0))
    conds = [dict(label=torch.tensor([0, 2])), dict(label=torch.tensor([-1, -1]))]
    def roll(f, draws, first=0):
        cond, uncond = (dict(label=c["label"][first:]) for c in conds)
        return f(net, draws.__getitem__, [0.999, 0.8, 0.5, 0.0], cond, uncond=uncond, **changes)
    with torch.no_grad():
        copy, x, expected = draws.clone(), roll(common.causal_rollout, draws), roll(by_hand, draws)
        assert expected.std() > 0.1 and (x - expected).abs().max() < 1e-10
        assert torch.equal(roll(common.causal_rollout, draws), x) and torch.equal(draws, copy)
        assert (roll(common.causal_rollout, draws[:, 1:], 1) - x[1:]).abs().max() < 1e-10

def test_a_window_and_a_sink_are_what_a_chunk_sees_and_the_first_frames_stay_as_given():
    net = common.make_net("toy:video", label_dim=3)
    noise, seen, first = common.train_noise((2, 1, 9, 8, 8), "cpu"), [], torch.randn(2, 1, 1, 8, 8)
    net.register_forward_pre_hook(lambda net, args, kw: seen.append(
        (kw["start"], kw["cache"]["pos"].tolist() if kw["cache"] else [], kw.get("write", False))), with_kwargs=True)
    roll = lambda **kw: common.causal_rollout(net, noise, [0.9, 0.0], {}, **kw)
    x = roll(first=first, window=5, sink=2)
    assert torch.equal(x[:, :, :1], first) and x.shape == (2, 1, 9, 8, 8)
    assert seen == [(0, [], True), *((start, past, write) for start, past in (
        (1, [0]), (3, [0, 1, 2]), (5, [0, 1, 2, 3, 4]), (7, [0, 1, 4, 5, 6])) for write in (False, True))][:-1]
    assert torch.equal(roll(first=first, window=9), roll(first=first))
    assert not torch.equal(roll(first=first), roll(first=-first))       # chunks see what was before

# a = 0.9: variance of the innovation over q^2 (of the process: 1), and the coefficient of a x_{f-1}
TABLE = [((0.999,), "sde", 0.000000, 1.000000), ((0.999, 0.833), "sde", 0.007521, 1.000000),
         ((0.999, 0.833), "ode", 0.007522, 0.999962), ((0.999, 0.937, 0.833, 0.624), "sde", 0.060401, 1.000000),
         ((0.999, 0.937, 0.833, 0.624), "ode", 0.062432, 0.999891),
         (np.linspace(0.999, 0.02, 50), "sde", 0.457077, 1.0), (np.linspace(0.999, 0.02, 50), "ode", 0.939099, 0.999577)]

@pytest.mark.parametrize("ts, kind, variance, coefficient", TABLE, ids=str)
def test_the_few_step_sampler_has_the_moments_of_the_linear_recursion(ts, kind, variance, coefficient):
    """Sample b < K has noise k = b alone, the last one the frame before alone: their x are the coefficients."""
    steps, q2 = len(ts), 1 - A ** 2
    basis = torch.eye(steps + 1, dtype=f64)
    noise = lambda k: clip(torch.stack([basis[k], basis[k]], 1))
    x = common.causal_rollout(Frames(exact), noise, [*map(float, ts), 0.0], {}, kind,
                              first=clip(basis[steps][:, None]))[:, 0, 1, 0, 0]
    assert x[:-1].square().sum().item() / q2 == pytest.approx(variance, abs=2e-6)
    assert x[-1].item() / A == pytest.approx(coefficient, abs=2e-6)

# ---- causal_sft
def test_one_chunk_of_all_frames_is_sft_to_the_bit():
    results = []
    for name, changes in (("sft", dict(net="toy:video,chunk=0", data=run.clips("toy:video"), cond_keep=())),
                          ("causal_sft", dict(net="toy:video", chunk=6))):
        method, cfg = setup(name, **changes, t_dist="shifted", t_shift=3.0, dropout=0.1, cond_dropout=0.2,
                            **dict(clean_prefix=0.0) if name == "causal_sft" else {})
        nets = nets_of(method, cfg)
        common.seed_default(0)
        loss, _ = method.step(nets, batch_of(cfg), 0, cfg)
        loss.backward()
        results.append((loss.detach(), gradients(nets)))
    assert differing(dict(x=results[0][1]), dict(x=results[1][1])) == [] and torch.equal(*[r[0] for r in results])

@pytest.mark.parametrize("forcing, p", [("diffusion", 0.0), ("diffusion", 0.5), ("teacher", 0.0)])
def test_clean_frames_are_context_and_the_loss_is_a_mean_over_its_own(forcing, p):
    seen = []
    class Blind(torch.nn.Module):
        schedule, pred, chunk = "rf", "x0", 2
        def forward(self, x_t, t, cond):
            seen.append((x_t, t, torch.zeros_like(x_t, requires_grad=True)))
            return seen[-1][2]
    method, cfg = setup("causal_sft", forcing=forcing, clean_prefix=p, chunk=2, cond_dropout=0.0)
    x0 = clip(torch.randn(900, 6, dtype=f64))
    loss = method.step(dict(student=Blind()), batch(x0), 0, cfg)[0]
    (x_t, t, out), = seen
    clean, own = t == 0, (torch.autograd.grad(loss, out)[0] / x0)[:, 0, :, 0, 0] * -450    # weights / F
    assert torch.equal((x_t == x0)[:, 0, :, 0, 0], clean)
    assert torch.allclose(own.sum(1), torch.ones(900, dtype=f64))       # a mean in every clip
    assert all(torch.allclose(row[row > 0], row.max()) for row in own) and (t[:, ::2] == t[:, 1::2]).all()
    beginnings = {n: (clean.sum(1) == n).double().mean().item() for n in (0, 2, 4)}
    share = dict(diffusion=p, teacher=1.0)[forcing] / 3
    assert beginnings == {0: pytest.approx(1 - 2 * share, abs=0.05), 2: pytest.approx(share, abs=0.05),
                          4: pytest.approx(share, abs=0.05)}
    assert ((own > 0).sum(1) == (2 if forcing == "teacher" else 6 - clean.sum(1))).all()
    assert not (clean & (own > 0)).any()

@pytest.mark.parametrize("chunk, leak, floor", [(1, False, 0.959272), (FRAMES, False, 0.904540), (1, True, 0.904540)])
def test_causal_sft_reaches_the_causal_minimum_and_passes_it_only_with_a_leak(chunk, leak, floor, monkeypatch):
    t = torch.tensor([0.3, 0.9, 0.5, 0.999, 0.7], dtype=f64)
    monkeypatch.setattr(common, "per_chunk", lambda draw, x, chunk: t.expand(len(x), -1))
    method, cfg = setup("causal_sft", clean_prefix=0.0, cond_dropout=0.0)
    torch.manual_seed(0)
    net = Linear("flow", chunk, leak)
    loss, w = fitted(method, net, batch(clip(process(20000))), cfg), net.weight.detach() * net.sees
    alpha, noise = torch.diag(1 - t), torch.diag(t)
    reached = w @ (alpha @ SIGMA @ alpha + noise ** 2) @ w.T - 2 * w @ (noise - alpha @ SIGMA) + SIGMA + torch.eye(FRAMES)
    reached = reached.diagonal().mean().item()          # of the process itself, not of the batch
    assert floor - 1e-6 < reached < floor + 2e-3 and loss == pytest.approx(floor, abs=0.02)

def test_the_bell_has_mean_one_and_no_weight_at_pure_noise():
    method, cfg = setup("causal_sft", loss_weight="bell", t_shift=5.0)
    t = common.sample_t(100000, schedule="rf", device="cpu", **method.times(cfg))
    w = method.bell_of(t, "rf", cfg)
    assert w.mean().item() == pytest.approx(1, abs=0.01) and w[t > 0.998].max() < 0.02
    assert t[w.argmax()].item() == pytest.approx(0.5, abs=0.01)

# ---- causal_kd
RESIDUAL = {(0.999, 1): (.4000, .3190, .2623, .1877, 0), (0.999, 2): (.1114, .1576, .2623, 0, 0),
            (0.833, 1): (.3717, .2873, .2332, .1670, 0), (0.624, 1): (.2312, .1532, .1211, .0911, 0),
            (0.999, FRAMES): (0, 0, 0, 0, 0)}

@pytest.mark.parametrize("t, chunk", RESIDUAL)
def test_pairs_of_a_bidirectional_teacher_leave_a_causal_student_its_residual(t, chunk, monkeypatch):
    values, u = torch.linalg.eigh(SIGMA)
    x_t = torch.randn(20000, FRAMES, dtype=f64) @ (u * ((1 - t) ** 2 * values + t ** 2).sqrt()).T
    x0 = x_t @ u @ torch.diag((values / ((1 - t) ** 2 * values + t ** 2)).sqrt()) @ u.T     # where the ODE ends
    monkeypatch.setattr(common, "per_chunk", lambda draw, x, chunk: torch.zeros(len(x), FRAMES, dtype=torch.int64))
    method, cfg = setup("causal_kd", pairs="clip", steps=1, t_list=(t,))
    pairs = batch(clip(x0), path=clip(x_t)[:, None], path_t=torch.tensor([t], dtype=f64))
    loss = fitted(method, Linear("x0", chunk), pairs, cfg)
    assert loss == pytest.approx(0.5 * sum(RESIDUAL[t, chunk]) / FRAMES, rel=0.03, abs=1e-6)

def test_a_causal_teachers_pairs_follow_from_the_datas_past_and_leave_no_residual():
    method, cfg = setup("causal_kd", steps=2, t_list=(0.999, 0.8))
    torch.manual_seed(0)
    x0, ts = process(64), [0.999, 0.8]
    meta = dict(labels=None, classes=0, seed=0, shape=(1, FRAMES, 1, 1), guidance=1.0, path_t=[*ts, 0.0], solver="heun",
                steps=300)
    path = torch.from_numpy(make_pairs.solve(Frames(exact), meta, range(64), "cpu", clip(x0))).double()
    mean = torch.cat([torch.zeros(64, 1), A * x0[:, :-1]], 1)
    q2 = torch.tensor([1.0, *[1 - A ** 2] * (FRAMES - 1)])
    scale = [(q2 / ((1 - t) ** 2 * q2 + t ** 2)).sqrt() for t in ts]
    assert torch.allclose(path[:, 3], clip(x0).float().double())
    for k, t in enumerate(ts):                          # the ODE's map from t to 0, in closed form
        assert torch.allclose(clip(mean + scale[k] * (path[:, k, 0, :, 0, 0] - (1 - t) * mean)), path[:, 2], atol=2e-3)
    seen = []
    class Map(torch.nn.Module):
        schedule, pred, chunk = "rf", "x0", 1
        def forward(self, x_t, t, cond):
            seen.append(t)
            y = x_t[:, 0, :, 0, 0]
            before = torch.cat([torch.zeros(64, 1), A * y[:, :-1]], 1)
            return clip(before + (q2 / ((1 - t) ** 2 * q2 + t ** 2)).sqrt() * (y - (1 - t) * before))
    pairs = batch(clip(x0), path=path[:, :3], path_t=torch.tensor([*ts, 0.0], dtype=f64))
    assert method.step(dict(student=Map()), pairs, 0, cfg)[0] < 1e-5
    assert {*seen[0].flatten().tolist()} == {*ts, 0.0}
    pairs["x0"] = -pairs["x0"]                          # another past is another future
    assert method.step(dict(student=Map()), pairs, 0, cfg)[0] > 0.1

def test_pairs_that_are_not_the_students_are_refused():
    for net, changes, words in (("toy:video", dict(pairs="clip"), ["chunk 2", "has 0"]),
                                ("toy:video", dict(chunk=3), ["chunk 2", "has 3"]),
                                ("toy:video,chunk=0", {}, ["chunk 0", "has 2"]),
                                ("toy:video", dict(t_list=(0.999, 0.9, 0.8, 0.7)), ["--path_t 0.999,0.9,0.8,0.7"])):
        method, cfg = setup("causal_kd", data=run.pairs(net), **changes)
        refused(method.check, data.load(cfg), nets_of(method, cfg), cfg, says=words)
    method, cfg = setup("kd", net="toy:video,chunk=0", data=run.pairs("toy:video"), t_list=(0.999,))
    refused(method.check, data.load(cfg), nets_of(method, cfg), cfg, says=["chunk 2"])

# ---- self_forcing
def forcing(monkeypatch, call, **changes):
    """method, config, nets, batch with exit step `call`; the student's calls as (has a graph, output)."""
    method, cfg = setup("self_forcing", **dict(frames_max=0) | changes)
    nets, calls = nets_of(method, cfg), []
    turn(nets, method.optimizers(nets, cfg), "student")
    nets["student"].register_forward_hook(lambda net, args, out: calls.append(
        (torch.is_grad_enabled(), common.prediction(out))))
    draws = iter([call, cfg["frames_max"]])
    monkeypatch.setattr(torch, "randint", lambda *a, generator, **k: torch.tensor(min(next(draws), a[0] - 1)))
    return method, cfg, nets, batch_of(cfg), calls

@pytest.mark.parametrize("call, changes", [(0, {}), (3, {}), (2, dict(grad_chunks=1)), (1, dict(
    last_step_only=True)), (1, dict(frames_max=11)), (1, dict(frames_max=10, grad_chunks=1))])
def test_the_graph_is_of_the_exit_call_of_each_chunk_alone(call, changes, monkeypatch):
    method, cfg, nets, some, calls = forcing(monkeypatch, call, **changes)
    rolled = spy(monkeypatch, common, "causal_rollout")
    x = method.generate(nets["student"], some, 0, cfg)
    n = 3 + (changes.get("frames_max", 6) - 6) // 2                     # chunks
    last = 3 if changes.get("last_step_only") else call
    with_graph = changes.get("grad_chunks") or (2 if n > 3 else 3)      # of a longer clip's window but the first
    outs = [out for grad, out in calls if grad]
    assert len(outs) == with_graph and len(calls) == n * (last + 2) - 1 and x.shape == some["x0"].shape
    assert torch.equal(x, rolled[0][1][:, :, -6:])
    for i, out in enumerate(outs):                      # a chunk depends on its own call, not on those before
        start = 6 - 2 * (with_graph - i)
        grads = torch.autograd.grad(x[:, :, start:start + 2].sum(), outs, allow_unused=True, retain_graph=True)
        assert [g is not None for g in grads] == [j == i for j in range(with_graph)]
    assert not x[:, :, :6 - 2 * with_graph].requires_grad or with_graph == 3 or not torch.autograd.grad(
        x[:, :, :6 - 2 * with_graph].sum(), outs, allow_unused=True)[0]

def test_the_gradient_is_a_sum_over_chunks_without_cross_terms():
    """x_i = theta y_i + x_{i-1}: d/d theta of sum <u_i, x_i> is sum <u_i, y_i>, y_i = t_0 z_i."""
    net = Frames(lambda net, y, t, before: net.theta * y + (0 if before is None else before[..., 0]), theta=0.7)
    u, z = torch.randn(2, 3, 1, FRAMES, 1, 1, dtype=f64)
    x = common.causal_rollout(net, lambda k: z, [0.999, 0.5, 0.0], {}, call=0)
    assert torch.allclose(torch.autograd.grad((u * x).sum(), net.theta)[0], 0.999 * (u * z).sum())
    assert torch.allclose(x[:, :, 2], 0.7 * 0.999 * z[:, :, :3].sum(2))

def test_memory_depends_on_the_chunks_with_a_gradient_and_their_cache_alone():
    def kept(frames, call, grad_chunks):
        sizes, net = [], common.make_net("toy:video")
        noise = common.train_noise((2, 1, frames, 8, 8), "cpu")
        with torch.autograd.graph.saved_tensors_hooks(lambda v: sizes.append(v.numel()) or v, lambda v: v):
            common.causal_rollout(net, noise, [0.999, 0.9, 0.8, 0.7, 0.0], {}, call=call, grad_chunks=grad_chunks)
        return sum(sizes)
    assert kept(8, 0, 0) == kept(8, 3, 0) > 3.5 * kept(2, 0, 0)
    one, two, four = (kept(frames, 3, 1) for frames in (8, 16, 32))
    assert four - two == 2 * (two - one) and two - one < kept(8, 3, 0) / 4

@pytest.mark.parametrize("changes", [{}, dict(window=4, sink=1, context_noise=0.1, sampler="ode")])
def test_training_generates_as_the_sampler_does_where_the_exit_is_the_last_step(changes):
    method, cfg = setup("self_forcing", last_step_only=True, frames_max=0, **changes)
    net, some = nets_of(method, cfg)["student"], batch_of(cfg)
    common.seed_default(5)
    x = method.generate(net, some, 0, cfg)
    common.seed_default(5)
    noise = common.train_noise(x.shape, "cpu")
    assert torch.equal(x, method.sample(net, noise, some, cfg, 4))
    refused(method.sample, net, noise, some, cfg, 2, says=["trained for 4 steps"])
    some = encoders.encode(next(data.Loader(data.load(cfg), cfg)), cfg | dict(first_frame=True), "cpu")
    x = method.generate(net, some, 0, cfg | dict(first_frame=True))
    assert torch.equal(x[:, :, :1], some["x0"][:, :, :1])
