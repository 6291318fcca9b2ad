"""The contract of a network, over every family in nets/ (file with `sizes` and `make`)."""
import copy
import re
from pathlib import Path

import pytest
import torch

import common
import fill
import shard
from common import chunks, make_net
from families import FAMILIES, close, draws, f64, make, shake
from nets.discriminators import ImageDiTHead, UNetHead, VideoDiTHead, make_head
from run import differing, refused

def families(*needs):
    """Runs a test once for every family that can all of that."""
    able = {name: family for name, family in FAMILIES.items() if {*family.can.split()} >= {*needs}}
    return pytest.mark.parametrize("family", able.values(), ids=able)

def build(family, **options):
    torch.manual_seed(0)
    return shake(make(family, **options))

def parts(family, *names):
    return {part: True for part in names if part in family.can.split()}

def whole(family, make=build):
    """The net with every optional part, and the keyword arguments that its calls then need."""
    net = make(family, **parts(family, "r", "logvar"))
    return net, dict(r=torch.tensor([0.1, 0.2], dtype=f64)) if parts(family, "r") else {}

def inputs(net, family, batch=2, dtype=torch.float32):
    x = torch.randn(batch, *net.x_shape, generator=torch.Generator().manual_seed(2), dtype=f64).to(dtype)
    t = torch.linspace(0.3, 0.7, batch, dtype=f64)
    return x, t, dict(draws(family, batch, dtype), label=torch.arange(batch) % 4)

def ready(family, **options):
    return (net := build(family, **options)), *inputs(net, family)

def without(cond, *keys):
    return {key: v for key, v in cond.items() if key not in keys}

def test_every_file_in_nets_has_a_family_and_the_options_of_a_spec_win():
    nets = Path(common.__file__).parent / "nets"
    files = {path.stem for path in nets.glob("*.py") if re.search(r"\n(def )?make\b", path.read_text())}
    assert files == {family.spec.split(":")[0] for family in FAMILIES.values()}
    net = make_net("toy:tiny,schedule=rf,pred=flow,dropout=0.25,size=16", pred="x0", r=True)
    assert (net.schedule, net.pred, net.layers[0].dropout) == ("rf", "flow", 0.25) and net.r_embed is not None
    assert net.x_shape == (1, 16, 16) and net.tap_shapes((0, 1)) == [(24, 8, 8)] * 2
    net = make_net("dit:dit_s2,x_shape=(4, 8, 16),depth=1")
    assert net.x_shape == (4, 8, 16) and net.n_taps == 1

@families()
def test_attributes_are_plain_values_and_blocks_are_modules_with_parameters_none_inside_another(family):
    net, _ = whole(family)
    assert type(net.schedule) is str and len(common.t_range(net.schedule)) == 2
    assert net.pred in ("x0", "eps", "v", "flow") and type(net.n_taps) is int
    assert type(getattr(net, "sigma_data", 0.5)) is float
    assert {*map(type, net.x_shape)} == {int} and {*map(type, (*net.optional, *net.blocks))} == {str}
    assert all(list(net.get_submodule(name).parameters()) for name in net.blocks)
    assert not next(net.named_parameters())[0].startswith(tuple(f"{name}." for name in net.blocks))
    assert not any(other.startswith(name + ".") for name in net.blocks for other in net.blocks)

@families()
def test_a_result_holds_what_was_asked_and_stop_gives_the_same_by_fewer_modules(family):
    (net, x, t, cond), calls, runs = ready(family, **parts(family, "logvar")), [], []
    out, order = net(x, t, cond), tuple(range(net.n_taps))
    assert out.shape == x.shape and out.dtype == torch.float32 and out.std() > 1e-3
    asks = dict(taps=order[::-1], logvar=True) | (dict(write=True) if parts(family, "cache") else {})
    result = net(x, t, cond, **asks)
    taps = result["taps"]                               # in ascending order nevertheless
    assert set(result) == {"out", *("cache" if key == "write" else key for key in asks)}
    assert torch.equal(result["out"], out)
    assert [tuple(tap.shape) for tap in taps] == [(len(x), *shape) for shape in net.tap_shapes(order[::-1])]
    for module in net.modules():
        module.register_forward_hook(lambda module, args, out: calls.append(module))
    for i in order:
        calls.clear()
        stopped = net(x, t, cond, taps=(i,), stop=True)
        runs.append(len(calls))
        assert set(stopped) == {"taps"} and list(net.tap_shapes((i,))) == [tuple(taps[i].shape[1:])]
        assert len(stopped["taps"]) == 1 and torch.equal(stopped["taps"][0], taps[i])
    calls.clear()
    net(x, t, cond)
    assert sorted({*runs, len(calls)}) == [*runs, len(calls)]           # strictly more with each later tap
    refused(net, x, t, cond, taps=(net.n_taps,))

