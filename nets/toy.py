"""toy: a tiny conv/attention net with every argument a network may have: tests of methods take seconds.

One transformer for images (B, C, H, W) and video (B, C, F, H, W); an image is a video of one frame. 2x2
patches, a time per frame, adaLN, attention over all tokens with RoPE over (frame, row, column), a depthwise
convolution in the MLP. With `chunk` > 0 attention is block-causal over chunks of frames: a token sees every
token of its own and of earlier chunks, and the net takes a KV cache:

    cache = dict(pos (P,) int64: absolute frame positions of the cached frames,
                 kv: one (B, P, h, w, 2 D) per block, keys before RoPE (rotated at read) and values, detached)

The caller owns it: `write=True` returns a longer one and changes none; without `write` it is only read. All
frames given see all of it. To keep a window, index pos and each kv by frame; positions in the window instead
of absolute ones: pos = arange(P), start = P.

toy:tiny    1x8x8 images, edm schedule, x0 by EDM's preconditioning; options schedule=rf,pred=flow and so on
toy:video   1x6x8x8 video, chunks of 2 frames, rf schedule, flow; chunk=0 makes it bidirectional
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange

from common import BadInput, chunk_of, chunks, expand

sizes = dict(tiny=dict(), video=dict(frames=6, chunk=2, schedule="rf", pred="flow"))


def make(size, /, **options):
    """Net of a named size; options (those of `Toy`) override its entry."""
    return Toy(**sizes[size] | options)


def wide(dtype):
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rope(x, angle):
    """Rotates neighbouring channels: x (..., n, d) by angle (n, d / 2), in at least float32."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class Zero(nn.Linear):
    """A linear layer that starts at 0: what it adds changes nothing until it is trained."""
    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.table = nn.Parameter(torch.empty(6, dim))     # added to the modulation that all blocks share
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv2d(2 * dim, 2 * dim, 3, padding=1, groups=2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.table, std=self.table.shape[1] ** -0.5)

    def forward(self, x, mod, angle, mask, past):
        """x (B, F, h, w, D), mod (B, F, 6, D), angle of all keys (K, d / 2), mask (queries, K) or None,
        past (B, P, h, w, 2 D) or None -> x, keys and values (B, F, h, w, 2 D) for the cache."""
        frames, height, dim = x.shape[1], x.shape[2], x.shape[-1]
        shift1, scale1, gate1, shift2, scale2, gate2 = (mod + self.table)[:, :, :, None, None].unbind(2)

        y = F.layer_norm(x, (dim,)) * (1 + scale1) + shift1
        q, kv = self.qkv(y).split([dim, 2 * dim], dim=-1)
        q = rearrange(q, "b f h w (n d) -> b n (f h w) d", n=self.heads)
        seen = kv if past is None else torch.cat([past, kv], dim=1)
        k, v = rearrange(seen, "b f h w (s n d) -> s b n (f h w) d", s=2, n=self.heads)
        q, k = rope(q, angle[-q.shape[2]:]), rope(k, angle)
        logits = q @ k.mT / math.sqrt(q.shape[-1])          # explicit softmax: SDPA's kernels have no JVP
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        y = logits.softmax(-1, dtype=wide(logits.dtype)).to(v.dtype) @ v
        x = x + gate1 * self.proj(rearrange(y, "b n (f h w) d -> b f h w (n d)", f=frames, h=height))

        y = F.silu(self.up(F.layer_norm(x, (dim,)) * (1 + scale2) + shift2))
        y = F.silu(self.conv(rearrange(y, "b f h w d -> (b f) d h w")))
        y = F.dropout(rearrange(y, "(b f) d h w -> b f h w d", f=frames), self.dropout, self.training)
        return x + gate2 * self.down(y), kv.detach()


