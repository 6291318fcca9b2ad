"""The contract of a network, over every family in nets/ (file with `sizes` and `make`): each has a Case."""
import copy
import importlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import common
import fill
from common import make_net
from nets.discriminators import ImageDiTHead, UNetHead, VideoDiTHead, make_head
from run import differing, refused

f64 = torch.float64

class Case(NamedTuple):
    spec: str
    options: dict       # make it tiny
    can: str            # of label, r, logvar, skip, cache
    cond: dict = {}     # shapes of further condition tensors that it uses, without the batch
    size: dict = {}     # the entry of `sizes` that the spec names, where the file has none so small

EDM = dict(x_shape=(3, 8, 8), label_dim=4, width=8, mult=(1, 2), blocks=2, attn=(4,))
NCSNPP = dict(EDM, augment_dim=5, fourier=True, residual=True, resample=(1, 3, 3, 1), noise_mult=2)
ADM = dict(EDM, width=64, mult=(1, 1), blocks=1, adm=True, emb_mult=1)
DIT = dict(x_shape=(4, 8, 8), dim=32, depth=3, heads=4, label_dim=4)
EDM2 = dict(EDM, width=16, head_dim=8)
SD = dict(x_shape=(4, 8, 8), width=16, mult=(1, 2, 2), text_dim=12, heads=(2, 4, 4), layers=1, groups=4)
SDXL = SD | dict(depths=(0, 1, 2), pooled_dim=6, id_dim=4)
QWEN = dict(x_shape=(4, 6, 10), depth=2, dim=32, heads=2, axes=(4, 6, 6), text_dim=6)
FLUX = QWEN | dict(single_depth=2, pooled_dim=5)
COGVIDEOX = dict(x_shape=(4, 4, 4, 6), depth=2, dim=32, heads=2, time_dim=12, text_dim=6)
COSMOS = dict(x_shape=(4, 4, 4, 6), depth=2, dim=32, heads=2, rank=8, text_dim=6)
WAN = dict(x_shape=(4, 4, 4, 6), depth=2, dim=24, heads=2, hidden=32, text_dim=6, freq=16)
CASES = dict(
    wan=Case("wan:t2v_1_3b", WAN, "r logvar skip", dict(text=(5, 6))),
    wan_digits=Case("wan:digits", WAN | dict(label_dim=4, text_dim=0, patch=1), "label r logvar skip"),
    wan_causal=Case("wan:t2v_14b", WAN | dict(chunk=2), "r logvar skip cache", dict(text=(5, 6))),
    wan_ti2v=Case("wan:ti2v_5b", WAN, "r logvar skip", dict(text=(5, 6), first_frame=(4, 1, 4, 6))),
    wan_i2v=Case("wan:i2v_14b", WAN | dict(image_dim=8), "r logvar skip",
                 dict(text=(5, 6), image=(3, 8), first_frame=(4, 4, 4, 6))),
    wan_vace=Case("wan:vace_1_3b", WAN | dict(control=5, hints=(0,)), "r logvar skip",
                  dict(text=(5, 6), control=(5, 4, 4, 6))),
    sd15=Case("sd:sd15", SD | dict(depths=(1, 1, 0)), "r logvar", dict(text=(5, 12))),
    sdxl=Case("sd:sdxl", SDXL, "r logvar", dict(text=(5, 12), pooled=(6,), time_ids=(6,))),
    dit=Case("dit:dit_s2", DIT, "label r logvar"),
    sit=Case("dit:sit_s2", DIT | dict(r_kind="diff"), "label r logvar"),
    flux=Case("flux:dev", FLUX, "r logvar", dict(text=(5, 6), pooled=(5,), guidance=())),
    qwen=Case("qwen_image:base", QWEN, "r logvar", dict(text=(5, 6), text_mask=(5,))),
    cogvideox=Case("cogvideox:2b", COGVIDEOX, "r logvar skip", dict(text=(5, 6))),
    cogvideox_rope=Case("cogvideox:5b", COGVIDEOX, "r logvar skip", dict(text=(5, 6))),
    cosmos2=Case("cosmos_predict2:t2i_2b", COSMOS, "r logvar skip", dict(text=(5, 6), fps=())),
    cosmos25=Case("cosmos_predict2:2.5_2b", COSMOS | dict(text_proj=5), "r logvar skip",
                  dict(text=(5, 6), condition_frames=(4, 4, 4, 6), condition_mask=(1, 4, 1, 1))),
    edm2=Case("edm2:imagenet64_s", EDM2, "label r logvar"),
    toy=Case("toy:tiny", dict(label_dim=4), "label r logvar skip"),
    toy_rf=Case("toy:tiny,schedule=rf,pred=flow", dict(label_dim=4, text_dim=3), "label r logvar skip",
                dict(text=(5, 3))),
    toy_video=Case("toy:video", dict(label_dim=4), "label r logvar skip cache"),
    edm=Case("edm:test", dict(augment_dim=5), "label r logvar", dict(augment=(5,)), EDM),
    edm_ncsnpp=Case("edm:test_ncsnpp", {}, "label r logvar", dict(augment=(5,)), NCSNPP),
    edm_adm=Case("edm:test_adm", {}, "label r logvar", {}, ADM))