# ---- r, logvar, conditions, precision
def load_source(net, source):
    """Loads another net's state dict as the trainer does; what `net` lacks must be optional."""
    given = {key: a for key, v in source.items() if (a := fill.adapt(net, key, v)) is not None}
    own = net.state_dict()
    assert set(given) <= set(own) and all(key.startswith(net.optional) for key in set(own) - set(given))
    assert all(fill.adapt(net, key, v) is v for key, v in own.items())      # its own fit as they are
    net.load_state_dict(own | given)
    return net

@families("r")
def test_a_net_with_r_starts_as_the_net_without_and_can_learn(family):
    plain, x, t, cond = ready(family)
    net = load_source(make(family, r=True), plain.state_dict())
    assert close(net(x, t, cond, r=t / 2), plain(x, t, cond), 1e-6)
    (net(x, t, cond, r=t / 2) - x).square().mean().backward()
    for p in net.parameters():
        p.data.sub_(0 if p.grad is None else p.grad)
    assert not torch.equal(net(x, t, cond, r=t / 2), net(x, t, cond, r=t / 3))
    assert not close(shake(net)(x, t, cond, r=t / 2), net(x, t, cond, r=t / 3), 1e-4)
    refused(net, x, t, cond)                            # needs r

@families("logvar")
def test_logvar_is_one_number_a_sample_depends_on_its_t_alone_and_comes_and_goes_between_runs(family):
    plain, x, t, cond = ready(family)
    net = load_source(make(family, logvar=True), plain.state_dict())
    for other in (net, load_source(make(family), net.state_dict())):
        assert torch.equal(other(x, t, cond), plain(x, t, cond))
    u = shake(net)(x, t, cond, logvar=True)["logvar"]
    assert u.shape == (2,) and u.dtype == torch.float32 and (u[0] - u[1]).abs() > 1e-4
    moved = {key: cond[key] + 1 for key in family.cond}
    assert close(net(2 * x, t.flip(0), moved, logvar=True)["logvar"], u.flip(0))
    assert net(x, t, cond, logvar=True, taps=(0,), stop=True).keys() == {"taps", "logvar"}

@families("label")
def test_label_minus_one_is_no_label_and_label_dim_0_sees_none(family):
    net, x, t, cond = ready(family)
    none = without(cond, "label")
    out = lambda *labels: net(x, t, dict(none, label=torch.tensor(labels)))
    assert torch.equal(out(-1, -1), net(x, t, none))
    assert not any(close(out(a, a), out(b, b), 1e-4) for a, b in ((-1, 0), (0, 3), (-1, 3)))
    assert close(out(-1, 3)[0], out(-1, -1)[0]) and close(out(-1, 3)[1], out(3, 3)[1])
    blind = shake(make(family, label_dim=0))
    assert torch.equal(blind(x, t, cond), blind(x, t, none))

@families()
def test_every_named_condition_matters_and_unknown_keys_do_not(family):
    net, x, t, cond = ready(family)
    plain = net(x, t, cond)
    assert torch.equal(net(x, t, dict(cond, nobody_knows_this=torch.ones(2))), plain)
    moved = lambda v: v + torch.linspace(1, 2, v.shape[-1])             # no LayerNorm hides that
    assert not any(close(net(x, t, cond | {key: moved(cond[key])}), plain, 1e-4) for key in family.cond)

@families()
def test_t_is_not_rounded_in_float64_and_not_in_bfloat16_whose_output_is_float32(family):
    net = build(family).double()
    x, t, cond = inputs(net, family, dtype=f64)
    a, b = net(x, t, cond), net(x, t * (1 + 1e-10), cond)
    assert a.dtype == f64 and all((a - b).flatten(1).abs().amax(1) > 1e-13)
    net, x, _, cond = ready(family)
    t = torch.tensor([0.703125, 0.703125 + 0.0015], dtype=f64)
    assert t[0].bfloat16() == t[1].bfloat16()
    x, cond = x[[0, 0]], {key: v[[0, 0]] for key, v in cond.items()}
    exact = net(x, t, cond)
    for autocast in (True, False):                      # and then with weights in bfloat16
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = (net if autocast else net.bfloat16())(x, t, cond)
        assert out.dtype == torch.float32 and not torch.equal(out[0], out[1])
        assert 1e-5 < (out - exact).norm() / exact.norm() < 0.05
    for key in {*getattr(net, "exact", ())} & {*cond}:  # numbers that no bfloat16 tells apart
        assert not torch.equal(*(net(x, t, cond | {key: torch.full_like(cond[key], v)})
                                 for v in (1023.0, 1024.0)))