class Toy(nn.Module):
    """frames = 0: images; chunk = 0: not causal; text_dim > 0: uses cond["text"] (B, L, text_dim) and, if
    there, text_mask (B, L); r: takes a second time; logvar: has the log-variance head."""
    def __init__(self, channels=1, size=8, frames=0, chunk=0, schedule="edm", pred="x0", sigma_data=0.5,
                 label_dim=0, text_dim=0, r=False, logvar=False, dropout=0.0, dim=24, heads=2, depth=2):
        super().__init__()
        if dim % (6 * heads) or size % 2 or depth < 1 or chunk and not frames:
            raise BadInput(f"toy: dim {dim} must be a multiple of 6 x heads = {6 * heads}, size {size} even, "
                           f"depth {depth} at least 1, and chunk {chunk} needs frames > 0 (now {frames})")
        self.schedule, self.pred, self.sigma_data, self.chunk = schedule, pred, sigma_data, chunk
        self.x_shape = (channels, frames, size, size) if frames else (channels, size, size)
        self.dim, self.heads, self.label_dim, self.text_dim = dim, heads, label_dim, text_dim
        self.blocks = [f"layers.{i}" for i in range(depth)]
        self.optional, self.n_taps = ("r_embed.", "logvar_head."), depth

        self.patch = nn.Conv2d(channels, dim, 2, stride=2)
        self.t_embed = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.r_embed = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), Zero(dim, dim)) if r else None
        self.logvar_head = Zero(dim, 1) if logvar else None
        self.label_embed = nn.Embedding(self.label_dim, dim) if self.label_dim else None
        self.text_embed = nn.Linear(text_dim, dim) if text_dim else None
        self.mod = nn.Linear(dim, 6 * dim)
        self.layers = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.out = nn.Linear(dim, 4 * channels)

    def tap_shapes(self, taps):
        """Shapes (D, [F,] H/2, W/2) of these taps, outputs of those blocks, in ascending order."""
        if bad := {*taps} - {*range(self.n_taps)}:
            raise BadInput(f"toy: taps and skip go from 0 to {self.n_taps - 1}, not {bad}")
        *frames, height, width = self.x_shape[1:]
        return [(self.dim, *frames, height // 2, width // 2) for _ in set(taps)]

    def adapt(self, key, tensor):
        return None if key.startswith("logvar_head.") and self.logvar_head is None else tensor

    def forward(self, x_t, t, cond={}, r=None, taps=(), stop=False, logvar=False, skip=(), start=0,
                cache=None, write=False):
        """x_t (B, C, H, W) or (B, C, F, H, W), any F, even H and W; t and r (B,), for video also (B, F);
        start: absolute position of the first frame given; cond: label (B,) int64 with -1 = none, text; the
        rest is ignored. Returns the prediction, like x_t in at least float32; if taps, logvar or write are
        asked for, a dict of out (not where it stops at the last tap), taps, logvar (B,) (mean over frames),
        cache."""
        self.check(r, taps, stop, logvar, skip, start, cache, write)
        video, dtype = x_t.ndim == 5, self.patch.weight.dtype
        x_t = (x_t if video else x_t[:, :, None]).to(wide(x_t.dtype))                   # (B, C, F, H, W)
        frames, past = x_t.shape[2], len(cache["pos"]) if cache else 0

        t = self.per_frame(t, frames)                                                   # (B, F)
        c_in, c_skip, c_out = (expand(c, x_t) for c in self.precondition(t))
        h = self.patch(rearrange((c_in * x_t).to(dtype), "b c f h w -> (b f) c h w"))
        h = rearrange(h, "(b f) d h w -> b f h w d", f=frames)

        e_t = self.t_embed(self.wave(t).to(dtype))                                      # (B, F, D)
        e = e_t if r is None else e_t + self.r_embed(self.wave(self.per_frame(r, frames)).to(dtype))
        e = e + self.condition(cond, dtype)
        mod = self.mod(F.silu(e)).unflatten(-1, (6, self.dim))                          # (B, F, 6, D)

        pos = torch.arange(start, start + frames, device=x_t.device)
        pos = torch.cat([cache["pos"], pos]) if cache else pos                          # (P + F,)
        angle = self.angle(pos, *h.shape[2:4]).to(wide(dtype))
        mask = self.mask(past, frames, h.shape[2] * h.shape[3], x_t.device)

        result, kvs, features = {}, [], []
        if logvar:
            result["logvar"] = self.logvar_head(F.silu(e_t)).mean((1, 2)).to(x_t.dtype) # (B,)
        if taps:
            result["taps"] = features
        for i, layer in enumerate(self.layers):
            old = cache["kv"][i].to(dtype) if cache else None
            if i in skip:
                kv = h.new_full((*h.shape[:4], 2 * self.dim), float("nan"))             # shows if ever read
            else:
                h, kv = layer(h, mod, angle, mask, old)
            kvs.append(kv if old is None or not write else torch.cat([old, kv], dim=1))
            if i in taps:
                tap = rearrange(h, "b f h w d -> b d f h w")
                features.append((tap if video else tap[:, :, 0]).contiguous())
            if stop and i == max(taps):
                return result
        if write:
            result["cache"] = dict(pos=pos, kv=kvs)

        h = rearrange(self.out(F.layer_norm(h, (self.dim,))),
                      "b f h w (p q c) -> b c f (h p) (w q)", p=2, q=2)
        out = c_skip * x_t + c_out * h                      # in at least float32
        out = out if video else out[:, :, 0]
        return dict(result, out=out) if result else out

    def check(self, r, taps, stop, logvar, skip, start, cache, write):
        self.tap_shapes((*taps, *skip))
        for sentence, wrong in {
            "a net built with r=True needs r, another takes none": (r is None) != (self.r_embed is None),
            "logvar needs a net built with logvar=True": logvar and self.logvar_head is None,
            "stop needs taps, and comes before the cache is whole": stop and (write or not taps),
            "start, cache and write need a causal net (chunk > 0)":
                not self.chunk and (start or cache is not None or write),
        }.items():
            if wrong:
                raise BadInput(f"toy: {sentence}")

    def per_frame(self, t, frames):
        return (t if t.ndim == 2 else t[:, None]).expand(-1, frames)

    def precondition(self, t):
        """c_in, c_skip, c_out like t (Karras 2022, table 1); 1, 0, 1 where the schedule is not edm."""
        zero, one, s = torch.zeros_like(t), torch.ones_like(t), self.sigma_data
        if self.schedule != "edm":
            return one, zero, one
        c_in = (s ** 2 + t ** 2).rsqrt()
        return (c_in, (s * c_in) ** 2, t * s * c_in) if self.pred == "x0" else (c_in, zero, one)

    def wave(self, t):
        """Sine and cosine features of ln(sigma) / 4 (edm) or t, at least float32: (B, F) -> (B, F, 16)."""
        u = t.clamp(min=1e-6).log() / 4 if self.schedule == "edm" else t
        u = u.to(wide(self.patch.weight.dtype))
        angle = u[..., None] * 2 ** torch.linspace(0, 5, 8, dtype=u.dtype, device=u.device)
        return torch.cat([angle.cos(), angle.sin()], dim=-1)

    def condition(self, cond, dtype):
        """Embedded label plus mean of the embedded text: (B, 1, D), or 0."""
        total = 0
        if self.label_embed is not None and "label" in cond:
            label = cond["label"]
            total = total + (self.label_embed(label.clamp(min=0)) * (label >= 0)[:, None])[:, None]
        if self.text_embed is not None and "text" in cond:
            text = self.text_embed(cond["text"].to(dtype))                              # (B, L, D)
            mask = cond.get("text_mask", text.new_ones(text.shape[:2]))[..., None].to(text.dtype)
            total = total + (text * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return total

    def angle(self, pos, height, width):
        """RoPE angles of all tokens, float32 (frames h w, d / 2): a third each by frame, row and column."""
        axes = [pos, torch.arange(height, device=pos.device), torch.arange(width, device=pos.device)]
        pairs = self.dim // self.heads // 6                                             # per axis
        freq = 100 ** -(torch.arange(pairs, device=pos.device) / pairs)
        grid = torch.meshgrid(*axes, indexing="ij")
        return torch.cat([rearrange(p, "f h w -> (f h w) 1") * freq for p in grid], dim=-1)

    def mask(self, past, frames, tokens, device):
        """True = seen (cached, own or earlier chunk): (F tokens, (P + F) tokens), or None if all is seen."""
        if len(chunks(frames, self.chunk)) == 1:
            return None
        query = chunk_of(frames, self.chunk, device)                             # (F,)
        key = torch.cat([query.new_full((past,), -1), query])                    # (P + F,)
        return (key <= query[:, None]).repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)