@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch):
    for case in CASES.values():
        family, size = case.spec.split(",")[0].split(":")
        if case.size:
            monkeypatch.setitem(importlib.import_module(f"nets.{family}").sizes, size, case.size)

def cases(*needs):
    """Runs a test once for every case that can all of that."""
    able = {name: case for name, case in CASES.items() if {*case.can.split()} >= {*needs}}
    return pytest.mark.parametrize("case", able.values(), ids=able)

def shake(net, seed=0):
    """Moves every parameter off its start, so that no zero-initialised layer makes a test vacuous."""
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
    return net

def make(case, **options):
    return make_net(case.spec, **case.options | options)

def build(case, **options):
    torch.manual_seed(0)
    return shake(make(case, **options))

def parts(case, *names):
    return {part: True for part in names if part in case.can.split()}

def whole(case, make=build):
    """The net with every optional part, and the keyword arguments that its calls then need."""
    net = make(case, **parts(case, "r", "logvar"))
    return net, dict(r=torch.tensor([0.1, 0.2], dtype=f64)) if parts(case, "r") else {}

def inputs(net, case, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(batch, *shape, generator=generator, dtype=f64).to(dtype)
    x, t = draw(*net.x_shape), torch.linspace(0.3, 0.7, batch, dtype=f64)
    return x, t, dict({key: draw(*shape) for key, shape in case.cond.items()}, label=torch.arange(batch) % 4)

def ready(case, **options):
    net = build(case, **options)
    return net, *inputs(net, case)

def close(a, b, tolerance=1e-5):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)

def test_every_family_in_nets_has_a_case_and_the_options_of_a_spec_win():
    nets = Path(common.__file__).parent / "nets"
    families = {path.stem for path in nets.glob("*.py") if "\nmake = " in path.read_text()}
    assert families == {case.spec.split(":")[0] for case in CASES.values()}
    net = make_net("toy:tiny,schedule=rf,pred=flow,dropout=0.25,size=16", pred="x0", r=True)
    assert (net.schedule, net.pred, net.layers[0].dropout) == ("rf", "flow", 0.25) and net.r_embed is not None
    assert net.x_shape == (1, 16, 16) and net.tap_shapes((0, 1)) == [(24, 8, 8)] * 2
    net = make_net("dit:dit_s2,x_shape=(4, 8, 16),depth=1")
    assert net.x_shape == (4, 8, 16) and net.n_taps == 1

@cases()
def test_attributes_are_plain_values_and_blocks_are_modules_with_parameters_none_inside_another(case):
    net, _ = whole(case)
    assert type(net.schedule) is str and len(common.t_range(net.schedule)) == 2
    assert net.pred in ("x0", "eps", "v", "flow") and type(net.n_taps) is int
    assert type(getattr(net, "sigma_data", 0.5)) is float
    assert {*map(type, net.x_shape)} == {int} and {*map(type, (*net.optional, *net.blocks))} == {str}
    assert all(list(net.get_submodule(name).parameters()) for name in net.blocks)
    assert not next(net.named_parameters())[0].startswith(tuple(f"{name}." for name in net.blocks))
    assert not any(other.startswith(name + ".") for name in net.blocks for other in net.blocks)