@families()
def test_a_net_is_its_parameters_and_buffers_from_a_meta_start_a_state_dict_or_a_copy(family):
    (plain, kw), values = whole(family), lambda net: dict([*net.named_parameters(), *net.named_buffers()])
    with torch.device("meta"):
        model, net = (whole(family, make)[0] for _ in range(2))
    assert all(v.is_meta for v in values(net).values())
    net.to_empty(device="cpu")
    for v in values(net).values():
        v.data.fill_(float("nan") if v.is_floating_point() else -1)
    for each in plain, net:
        fill.draw(each, model, "net", 0)
    assert differing(values(net), values(plain)) == []
    x, t, cond = inputs(plain, family)
    fresh = shake(whole(family)[0], seed=1)
    assert not close(fresh(x, t, cond, **kw), plain(x, t, cond, **kw), 1e-4)
    fresh.load_state_dict(plain.state_dict())
    for other in (net, fresh, copy.deepcopy(plain)):
        assert torch.equal(other(x, t, cond, **kw), plain(x, t, cond, **kw))

@families()
def test_jvp_equals_the_central_difference_and_recomputed_blocks_have_the_same_gradients(family):
    net = build(family, **parts(family, "r")).double()
    x, t, cond = inputs(net, family, dtype=f64)
    f = lambda x, t, r=None: net(x, t, cond, r=r)
    point, tangent = (x, t), (torch.randn_like(x), torch.ones_like(t))
    if parts(family, "r"):
        point, tangent = (*point, t / 2), (*tangent, -torch.ones_like(t))
    out, derivative = torch.func.jvp(f, point, tangent)
    ahead, behind = (f(*[p + h * d for p, d in zip(point, tangent)]) for h in (1e-6, -1e-6))
    difference = (ahead - behind) / 2e-6
    assert close(out, f(*point), 1e-12)
    assert (derivative - difference).norm() < 1e-6 * difference.norm() and difference.norm() > 0.1
    gradients = lambda out: torch.autograd.grad(        # of the loss as MeanFlow and sCM take it
        (out - derivative.detach()).square().mean(), list(net.parameters()), allow_unused=True)
    grads = gradients(out)
    assert all(g.isfinite().all() for g in grads if g is not None)
    assert sum(g is None for g in grads) <= 6           # the text after Qwen-Image's last block is not used
    for block in map(net.get_submodule, net.blocks):
        block.forward = shard.recomputed(block.forward)
    assert all(close(a, b, 1e-9) for a, b in zip(grads, gradients(f(*point))) if a is not None)

@families()
def test_a_discriminator_of_the_nets_kind_takes_its_features_and_gives_all_of_them_a_gradient(family):
    video = len(family.options.get("x_shape", ())) == 4     # a head takes pairs of frames
    net = build(family, **dict(x_shape=(4, 4, 4, 6)) if video else {})
    shapes, taps = net.tap_shapes(range(net.n_taps)), tuple(range(net.n_taps))
    head, features = make_head(net, taps), [torch.randn(2, *shape, requires_grad=True) for shape in shapes]
    transformer = family.spec.split(":")[0] in ("dit", "flux", "qwen_image")
    kind = VideoDiTHead if len(net.x_shape) == 4 else ImageDiTHead if transformer else UNetHead
    assert type(head) is kind and head.shapes == shapes
    logits = head(features)
    assert logits.shape == (2, len(taps))
    assert all((g != 0).float().mean() > 0.9 for g in torch.autograd.grad(logits.sum(), features))

def test_toy_and_conditioned_heads_see_the_mean_of_the_tokens_that_the_mask_shows():
    net, x, t, cond = ready(FAMILIES["toy_rf"])
    head, features = shake(make_head(net, (0,), cond=True)), net(x, t, taps=(0,))["taps"]
    masked = cond | dict(text_mask=torch.arange(5) < torch.tensor([[3], [1]]))
    mean = cond | dict(text=torch.stack([cond["text"][0, :3].mean(0), cond["text"][1, 0]])[:, None])
    for f in (lambda c: net(x, t, c)), (lambda c: head(features, c)):
        assert close(f(masked), f(mean)) and not close(f(masked), f(cond), 1e-3)

