"""What the nets of the public models share: the checked call, embeddings, attention, positions, samplers."""
import math
from collections import OrderedDict
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import BadInput, add_noise, convert, expand, predict, t_like, wide


class Net(nn.Module):
    """The call of every net around a family's own `run`, with everything about it checked.

    A family sets schedule, pred, blocks and taps_at, the shapes (C, [T,] H, W) of its taps. Its first
    parameter, from which the weights' type is read, is in none of its blocks. It has

        run(x (B, C, [T,] H, W), times, cond, tap, **kw)
            -> prediction like x, None if stopped; what its log-variance head takes (B, [T,] D); the cache

    x and cond's tensors, but for those in `exact`, come in the weights' type, times = (t,) or (t, r) float64
    (B,), for video also (B, T), as given. kw are those of skip, start, cache and write that the net `takes`;
    the cache is returned where `write` asks for it. After the k-th tapped block it calls tap(k, feature
    (B, C, [T,] H, W)) and stops where that returns True. `optional` parts may be lacking, in sources too:
    every net has, besides what its paper says, a second time r and a log-variance head on t's embedding."""
    optional = ("r_embedder.", "logvar_linear.")
    logvar_at = "logvar_linear"
    transformer = True                   # its features are all of one size, those of a U-Net shrink
    exact = ()                           # keys of cond that keep their own type: numbers like t
    label_dim = 0
    takes = ()                           # of skip, start, cache, write
    layouts = dict(public=())            # of sources: substitutions (pattern, theirs) from our keys to theirs

    def __init__(self, x_shape, r=False, logvar=False):
        super().__init__()
        self.x_shape, self.built = tuple(x_shape), dict(r=r, logvar=logvar)

    @property
    def n_taps(self):
        return len(self.taps_at)

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def tap_shapes(self, taps):
        """Shapes (C, [T,] H, W) at x_shape of the features that a call with these taps returns, ascending."""
        if bad := [k for k in taps if k not in range(self.n_taps)]:
            raise BadInput(f"tap {bad[0]} does not exist in this net; its taps are 0 to {self.n_taps - 1}")
        return [self.taps_at[k] for k in sorted(set(taps))]

    def adapt(self, key, tensor):
        """A source's tensor for this net; None for an optional part that it was built without."""
        part = next((part for part in self.optional if key.startswith(part)), None)
        return None if part and not any(own.startswith(part) for own in self.state_dict()) else tensor

    def coefficients(self, t):
        """(c_in, c_skip, c_out), each like t, of a net that predicts c_skip x_t + c_out run(c_in x_t)."""
        return None

    def settle(self, out, x_t, t, cond, start):
        """The prediction `out`, in which a family may put what is given; x_t and cond are the call's own."""
        return out

    def forward(self, x_t, t, cond={}, r=None, taps=(), stop=False, logvar=False, skip=(), start=0,
                cache=None, write=False):
        """x_t (B, C, [T,] H, W), t and r (B,), for video also (B, T) -> the prediction in at least float32,
        or a dict of out, taps, logvar (B,), cache. What cond may hold is said by the family; the rest of it
        is ignored. skip: indices of tapped blocks that are left out. start: position of the first frame.
        cache: of earlier frames, read; write: returned with these frames, the given one is as it was."""
        extra = dict(skip=skip, start=start, cache=cache, write=write)
        for name, value in extra.items():
            if name not in self.takes and (value or name == "cache" and value is not None):
                raise BadInput(f"{type(self).__name__} as it was built takes {self.takes or 'none'} of skip, "
                               f"start, cache and write; leave {name} out")
        if write and (stop or skip) or stop and not taps:
            raise BadInput("stop needs taps; write, the work of all blocks, takes neither stop nor skip")
        for name, asked in dict(r=r is not None, logvar=logvar).items():
            if asked and not self.built[name]:
                raise BadInput(f"{name} was asked of a net built without it; build the net with {name}=True")
        if r is None and self.built["r"]:
            raise BadInput("this net was built with r=True and needs r in every call")
        if x_t.shape[1] != self.x_shape[0] or x_t.ndim != len(self.x_shape) + 1:
            raise BadInput(f"x_t of shape {tuple(x_t.shape)} for a net of {self.x_shape}")
        shapes, features = self.tap_shapes(taps), []
        self.tap_shapes(skip)

        def tap(k, feature):
            if k in taps:
                features.append(feature.contiguous())
            return stop and len(features) == len(shapes)

        cast = lambda v: v.to(self.dtype) if v.is_floating_point() else v                       # noqa: E731
        own = {k: v if k in self.exact else cast(v) for k, v in cond.items()}
        times = (t,) if r is None else (t, r)
        x, scales = wide(x_t), self.coefficients(t)
        if scales:                       # taken in t's precision, applied in at least float32
            c_in, c_skip, c_out = (expand(c, x) for c in scales)
        out, e, *written = self.run(cast(c_in * x if scales else x), times, own, tap,
                                    **{k: extra[k] for k in self.takes})
        result = dict(taps=features) if taps else {}
        if out is not None:
            out = c_skip * x + c_out * out.to(x.dtype) if scales else out.to(x.dtype)
            result["out"] = self.settle(out, x_t, t, cond, start)
        if logvar:                                                                      # over the frames
            result["logvar"] = self.get_submodule(self.logvar_at)(e).flatten(1).mean(1).to(x.dtype)
        if write:
            result["cache"], = written
        return result if taps or logvar or write else result["out"]

    def need(self, cond, **widths):
        """The tensors of cond that the net cannot do without, each with the width of its last axis."""
        for key, width in widths.items():
            found = f"has {key} of shape {tuple(cond[key].shape)}" if key in cond else f"holds {sorted(cond)}"
            if key not in cond or cond[key].shape[-1] != width:
                raise BadInput(f"{type(self).__name__} needs {key} of width {width} in cond, which {found}; "
                               f"are there captions, and --encoders?")
        return [cond[key] for key in widths]

    def need_frames(self, cond, key, channels, start, x):
        """cond's latents (B, channels, T, H, W) at the frames of x, of which the first is `start`."""
        given, end = cond.get(key), start + x.shape[2]
        want, found = (len(x), channels, end, *x.shape[3:]), () if given is None else tuple(given.shape)
        if (*found[:2], *found[3:]) != (*want[:2], *want[3:]) or found[2] < end:
            raise BadInput(f"{type(self).__name__} as built needs {key} {want}, or more frames, in cond, "
                           f"which has {found or 'none'}")
        return given[:, :, start:end]

    def labels(self, cond, t):
        """Class indices (B,) of cond, -1 (none) as label_dim, which is the null class."""
        label = cond.get("label", torch.full_like(t, -1, dtype=torch.int64))
        if label.device.type == "cpu" and (label >= self.label_dim).any() and self.label_dim:
            raise BadInput(f"label {int(label.max())} is not below the net's label_dim {self.label_dim}")
        return torch.where(label < 0, self.label_dim, label) if self.label_dim else torch.zeros_like(label)


