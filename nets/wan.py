"""Wan (Wan team 2025, arXiv 2503.20314): video on latents, bidirectional or causal with the same weights.

    wan:t2v_1_3b, t2v_14b     text to video (2.1)
    wan:ti2v_5b               text, or text and a first frame, to video (2.2): the frame stands in x's place
    wan:i2v_14b               text and a first frame to video (2.1): its latents stand beside x, CLIP sees it
    wan:vace_1_3b, vace_14b   text and a control video to video: blocks of their own add hints to the others
    wan:digits                class labels to the moving digits (of data.py), in pixels: not a public net

The diffusers folders load as they are, the original files through `layouts`, Self-Forcing's as the source
FILE#generator. The net predicts the flow eps - x0 at t in [0, 1], one time per clip or latent frame. With
chunk > 0 a frame sees its own chunk and the chunks before (`common.chunks`), each a slice of the keys, so no
mask can be wrong. It then takes a cache:

    cache = dict(pos (P,) int64: positions of the cached frames,
                 kv: one (B, P, h w, 2 D) per block: keys before RoPE, and values, detached)

With window > 0 a chunk sees the last `window` frames, its own among them, and the first `sink` of all; no
others stay in the cache. RoPE turns by a frame's position in the clip or, with positions="window", by its
place among those that the chunk sees. Keys of the text are not cached: 1 % of the work on a chunk of 3.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from common import BadInput, chunks, known, wide
from nets.layers import (Linear, Net, Zero, angles, attend, feed_forward, flow_to, grid, maker, mlp2,
                         modulate, per_frame, rope, sin_emb, split, thirds, unipc)

small = dict(x_shape=(16, 21, 60, 104), depth=30, dim=1536, heads=12, hidden=8960)
large = dict(x_shape=(16, 21, 60, 104), depth=40, dim=5120, heads=40, hidden=13824)
sizes = dict(
    t2v_1_3b=small, t2v_14b=large,
    ti2v_5b=dict(x_shape=(48, 21, 44, 80), depth=30, dim=3072, heads=24, hidden=14336, first="replace",
                 shift=5.0),
    i2v_14b=large | dict(first="concat", image_dim=1280),
    vace_1_3b=small | dict(control=96, hints=tuple(range(0, 30, 2))),
    vace_14b=large | dict(control=96, hints=tuple(range(0, 40, 5))),
    digits=dict(x_shape=(1, 8, 12, 12), depth=4, dim=64, heads=4, hidden=256, patch=4, freq=64, text_dim=0,
                label_dim=10))


def join(parts, dim):
    """torch.cat, without a copy where there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class Attention(nn.Module):
    """Queries and keys with RMS norm over all heads together."""
    def __init__(self, dim, heads, eps, image=False):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (Linear(dim, dim) for _ in range(3))
        self.norm_q, self.norm_k = (nn.RMSNorm(dim, eps=eps) for _ in range(2))
        self.to_out = nn.ModuleList([Linear(dim, dim)])
        if image:
            self.add_k_proj, self.add_v_proj = (Linear(dim, dim) for _ in range(2))
            self.norm_added_k = nn.RMSNorm(dim, eps=eps)


class SelfAttention(Attention):
    def forward(self, x, sight, past):
        """x (B, T, S, D), past (B, P, S, 2 D) or None -> like x; keys and values (B, T, S, 2 D) to cache."""
        q, k, v = self.norm_q(self.to_q(x)), self.norm_k(self.to_k(x)), self.to_v(x)
        new = torch.cat([k, v], dim=-1).detach() if sight.write else None
        if past is not None:
            k, v = (torch.cat(pair, dim=1) for pair in zip(past.chunk(2, dim=-1), (k, v)))
        (q, k, v), tokens, out = split(self.heads, *(y.flatten(1, 2) for y in (q, k, v))), x.shape[2], []
        if not sight.relative:
            q, k = rope(q, sight.angle[-q.shape[2]:]), rope(k, sight.angle)
        for (begin, end), spans in sight.views:
            part = q[:, :, begin * tokens:end * tokens]
            keys, values = (join([y[:, :, a * tokens:b * tokens] for a, b in spans], dim=2) for y in (k, v))
            if sight.relative:
                angle = sight.angle[:keys.shape[2]]
                part, keys = rope(part, angle[-part.shape[2]:]), rope(keys, angle)
            out.append(attend(part, keys, values))
        return self.to_out[0](join(out, dim=1).view(x.shape)), new