@cases()
def test_a_result_holds_what_was_asked_and_stop_gives_the_same_by_fewer_modules(case):
    (net, x, t, cond), calls, runs = ready(case, **parts(case, "logvar")), [], []
    out = net(x, t, cond)
    assert out.shape == x.shape and out.dtype == torch.float32 and out.std() > 1e-3
    asks = dict(taps=dict(taps=(0,))) | {key: {key: True} for key in parts(case, "logvar")}
    asks |= dict(cache=dict(write=True)) if parts(case, "cache") else {}
    for keys in (*([key] for key in asks), [*asks]):
        result = net(x, t, cond, **{k: v for key in keys for k, v in asks[key].items()})
        assert set(result) == {"out", *keys} and torch.equal(result["out"], out)
    order = tuple(range(net.n_taps))
    taps = net(x, t, cond, taps=order[::-1])["taps"]    # in ascending order nevertheless
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
    refused(net.tap_shapes, (net.n_taps,))

# ---- r, logvar, conditions, precision
def load_source(net, source):
    """Loads another net's state dict as the trainer does; what `net` lacks must be optional."""
    given = {key: a for key, v in source.items() if (a := fill.adapt(net, key, v)) is not None}
    own = net.state_dict()
    assert set(given) <= set(own) and all(key.startswith(net.optional) for key in set(own) - set(given))
    assert all(fill.adapt(net, key, v) is v for key, v in own.items())      # its own fit as they are
    net.load_state_dict(own | given)
    return net

@cases("r")
def test_a_net_with_r_starts_as_the_net_without_and_can_learn(case):
    plain, x, t, cond = ready(case)
    net = load_source(make(case, r=True), plain.state_dict())
    assert close(net(x, t, cond, r=t / 2), plain(x, t, cond), 1e-6)
    (net(x, t, cond, r=t / 2) - x).square().mean().backward()
    for p in net.parameters():
        p.data.sub_(0 if p.grad is None else p.grad)
    assert not torch.equal(net(x, t, cond, r=t / 2), net(x, t, cond, r=t / 3))
    assert not close(shake(net)(x, t, cond, r=t / 2), net(x, t, cond, r=t / 3), 1e-4)
    refused(net, x, t, cond)                            # needs r

@cases("logvar")
def test_logvar_is_one_number_a_sample_depends_on_its_t_alone_and_comes_and_goes_between_runs(case):
    plain, x, t, cond = ready(case)
    net = load_source(make(case, logvar=True), plain.state_dict())
    for other in (net, load_source(make(case), net.state_dict())):
        assert torch.equal(other(x, t, cond), plain(x, t, cond))
    u = shake(net)(x, t, cond, logvar=True)["logvar"]
    assert u.shape == (2,) and u.dtype == torch.float32 and (u[0] - u[1]).abs() > 1e-4
    moved = {key: cond[key] + 1 for key in case.cond}
    assert close(net(2 * x, t.flip(0), moved, logvar=True)["logvar"], u.flip(0))
    assert net(x, t, cond, logvar=True, taps=(0,), stop=True).keys() == {"taps", "logvar"}

@cases("label")
def test_label_minus_one_is_no_label(case):
    net, x, t, cond = ready(case)
    none = {key: value for key, value in cond.items() if key != "label"}
    out = lambda *labels: net(x, t, dict(none, label=torch.tensor(labels)))
    assert torch.equal(out(-1, -1), net(x, t, none))
    assert not any(close(out(a, a), out(b, b), 1e-4) for a, b in ((-1, 0), (0, 3), (-1, 3)))
    assert close(out(-1, 3)[0], out(-1, -1)[0]) and close(out(-1, 3)[1], out(3, 3)[1])
    if "label_dim" in case.options:                     # label_dim 0 ignores labels
        blind = shake(make(case, label_dim=0))
        assert torch.equal(blind(x, t, cond), blind(x, t, none))

@cases()
def test_every_named_condition_matters_and_unknown_keys_do_not(case):
    net, x, t, cond = ready(case)
    plain = net(x, t, cond)
    assert torch.equal(net(x, t, dict(cond, nobody_knows_this=torch.ones(2))), plain)
    moved = lambda v: v + torch.linspace(1, 2, v.shape[-1])             # no LayerNorm hides that
    assert not any(close(net(x, t, dict(cond, **{key: moved(cond[key])})), plain, 1e-4) for key in case.cond)