def maker(net, sizes):
    """make(size, **options) of a family: its net of a named size, where options that are not None override
    the entry. Data with classes offer label_dim, which a size without that entry has no use for."""
    def make(size, /, **options):
        own = sizes[size]
        return net(**own | {k: v for k, v in options.items()
                            if v is not None and (k != "label_dim" or k in own)})
    return make


# ---- layers, embeddings, attention

class Linear(nn.Linear):
    """Starts by Xavier, biases at 0, as transformers of this kind do."""
    start = staticmethod(nn.init.xavier_uniform_)

    def reset_parameters(self):
        self.start(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Zero(Linear):
    """Starts at 0: what it adds changes nothing until it is trained."""
    start = staticmethod(nn.init.zeros_)


def sin_emb(t, n, dtype, scale=1.0):
    """[cos, sin](scale t f), f falling from 1 to 1e-4: (...) -> (..., n), `dtype` from at least float32."""
    t = t.to(torch.promote_types(torch.float32, dtype))
    # in the references' order of operations: another one moves an angle of 1000 by 1e-4 in float32
    f = torch.exp(-math.log(1e4) * torch.arange(n // 2, dtype=t.dtype, device=t.device) / (n // 2))
    angle = scale * (t[..., None] * f)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype)


def per_frame(t, x):
    """Times (B,) or (B, T) as (B, T), one for each frame of x (B, C, T, H, W)."""
    if t.ndim == 2 and t.shape[1] != x.shape[2]:
        raise BadInput(f"t of shape {(*t.shape,)} for {x.shape[2]} frames; one time a clip or a frame is due")
    return (t if t.ndim == 2 else t[:, None]).expand(-1, x.shape[2])


def flow_to(clean, x_t, t):
    """The flow from x_t that ends at `clean`: x_t - t flow = clean; at t = 0 any flow gives x_t."""
    return (wide(x_t) - clean) * expand((t > 0) / t.clamp(min=1e-6), x_t)


def rope(x, angle):
    """Rotates neighbouring channels of x (B, heads, S, d) by angle (S, d / 2) in at least float32."""
    if angle is None:
        return x
    a, b = x.to(torch.promote_types(torch.float32, x.dtype)).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos().to(a.dtype), angle.sin().to(a.dtype)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def angles(positions, axes, theta=1e4):
    """RoPE angles, float64 (S, sum(axes) / 2), of positions (S,) along each axis, axes[i] channels for it."""
    return torch.cat([p.double()[:, None] * theta ** (-torch.arange(0, n, 2, device=p.device).double() / n)
                      for p, n in zip(positions, axes)], dim=1)


def thirds(d):
    """A head's d channels for (frame, row, column), each even; what does not divide goes to the frames."""
    return d - 4 * (d // 6), 2 * (d // 6), 2 * (d // 6)


def sin_table(positions, axes):
    """A fixed table of positions, float64 (S, sum(axes)): [sin, cos] of their angles along each axis."""
    parts = [angles([p], [n]) for p, n in zip(positions, axes)]
    return torch.cat([half for a in parts for half in (a.sin(), a.cos())], dim=1)


def label_rows(table, label):
    """A table's rows (B, D) for classes label (B,), zeros for -1."""
    return table(label.clamp(min=0)) * (label >= 0)[:, None]


def mean_token(text, cond):
    """Mean (B, D) of the tokens of text (B, L, D) that cond's text_mask (B, L) shows; none: of all."""
    mask = cond.get("text_mask", text.new_ones(text.shape[:2])).to(text.dtype)[..., None]
    return (text * mask).sum(1) / mask.sum(1).clamp(min=1)


def attention(q, k, v, mask=None):
    """softmax(q k' / sqrt(d)) v over (B, heads, S, d); mask (broadcast to (B, heads, S, K)): True = seen, or
    a number to add. Fused kernels have no forward-mode derivative, so torch.func.jvp gets the plain one."""
    with sdpa_kernel(SDPBackend.MATH) if forward_ad._current_level >= 0 else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def split(heads, *streams):
    """(B, S, heads x d) -> (B, heads, S, d) of each."""
    return [rearrange(x, "b s (n d) -> b n s d", n=heads) for x in streams]


def attend(q, k, v, angle=None, mask=None):
    """`attention` of queries and keys turned by angle: (B, heads, S, d) -> (B, S, heads x d)."""
    return rearrange(attention(rope(q, angle), rope(k, angle), v, mask), "b n s d -> b s (n d)")


def modulate(x, shift, scale, norm=None):
    """`norm`, or LayerNorm without parameters, then scale and shift (B, [T,] D) for each token of x
    (B, [T,] S, D)."""
    x = norm(x) if norm else F.layer_norm(x, x.shape[-1:], eps=1e-6)
    return x * (1 + scale.unsqueeze(-2)) + shift.unsqueeze(-2)


# ---- parts under the names of diffusers, which the transformers of images and videos share

def mlp2(width, dim, last=Linear, act=nn.SiLU):
    """Embeds a sin_emb of a time, a pooled text, each token of a text. (..., width) -> (..., dim)."""
    return nn.Sequential(OrderedDict(linear_1=Linear(width, dim), act=act(), linear_2=last(dim, dim)))


def feed_forward(dim, dropout=0.0, hidden=0, out=0, gelu="tanh", bias=True):
    """dim -> hidden (4 dim) -> out (dim); gelu: torch's approximation, "none" the exact one."""
    hidden = hidden or 4 * dim
    widen = nn.Sequential(OrderedDict(proj=Linear(dim, hidden, bias), act=nn.GELU(gelu)))
    net = nn.Sequential(widen, nn.Dropout(dropout), Linear(hidden, out or dim, bias))
    return nn.Sequential(OrderedDict(net=net))


class Modulation(nn.Module):
    """n chunks (B, dim) of a linear map of silu(e), e (B, width): shifts, scales, gates. norm: it holds the
    LayerNorm that goes before them, too."""
    def __init__(self, width, n, dim=0, norm=False):
        super().__init__()
        self.n, self.linear = n, Zero(width, n * (dim or width))
        self.norm = nn.LayerNorm(dim, eps=1e-5) if norm else None

    def forward(self, e):
        return self.linear(F.silu(e)).chunk(self.n, dim=1)


class SelfAttention(nn.Module):
    """Queries and keys with a norm per head, turned by angle (S, d / 2). out: its output is mapped."""
    def __init__(self, dim, heads, norm=nn.RMSNorm, out=False):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (Linear(dim, dim) for _ in range(3))
        self.norm_q, self.norm_k = (norm(dim // heads, eps=1e-6) for _ in range(2))
        self.to_out = nn.ModuleList([Linear(dim, dim)]) if out else None

    def forward(self, x, angle):
        q, k, v = split(self.heads, self.to_q(x), self.to_k(x), self.to_v(x))
        y = attend(self.norm_q(q), self.norm_k(k), v, angle)
        return self.to_out[0](y) if self.to_out else y


class JointAttention(SelfAttention):
    """One attention over text, then image, each with weights of its own: x (B, S, D), text (B, L, D), angle
    (L + S, d / 2), mask to (B, 1, 1, L + S) -> both streams."""
    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (Linear(dim, dim) for _ in range(3))
        self.to_out, self.to_add_out = nn.ModuleList([Linear(dim, dim)]), Linear(dim, dim)
        self.norm_added_q, self.norm_added_k = (nn.RMSNorm(dim // heads, eps=1e-6) for _ in range(2))

    def forward(self, x, text, angle, mask=None):
        q, k, v = split(self.heads, self.to_q(x), self.to_k(x), self.to_v(x))
        tq, tk, tv = split(self.heads, self.add_q_proj(text), self.add_k_proj(text), self.add_v_proj(text))
        pairs = (self.norm_added_q(tq), self.norm_q(q)), (self.norm_added_k(tk), self.norm_k(k)), (tv, v)
        y = attend(*(torch.cat(pair, dim=2) for pair in pairs), angle, mask)
        text, x = y.split([text.shape[1], x.shape[1]], dim=1)
        return self.to_out[0](x), self.to_add_out(text)


def dual_stream(x, text, mods, attn, mlps, angle, mask=None):
    """A block on image x (B, S, D) and text (B, L, D): joint attention, then an MLP for each. mods: of image
    and text, (shift, scale, gate) before attention, the same before the MLP, each (B, D)."""
    (a, b), (mlp, mlp_text) = mods, mlps
    y, y_text = attn(modulate(x, *a[:2]), modulate(text, *b[:2]), angle, mask)
    x, text = x + a[2][:, None] * y, text + b[2][:, None] * y_text
    x = x + a[5][:, None] * mlp(modulate(x, *a[3:5]))
    return x, text + b[5][:, None] * mlp_text(modulate(text, *b[3:5]))


def grid(*axes, device=None):
    """Positions along every axis, each (S,), of the tokens of a grid of these (n_i,), or 0 .. n_i - 1; the
    last is fastest."""
    axes = [torch.arange(n, device=device) if isinstance(n, int) else n for n in axes]
    return [p.flatten() for p in torch.meshgrid(*axes, indexing="ij")]


def pack(x):
    """(B, C, [T,] H, W) -> tokens (B, [T x] H / 2 x W / 2, 4 C) of 2 x 2 pixels, channels slowest."""
    if x.shape[-2] % 2 or x.shape[-1] % 2:
        raise BadInput(f"height and width must be even, not {tuple(x.shape[-2:])}: a token is 2 x 2 latents")
    return rearrange(x, "b c ... (h p) (w q) -> b (... h w) (c p q)", p=2, q=2)


def unpack(tokens, rows):
    """The inverse of `pack`; rows = H / 2."""
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=2, q=2)


# ---- samplers

def ddim(net, noise, cond, ks, each, uncond=None, guidance=1.0):
    """x0 from noise(0) by DDIM (Song 2020, arXiv 2010.02502, eta 0) at times ks / 1000 of a table. As in
    diffusers every step goes down by `each`, also where the next of ks is not there; below 0 is x0."""
    x = noise(0)
    for k in ks:
        t = t_like(k / 1000, x)
        pred = predict(net, x, t, cond, net.pred, uncond, guidance)
        x0, eps = (convert(net.schedule, x, pred, t, net.pred, kind) for kind in ("x0", "eps"))
        x = add_noise(net.schedule, x0, eps, t - each / 1000) if k >= each else x0
    return x


def dynamic_mu(tokens, low, high):
    """The line through low and high, each (tokens, mu): larger images get more of their steps near noise."""
    (n0, mu0), (n1, mu1) = low, high
    return mu0 + (tokens - n0) * (mu1 - mu0) / (n1 - n0)


def sigma_grid(steps, mu=0.0, terminal=0.0):
    """Times 1 .. 0, `steps` + 1 of them: s = 1 .. 1 / steps in equal steps, then e^mu s / (1 + (e^mu - 1) s),
    mu = ln of a constant shift, stretched so that the last before 0 is `terminal` (0: as it is)."""
    shift, even = math.exp(mu), [(steps - k) / steps for k in range(steps)]
    ts = [shift * s / (1 + (shift - 1) * s) for s in even]
    if terminal and steps > 1:
        ts = [1 - (1 - t) * (1 - terminal) / (1 - ts[-1]) for t in ts]
    return [*ts, 0.0]


def flow_euler(net, noise, cond, ts, uncond=None, guidance=1.0, rescale=None):
    """x0 from noise(0) by Euler steps of the flow over descending times ts, as diffusers' pipelines with
    FlowMatchEulerDiscreteScheduler: guidance acts only above 1 and with `uncond` given. rescale(guided flow,
    conditional flow) is what a family does to it after that."""
    x = noise(0)
    for t, t_next in zip(ts, ts[1:]):
        flow = predict(net, x, t_like(t, x), cond, "flow")
        if uncond and guidance > 1:
            guided = flow + (guidance - 1) * (flow - predict(net, x, t_like(t, x), uncond, "flow"))
            flow = rescale(guided, flow) if rescale else guided
        x = x + (t_next - t) * flow
    return x


def unipc(net, noise, cond, shift, steps, uncond=None, guidance=1.0, times=()):
    """x0 from noise(0) by UniPC (Zhao 2023, arXiv 2302.04867) of order 2 on x0, B(h) = e^-h - 1, as pipelines
    with diffusers' UniPCMultistepScheduler on flow sigmas: each call corrects the step that led to it, then
    predicts the next. As there the net sees 1000 t cut to an integer; guidance acts as in flow_euler.
    times: in the place of shift and steps, and seen as they are."""
    even = (1 - 0.999 * k / steps for k in range(steps))
    shifted = list(times) or [min(shift * s / (1 + (shift - 1) * s), 1 - 1e-6) for s in even]
    ts = torch.tensor(shifted, dtype=torch.float32, device="cpu").tolist()     # 1 - ts[0] is 1.013e-6 there
    lam = [math.log((1 - t) / t) for t in ts]
    guided = (uncond, guidance) if uncond and guidance > 1 else ()

    def step(x, k, last, before=None, new=None):
        """x at time k from x at time k - 1, with x0 as predicted at k - 1, at k - 2, and at k to correct."""
        h, x0, ahead = lam[k] - lam[k - 1], last, 0.5
        phi = math.expm1(-h)
        if before is not None:
            ratio, behind = (lam[k - 2] - lam[k - 1]) / h, 0.5
            if new is not None:                         # both weights from the two conditions of order 2
                b1, b2 = (-phi / h - 1) / phi, ((1 + phi / h) / h - 0.5) * 2 / phi
                behind = (b1 - b2) / (1 - ratio)
                ahead = b1 - behind
            x0 = x0 + behind * ((before - last) / ratio)
        x0 = x0 if new is None else x0 + ahead * (new - last)
        return ts[k] / ts[k - 1] * x - (1 - ts[k]) * phi * x0

    x, x0s = noise(0), []
    for k, t in enumerate(ts):
        seen = t_like(t if times else int(1000 * shifted[k]) / 1000, x)
        x0 = x - t * predict(net, x, seen, cond, "flow", *guided)
        if k:
            x = step(start, k, *x0s[:-3:-1], new=x0)                                            # noqa: F821
        x0s.append(x0)
        if k + 1 < steps:
            start, x = x, step(x, k + 1, *x0s[:-3:-1])                                          # noqa: F841
    return x0