class CrossAttention(Attention):
    def forward(self, x, text, image):
        """x (B, T, S, D) sees text (B, L, D) and, apart from it, image (B, N, D) or None."""
        q = self.norm_q(self.to_q(x)).flatten(1, 2)
        q, k, v = split(self.heads, q, self.norm_k(self.to_k(text)), self.to_v(text))
        y = attend(q, k, v)
        if image is not None:
            k, v = self.norm_added_k(self.add_k_proj(image)), self.add_v_proj(image)
            y = y + attend(q, *split(self.heads, k, v))
        return self.to_out[0](y.view(x.shape))


class Sight(NamedTuple):
    """What each chunk sees: its frames (first, end) with spans [(first, end), ...] of frames counted from the
    first cached one, its own last; RoPE angles (K, d / 2) of all keys, or of as many as a chunk sees at most
    where they are relative to that; whether to return what a cache holds."""
    views: list
    angle: torch.Tensor
    relative: bool
    write: bool


def spans(low, end, sink):
    """The frames from low to end and the first `sink` ones, as [(first, end), ...]."""
    return [(0, end)] if low <= sink else [(0, sink), (low, end)] if sink else [(low, end)]


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, eps, image, dropout, norm_temb):
        super().__init__()
        self.scale_shift_table, self.norm_temb = nn.Parameter(torch.empty(1, 6, dim)), norm_temb
        self.attn1, self.attn2 = SelfAttention(dim, heads, eps), CrossAttention(dim, heads, eps, image)
        self.norm2, self.ffn = nn.LayerNorm(dim, eps=eps), feed_forward(dim, dropout, hidden)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.scale_shift_table, std=self.scale_shift_table.shape[2] ** -0.5)

    def forward(self, x, mod, text, image, sight, past):
        """x (B, T, S, D), mod (B, T, 6, D) -> x; keys and values for the cache."""
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.scale_shift_table + mod).unbind(2)
        if self.norm_temb:
            unit = lambda v: v / (v.norm(dim=-1, keepdim=True) + 1e-4)                          # noqa: E731
            shift1, scale1, shift2, scale2 = map(unit, (shift1, scale1, shift2, scale2))
        y, kv = self.attn1(modulate(x, shift1, scale1), sight, past)
        x = x + gate1.unsqueeze(2) * y
        x = x + self.attn2(self.norm2(x), text, image)
        return x + gate2.unsqueeze(2) * self.ffn(modulate(x, shift2, scale2)), kv


class VaceBlock(Block):
    def __init__(self, first, dim, *options):
        super().__init__(dim, *options)
        self.proj_in, self.proj_out = Linear(dim, dim) if first else None, Zero(dim, dim)

    def forward(self, c, x, *rest):
        """c (B, T, S, D) of the control, x before any block -> c; the hint, like c; keys and values."""
        c, kv = super().forward(c if self.proj_in is None else self.proj_in(c) + x, *rest)
        return c, self.proj_out(c), kv