@cases()
def test_t_is_not_rounded_in_float64_and_not_in_bfloat16_whose_output_is_float32(case):
    net = build(case).double()
    x, t, cond = inputs(net, case, dtype=f64)
    a, b = net(x, t, cond), net(x, t * (1 + 1e-10), cond)
    assert a.dtype == f64 and all((a - b).flatten(1).abs().amax(1) > 1e-13)
    net, x, _, cond = ready(case)
    t = torch.tensor([0.703125, 0.703125 + 0.0015], dtype=f64)
    assert t[0].bfloat16() == t[1].bfloat16()
    x, cond = x[[0, 0]], {key: v[[0, 0]] for key, v in cond.items()}
    exact = net(x, t, cond)
    for autocast in (True, False):                      # and then with weights in bfloat16
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = (net if autocast else net.bfloat16())(x, t, cond)
        assert out.dtype == torch.float32 and not torch.equal(out[0], out[1])
        assert 1e-5 < (out - exact).norm() / exact.norm() < 0.05

@cases()
def test_a_net_is_its_parameters_and_buffers_from_a_meta_start_a_state_dict_or_a_copy(case):
    (plain, kw), values = whole(case), lambda net: dict([*net.named_parameters(), *net.named_buffers()])
    with torch.device("meta"):
        model, net = (whole(case, make)[0] for _ in range(2))
    assert all(v.is_meta for v in values(net).values())
    net.to_empty(device="cpu")
    for v in values(net).values():
        v.data.fill_(float("nan") if v.is_floating_point() else -1)
    for each in plain, net:
        fill.draw(each, model, "net", 0)
    assert differing(values(net), values(plain)) == []
    x, t, cond = inputs(plain, case)
    fresh = shake(whole(case)[0], seed=1)
    assert not close(fresh(x, t, cond, **kw), plain(x, t, cond, **kw), 1e-4)
    fresh.load_state_dict(plain.state_dict())
    for other in (net, fresh, copy.deepcopy(plain)):
        assert torch.equal(other(x, t, cond, **kw), plain(x, t, cond, **kw))

@cases()
def test_jvp_equals_the_central_difference(case):
    net = build(case, **parts(case, "r")).double()
    x, t, cond = inputs(net, case, dtype=f64)
    f = lambda x, t, r=None: net(x, t, cond, r=r)
    point, tangent = (x, t), (torch.randn_like(x), torch.ones_like(t))
    if parts(case, "r"):
        point, tangent = (*point, t / 2), (*tangent, -torch.ones_like(t))
    out, derivative = torch.func.jvp(f, point, tangent)
    ahead, behind = (f(*[p + h * d for p, d in zip(point, tangent)]) for h in (1e-6, -1e-6))
    difference = (ahead - behind) / 2e-6
    assert close(out, f(*point), 1e-12)
    assert (derivative - difference).norm() < 1e-6 * difference.norm() and difference.norm() > 0.1
    loss = (out - derivative.detach()).square().mean()              # as MeanFlow and sCM take it
    grads = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    assert all(g.isfinite().all() for g in grads if g is not None)
    assert sum(g is None for g in grads) <= 6           # the text after Qwen-Image's last block is not used

@cases()
def test_a_discriminator_of_the_nets_kind_takes_its_features_and_gives_all_of_them_a_gradient(case):
    net = build(case)
    shapes, taps = net.tap_shapes(range(net.n_taps)), tuple(range(net.n_taps))
    head, features = make_head(net, taps), [torch.randn(2, *shape, requires_grad=True) for shape in shapes]
    transformer = case.spec.split(":")[0] in ("dit", "flux", "qwen_image")
    kind = VideoDiTHead if len(net.x_shape) == 4 else ImageDiTHead if transformer else UNetHead
    assert type(head) is kind and head.shapes == shapes
    logits = head(features)
    assert logits.shape == (2, len(taps))
    assert all((g != 0).float().mean() > 0.9 for g in torch.autograd.grad(logits.sum(), features))