# ---- arguments
@families()
def test_arguments_are_never_mutated_and_what_cannot_be_used_is_refused(family):
    net, kw = whole(family)
    x, t, cond = inputs(net, family)
    tensors = [x, t, *cond.values(), *kw.values()]
    before, keys = [(v.clone(), v._version) for v in tensors], [*cond]
    net(x, t, cond, taps=(0,), **kw)
    assert all(torch.equal(v, old) and v._version == version for v, (old, version) in zip(tensors, before))
    assert [*cond] == keys
    net, kind, public = build(family), family.spec.split(":")[0], "toy" not in family.spec
    asks = ("", dict(r=t)), ("", dict(logvar=True)), ("", dict(stop=True)), ("skip", dict(skip=(0,)))
    for part, kw in (*asks, *(("cache", ask) for ask in (dict(start=1), dict(cache={}), dict(write=True)))):
        if not parts(family, part):                     # built without r and logvar
            refused(net, x, t, cond, **kw)
    refused(make, family, nobody_knows_this=1, says=["nobody_knows_this"])
    if kind in ("flux", "qwen_image", "cogvideox") or "t2i" in family.spec or "wan:t2v" in family.spec:
        refused(net, x[..., 1:], t, cond, says=["even"])
    needed = {"text", "pooled", "image", "control", *["first_frame"] * (":i2v" in family.spec)}
    for key in needed & {*cond} if public else ():
        refused(net, x, t, without(cond, key), says=[key])
        refused(net, x, t, cond | {key: cond[key][..., 1:]}, says=[str(tuple(cond[key][..., 1:].shape))])
    if kind in ("wan", "cosmos_predict2"):
        refused(net, x, t[:, None].expand(2, 2), cond, says=["3 frames"])

def test_an_option_no_net_can_be_built_with_is_one_sentence():
    plain = "heads=0 label_dim=-3 label_dim=foo label_dim=[1] dropout=5 dropout=nan depth=0 channels=-1"
    for net, options in {
            "toy:tiny": plain, "edm:digits": plain, "edm:nosuchsize": "depth=1", "flux:dev": "axes=(4,6,8)",
            "qwen_image:base": "axes=(4,6,8)", "cogvideox:5b": "dim=40,heads=4",
            "cosmos_predict2:2.5_2b": "dim=40,heads=4",
            "wan:t2v_1_3b": "chunk=3,window=2 chunk=-1 first=x positions=y heads=7"}.items():
        for option in options.split():
            refused(make_net, f"{net},{option}", says=[net[:3]])

@families()
def test_samples_do_not_see_each_other_an_empty_batch_has_a_gradient_and_dropout_acts_in_training(family):
    net = build(family, dropout=0.5).eval()
    x, t, cond = inputs(net, family, batch=3)
    x.requires_grad_()
    cut = lambda n, m: (x[n:m], t[n:m], {k: v[n:m] for k, v in cond.items()})
    assert close(net(*cut(1, 2))[0], net(x, t, cond)[1])
    out = net(*cut(0, 0))
    assert out.shape == x[:0].shape
    out.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())
    assert torch.equal(net(x, t, cond), build(family)(x, t, cond))
    assert not torch.equal(net.train()(x, t, cond), net(x, t, cond))

@families("skip")
def test_skip_leaves_out_a_block_and_no_other(family):
    (net, x, t, cond), calls = ready(family), []
    for name in net.blocks:
        net.get_submodule(name).register_forward_hook(lambda module, args, out, name=name: calls.append(name))
    out = net(x, t, cond)
    for i, name in enumerate(net.blocks[:net.n_taps]):
        calls.clear()
        assert not close(net(x, t, cond, skip=(i,)), out, 1e-4)
        assert sorted(calls) == sorted(other for other in net.blocks if other != name)

# ---- causal video nets; the first chunk takes the remainder
def clip(name, frames, **options):
    """A causal net in float64, two clips, one time for each of their chunks, the chunks as slices, cond."""
    family, draw = FAMILIES[name], lambda *shape: torch.randn(*shape, dtype=f64)
    net = build(family, **options).double()
    x, sizes = draw(2, net.x_shape[0], frames, *net.x_shape[2:]), chunks(frames, net.chunk)
    ends = torch.tensor(sizes).cumsum(0)
    t = torch.rand(2, len(sizes), dtype=f64).repeat_interleave(torch.tensor(sizes), 1)
    cond = dict(draws(family, dtype=f64), label=torch.tensor([0, 1]))
    cond |= dict(control=draw(2, 24, frames, 4, 6), first_frame=draw(2, 4, frames, 4, 6))
    return net, x, t, [slice(int(end) - size, int(end)) for size, end in zip(sizes, ends)], cond