original = (
    ("^layers", "blocks"), ("^scale_shift_table", "head.modulation"), ("^proj_out", "head.head"),
    ("scale_shift_table", "modulation"), (r"^condition_embedder\.(time|text)_embedder", r"\1_embedding"),
    (r"linear_1", "0"), (r"linear_2", "2"), (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.", "img_emb.proj."), (r"proj\.norm1", "proj.0"),
    (r"proj\.norm2", "proj.4"), (r"proj\.ff\.net\.0\.proj", "proj.1"), (r"proj\.ff\.net\.2", "proj.3"),
    (r"\.norm2\.", ".norm3."), ("attn1", "self_attn"), ("attn2", "cross_attn"), (r"to_out\.0", "o"),
    (r"\.to_([qkv])\.", r".\1."), (r"add_([kv])_proj", r"\1_img"), ("norm_added_k", "norm_k_img"),
    (r"ffn\.net\.0\.proj", "ffn.0"), (r"ffn\.net\.2", "ffn.2"), ("proj_in", "before_proj"),
    ("proj_out", "after_proj"))


class Wan(Net):
    """hidden: width inside the MLPs; first: what is done with cond's first_frame, "" nothing, "replace" it
    takes x's place, "concat" it stands beside x; image_dim: width of CLIP's states; control: channels of the
    control; hints: the blocks that its blocks add to; freq: of the time's embedding;
    shift: of the teacher's times; r_kind: "diff" embeds t - r, "abs" r; norm_temb: shifts and scales of unit
    length (sCM); chunk, window and sink in latent frames. A token is patch x patch latents. Without text
    (text_dim 0) the text is one token, learned for each of label_dim labels and for none."""
    schedule, pred = "rf", "flow"
    layouts = dict(public=(("^layers", "blocks"),), original=original,
                   self_forcing=(*original, ("^", "model.")))

    def __init__(self, x_shape, depth, dim, heads, hidden, text_dim=4096, first="", image_dim=0, control=0,
                 hints=(), freq=256, shift=3.0, chunk=0, window=0, sink=0,
                 positions="absolute", r=False, r_kind="diff", norm_temb=False, logvar=False, eps=1e-6,
                 dropout=0.0, patch=2, label_dim=0):
        super().__init__(x_shape, r, logvar)
        if dim % heads or dim // heads % 2 or dim // heads < 6 or dim % patch ** 2:
            raise BadInput(f"wan: dim {dim} must be a multiple of {patch ** 2}, dim / heads ({heads}) even, "
                           f"at least 6")
        if min(chunk, window, sink) < 0 or 0 < window < chunk:
            raise BadInput(f"wan: chunk {chunk}, window {window} and sink {sink} must not be negative, a "
                           f"window (0 = all frames) not shorter than a chunk")
        known("wan: first", first, ("", "replace", "concat"))
        known("wan: r_kind", r_kind, ("diff", "abs"))
        known("wan: positions", positions, ("absolute", "window"))
        self.dim, self.freq, self.shift, self.r_kind = dim, freq, shift, r_kind
        self.text_dim, self.image_dim, self.first, self.control = text_dim, image_dim, first, control
        self.chunk, self.window, self.sink, self.positions = chunk, window, sink, positions
        self.takes = ("skip", "start", "cache", "write") if self.chunk else ("skip",)
        self.patch, self.label_dim = patch, label_dim
        self.hints, self.axes = tuple(hints), thirds(dim // heads)
        channels, frames, rows, columns = x_shape
        self.blocks = [f"layers.{i}" for i in range(depth)] + [f"vace_blocks.{j}" for j in range(len(hints))]
        self.taps_at = [(dim // patch ** 2, frames, rows, columns)] * depth

        self.patch_embedding = self.patches(2 * channels + 4 if first == "concat" else channels)
        self.condition_embedder = self.times(Linear)
        self.condition_embedder["text_embedder"] = (mlp2(text_dim, dim, act=lambda: nn.GELU("tanh"))
                                                    if text_dim else nn.Embedding(label_dim + 1, dim))
        if image_dim:
            self.condition_embedder["image_embedder"] = nn.ModuleDict(dict(
                norm1=nn.LayerNorm(image_dim), norm2=nn.LayerNorm(dim),
                ff=feed_forward(image_dim, 0.0, image_dim, dim, "none")))
        self.r_embedder = self.times(Zero) if r else None
        self.logvar_linear = Zero(dim, 1) if logvar else None
        block = dim, heads, hidden, eps, image_dim > 0, dropout, norm_temb
        self.layers = nn.ModuleList(Block(*block) for _ in range(depth))
        if control:
            self.vace_patch_embedding = self.patches(control)
            self.vace_blocks = nn.ModuleList(VaceBlock(j == 0, *block) for j in range(len(hints)))
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, dim))
        self.proj_out = Zero(dim, patch ** 2 * channels)
        self.reset_parameters()

    def patches(self, channels):
        size = 1, self.patch, self.patch
        return nn.Conv3d(channels, self.dim, size, stride=size)

    def times(self, last):
        return nn.ModuleDict(dict(time_embedder=mlp2(self.freq, self.dim, last),
                                  time_proj=Linear(self.dim, 6 * self.dim)))

    def reset_parameters(self):
        nn.init.normal_(self.scale_shift_table, std=self.dim ** -0.5)

    def replaced(self, cond, start, x):
        """The first frame (B, C, 1, H, W) where it is given and takes x's place at time 0, else None."""
        if self.first == "replace" and not start and "first_frame" in cond:
            return self.need_frames(cond, "first_frame", self.x_shape[0], 0, x[:, :, :1])

    def settle(self, out, x_t, t, cond, start):
        """A first frame that took x's place comes out as x0."""
        if (clean := self.replaced(cond, start, x_t)) is None:
            return out
        flow = flow_to(wide(clean), x_t[:, :, :1], per_frame(t, x_t)[:, :1])
        return torch.cat([flow.to(out.dtype), out[:, :, 1:]], dim=2)

    def run(self, x, times, cond, tap, skip, start=0, cache=None, write=False):
        """cond: text (B, L, text_dim), seen whole with its padding, or label (B,); image (B, N, image_dim);
        first_frame (B, C, 1, H, W), to stand beside (B, C, T, H, W) of it and black ones; control (B, C, T,
        H, W)."""
        p, embed, image = self.patch, self.condition_embedder, None
        *_, height, width = x.shape
        if height % p or width % p:
            raise BadInput(f"height and width must be {'even' if p == 2 else f'multiples of {p}'}, not "
                           f"{(height, width)}: a token is {p} x {p} latents")
        own = self.need(cond, text=self.text_dim) if self.text_dim else [self.labels(cond, x[:, 0, 0, 0, 0])]
        text = embed["text_embedder"](own[0] if self.text_dim else own[0][:, None])             # (B, L, D)
        if self.image_dim:
            (image,), view = self.need(cond, image=self.image_dim), embed["image_embedder"]
            image = view["norm2"](view["ff"](view["norm1"](image)))                             # (B, N, D)
        tokens = lambda y: rearrange(y, "b d t h w -> b t (h w) d")                             # noqa: E731

        def pixels(y):
            return rearrange(y, "b t (h w) (p q c) -> b c t (h p) (w q)", h=height // p, p=p, q=p)
        control = self.need_frames(cond, "control", self.control, start, x) if self.control else None
        at, count = [per_frame(v, x) for v in times], torch.arange(x.shape[2], device=x.device)
        if (first := self.replaced(cond, start, x)) is not None:
            x, at = torch.cat([first, x[:, :, 1:]], dim=2), [v * (count > 0) for v in at]
        if self.first == "concat":      # beside x: 4 channels that are 1 on the clip's first frame, then that
            mask = (count + start == 0).to(x.dtype)[:, None, None].expand(len(x), 4, -1, *x.shape[3:])
            x = torch.cat([x, mask, self.need_frames(cond, "first_frame", self.x_shape[0], start, x)], dim=1)
        sight, pos = self.look(x, start, cache, write)
        x = tokens(self.patch_embedding(x))                                                     # (B, T, S, D)
        e, mod = self.embed_time(embed, at[0])
        if len(at) > 1:
            e_r, mod_r = self.embed_time(self.r_embedder, at[1] if self.r_kind == "abs" else at[0] - at[1])
            e, mod = e + e_r, mod + mod_r
        past = [kv.to(self.dtype) for kv in cache["kv"]] if cache else [None] * len(self.blocks)
        shared, kvs, side, hints = (mod, text, image, sight), [], [], {}

        if self.control:
            c = tokens(self.vace_patch_embedding(control))
            for i, block, old in zip(self.hints, self.vace_blocks, past[len(self.layers):]):
                c, hints[i], kv = block(c, x, *shared, old)
                side.append(kv)
        for i, (block, old) in enumerate(zip(self.layers, past)):
            if i not in skip:
                x, kv = block(x, *shared, old)
                kvs.append(kv)
            x = x + hints[i] if i in hints else x
            if tap(i, pixels(x)):
                return None, e
        shift, scale = (self.scale_shift_table + e.unsqueeze(2)).unbind(2)
        out = pixels(self.proj_out(modulate(x, shift, scale)))
        if not write:
            return out, e
        kept = spans(len(pos) - self.window if self.window else 0, len(pos), self.sink)
        keep = lambda y, dim: join([y.narrow(dim, a, b - a) for a, b in kept], dim)             # noqa: E731
        whole = [kv if old is None else torch.cat([old, kv], dim=1) for old, kv in zip(past, kvs + side)]
        return out, e, dict(pos=keep(pos, 0), kv=[keep(kv, 1) for kv in whole])

    def embed_time(self, embed, t):
        """t (B, T) -> its embedding (B, T, D), the blocks' modulation (B, T, 6, D)."""
        e = embed["time_embedder"](sin_emb(1000 * t, self.freq, self.dtype))
        return e, embed["time_proj"](F.silu(e)).unflatten(-1, (6, self.dim))

    def look(self, x, start, cache, write):
        """What the chunks of x (B, C, T, H, W) see, and the positions (P + T,) of cached and given frames."""
        count = lambda n: torch.arange(n, device=x.device)                                      # noqa: E731
        frames, end, views = x.shape[2], len(cache["pos"]) if cache else 0, []
        begin, pos = end, count(frames) + start
        pos = torch.cat([cache["pos"], pos]) if cache else pos
        for size in chunks(frames, self.chunk):
            end += size
            low = min(end - self.window, end - size) if self.window else 0
            views.append(((end - size - begin, end - begin), spans(low, end, self.sink)))
        relative = self.positions == "window"
        seen = count(max(sum(b - a for a, b in view) for _, view in views)) if relative else pos
        angle = angles(grid(seen, *(count(n // self.patch) for n in x.shape[3:])), self.axes)
        return Sight(views, angle, relative, write), pos


make = maker(Wan, sizes)


def teacher_sample(net, noise, cond, steps, uncond=None, guidance=1.0):
    """As WanPipeline and its kin, with the shift that the net was built with (3; ti2v_5b 5)."""
    x = unipc(net, noise, cond, net.shift, steps, uncond, guidance)
    first = net.replaced(cond, 0, x)
    return x if first is None else torch.cat([first.to(x), x[:, :, 1:]], dim=2)