def test_toy_and_conditioned_heads_see_the_mean_of_the_tokens_that_the_mask_shows():
    net, x, t, cond = ready(CASES["toy_rf"])
    head, features = shake(make_head(net, (0,), cond=True)), net(x, t, taps=(0,))["taps"]
    masked = cond | dict(text_mask=torch.arange(5) < torch.tensor([[3], [1]]))
    mean = cond | dict(text=torch.stack([cond["text"][0, :3].mean(0), cond["text"][1, 0]])[:, None])
    for f in (lambda c: net(x, t, c)), (lambda c: head(features, c)):
        assert close(f(masked), f(mean)) and not close(f(masked), f(cond), 1e-3)

# ---- arguments
@cases()
def test_arguments_are_never_mutated_and_what_cannot_be_used_is_refused(case):
    net, kw = whole(case)
    x, t, cond = inputs(net, case)
    taps, tensors = [*range(net.n_taps)], [x, t, *cond.values(), *kw.values()]
    before, keys = [(v.clone(), v._version) for v in tensors], [*cond]
    for dtype in (torch.float32, torch.bfloat16):
        net.to(dtype)(x, t, cond, taps=taps, **kw)
    assert all(torch.equal(v, old) and v._version == version for v, (old, version) in zip(tensors, before))
    assert [*cond] == keys and taps == [*range(net.n_taps)]
    net, *args = ready(case)                            # built without r and logvar
    asks = ("", dict(r=t)), ("", dict(logvar=True)), ("", dict(stop=True)), ("skip", dict(skip=(0,)))
    for part, kw in (*asks, *(("cache", ask) for ask in (dict(start=1), dict(cache={}), dict(write=True)))):
        if not parts(case, part):
            refused(net, *args, **kw)
    with pytest.raises(TypeError):
        net(*args, nobody_knows_this=1)
    refused(make, case, nobody_knows_this=1, says=["nobody_knows_this"])
    if case.spec in ("flux:dev", "qwen_image:base", "cogvideox:2b", "cosmos_predict2:t2i_2b", "wan:t2v_1_3b"):
        refused(net, x[..., 1:], t, cond, says=["even"])
    for key in {"text", "pooled"} & {*cond} if "toy" not in case.spec else ():
        refused(net, x, t, {k: v for k, v in cond.items() if k != key}, says=[f"{key} of width"])
        refused(net, x, t, cond | {key: cond[key][..., 1:]}, says=[str(tuple(cond[key][..., 1:].shape))])
    refused(make_net, case.spec.split(":")[0] + ":nosuchsize", says=["nosuchsize"])

def test_an_option_no_net_can_be_built_with_is_one_sentence():
    for option in ("heads=0", "label_dim=-3", "label_dim=foo", "dropout=5", "dropout=nan", "depth=0",
                   "channels=-1", "size=7", "label_dim=[1]"):
        for net in "toy:tiny", "edm:digits":
            refused(make_net, f"{net},{option}", says=[net[:3]])
    for net in "flux:dev", "qwen_image:base":
        refused(make_net, f"{net},axes=(4, 6, 8)", says=["axes"])

@cases()
def test_samples_do_not_see_each_other_an_empty_batch_has_a_gradient_and_dropout_acts_in_training(case):
    net = build(case, dropout=0.5).eval()
    x, t, cond = inputs(net, case, batch=3)
    x.requires_grad_()
    cut = lambda n, m: (x[n:m], t[n:m], {k: v[n:m] for k, v in cond.items()})
    assert close(net(*cut(1, 2))[0], net(x, t, cond)[1])
    out = net(*cut(0, 0))
    assert out.shape == x[:0].shape
    out.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())
    assert torch.equal(net(x, t, cond), build(case)(x, t, cond))
    assert not torch.equal(net.train()(x, t, cond), net(x, t, cond))

@cases("skip")
def test_skip_leaves_out_a_block_and_no_other(case):
    (net, x, t, cond), calls = ready(case), []
    for name in net.blocks:
        net.get_submodule(name).register_forward_hook(lambda module, args, out, name=name: calls.append(name))
    out = net(x, t, cond)
    for i, name in enumerate(net.blocks[:net.n_taps]):
        calls.clear()
        assert not close(net(x, t, cond, skip=(i,)), out, 1e-4)
        assert sorted(calls) == sorted(other for other in net.blocks if other != name)