WINDOW = dict(window=2, sink=1, positions="window")

@pytest.mark.parametrize("name, frames, chunk, options, kept", [
    *((name, *each, {}, range(each[0])) for name in ("toy_video", "wan_causal")
      for each in ((7, 3), (5, 1), (2, 3), (8, 3))),
    ("wan_t2v", 7, 2, dict(window=3), [4, 5, 6]), ("wan_t2v", 7, 2, WINDOW, [0, 5, 6]),
    ("wan_vace", 7, 2, dict(window=4, sink=2), [0, 1, 3, 4, 5, 6]), ("wan_i2v", 7, 2, {}, range(7))])
@torch.no_grad()
def test_a_chunk_after_a_cache_is_that_of_the_full_forward_and_sees_nothing_later(
        name, frames, chunk, options, kept):
    net, x, t, spans, cond = clip(name, frames, chunk=chunk, **options)
    clean, zero, cache = x.flip(0) / 2, torch.zeros_like(t), None
    for span in spans:                                  # clean frames at t = 0, then noisy ones, also later
        past = torch.arange(frames) < span.start
        x_all, t_all = torch.where(past[:, None, None], clean, x), torch.where(past, zero, t)
        chunk, past = (x[:, :, span], t[:, span], cond), dict(start=span.start, cache=cache)
        out, full = net(*chunk, **past), net(x_all, t_all, cond)
        assert close(out, full[:, :, span], 1e-10)
        x_all[:, :, span.stop - 1] += 1
        moved = (net(x_all, t_all, cond) != full)[:, :, span.start:span.stop]
        assert moved.any(-1).any(-1).any(1).all()       # a chunk's frames see its last
        cache = net(clean[:, :, span], zero[:, span], cond, write=True, **past)["cache"]
        assert torch.equal(net(*chunk, **past), out)    # the old cache is as it was
    assert cache["pos"].tolist() == [*kept] and {kv.shape[1] for kv in cache["kv"]} == {len(kept)}
    at_once = net(clean, zero, cond, write=True)["cache"]           # all chunks in one call under the mask
    assert all(close(*each, 1e-10) for each in zip(at_once["kv"], cache["kv"]))

@families("cache")
def test_a_cache_carries_no_gradient_and_positions_count_relative_to_it(family):
    name = next(name for name in FAMILIES if FAMILIES[name] is family)
    net, x, t, spans, cond = clip(name, 4, chunk=2)
    first, second = [(x[:, :, span].clone().requires_grad_(), t[:, span], cond) for span in spans]
    result = net(*first, write=True)
    out = net(*second, start=2, cache=result["cache"])
    assert torch.autograd.grad(out.sum(), first[0], allow_unused=True)[0] is None
    assert torch.autograd.grad(result["out"].sum(), first[0])[0].any()
    assert close(net(*first, start=7), net(*first))
    read = lambda at, start: net(*second, start=start, cache=net(*first, start=at, write=True)["cache"])
    assert close(read(7, 9), out) and not close(read(0, 9), out, 1e-4)
    refused(net, *first, write=True, skip=(0,), says=["skip"])
    t, both_ways = torch.tensor([0.2, 0.8], dtype=f64), clip(name, 4, chunk=0)[0]
    assert torch.equal(net(x, t, cond), net(x, t[:, None].expand(-1, 4), cond))     # one time for all
    assert torch.equal(both_ways(x, t, cond), clip(name, 4, chunk=4)[0](x, t, cond))
    assert not close(both_ways(x, t, cond), net(x, t, cond), 1e-4)

@torch.no_grad()
def test_a_chunk_of_causal_wan_sees_its_window_and_sink_and_may_place_keys_in_it():
    net, x, t, _, cond = clip("wan_causal", 7, depth=1, window=3, sink=1)
    sees = [{0, 1, 2}] * 3 + [{0, 2, 3, 4}] * 2 + [{0, 4, 5, 6}] * 2
    for k in range(7):
        moved = net(x + (torch.arange(7) == k)[:, None, None], t, cond) != net(x, t, cond)
        assert moved.flatten(3).any(3).any(1)[0].tolist() == [k in seen for seen in sees]
    for kw, same in ((dict(), True), (dict(window=3), True), (dict(window=3, sink=1), False)):
        net = clip("wan_causal", 7, depth=1, **kw)[0]
        absolute, net.positions = net(x, t, cond), "window"
        assert close(net(x, t, cond), absolute) == same