# ---- causal video nets; the first chunk takes the remainder
def clip(case, sizes):
    """A causal net and a clip of chunks of these sizes, one time per chunk, them as slices, the condition."""
    net, frames = build(case, chunk=3 if sizes == [2] else sizes[-1]), sum(sizes)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, net.x_shape[0], frames, *net.x_shape[2:], generator=generator)
    t = torch.rand(2, len(sizes), generator=generator, dtype=f64).repeat_interleave(torch.tensor(sizes), 1)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    spans = [slice(end - size, end) for end, size in zip(ends, sizes)]
    return net, x, t, spans, inputs(net, case)[2]

@cases("cache")
@pytest.mark.parametrize("sizes", [[4, 3], [2, 2, 2], [1] * 5, [2], [5, 3]])
def test_a_frame_sees_its_own_and_earlier_chunks_alone_and_a_cache_gives_the_full_forward(case, sizes):
    net, x, t, spans, cond = clip(case, sizes)
    out = net(x, t, cond)
    for span in spans:
        x_new, t_new = x.clone(), t.clone()
        x_new[:, :, span.stop - 1] += 1
        moved = net(x_new, t, cond) != out
        assert not moved[:, :, :span.start].any()
        assert moved[:, :, span.start:].any(-1).any(-1).any(1).all()    # all of its own and later chunks
        t_new[:, span] /= 2
        assert torch.equal(net(x, t_new, cond)[:, :, :span.start], out[:, :, :span.start])
    clean, zero, cache = x.flip(0) / 2, torch.zeros_like(t), None
    for span in spans:                                  # clean frames at t = 0, then this chunk at its t
        x_all = torch.cat([clean[:, :, :span.start], x[:, :, span]], dim=2)
        t_all = torch.cat([zero[:, :span.start], t[:, span]], dim=1)
        chunk, past = (x[:, :, span], t[:, span], cond), dict(start=span.start, cache=cache)
        out = net(*chunk, **past)
        assert close(out, net(x_all, t_all, cond)[:, :, span])
        cache = net(clean[:, :, span], zero[:, span], cond, write=True, **past)["cache"]
        assert torch.equal(net(*chunk, **past), out)                    # the old cache is as it was
    at_once = net(clean, zero, cond, write=True)["cache"]           # all chunks in one call under the mask
    assert close(*(net(*chunk, start=sum(sizes), cache=each) for each in (at_once, cache)))

@cases("cache")
def test_a_cache_carries_no_gradient_and_positions_count_relative_to_it(case):
    net, x, t, spans, cond = clip(case, [2, 2])
    first, second = [(x[:, :, span].clone().requires_grad_(), t[:, span], cond) for span in spans]
    result = net(*first, write=True)
    out = net(*second, start=2, cache=result["cache"])
    assert torch.autograd.grad(out.sum(), first[0], allow_unused=True)[0] is None
    assert torch.autograd.grad(result["out"].sum(), first[0])[0].any()
    assert close(net(*first, start=7), net(*first))
    read = lambda at, start: net(*second, start=start, cache=net(*first, start=at, write=True)["cache"])
    assert close(read(7, 9), out) and not close(read(0, 9), out, 1e-4)
    t, both_ways = torch.tensor([0.2, 0.8], dtype=f64), build(case, chunk=0)    # one time, one chunk for all
    assert torch.equal(net(x, t, cond), net(x, t[:, None].expand(-1, 4), cond))
    assert torch.equal(both_ways(x, t, cond), build(case, chunk=4)(x, t, cond))
    assert not close(both_ways(x, t, cond), net(x, t, cond), 1e-4)

def test_toy_cache_keeps_a_window_with_absolute_or_window_positions():
    net, x, t, spans, cond = clip(CASES["toy_video"], [2, 2])
    cache, chunk = net(x, t, cond, write=True)["cache"], (x[:, :, :2], t[:, :2], cond)
    window = dict(pos=cache["pos"][2:], kv=[kv[:, 2:] for kv in cache["kv"]])
    absolute = net(*chunk, start=4, cache=window)
    assert close(absolute, net(*chunk, start=2, cache=dict(window, pos=torch.arange(2))))
    assert not close(absolute, net(*chunk, start=4, cache=cache), 1e-4)
