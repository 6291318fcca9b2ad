"""toy: a tiny conv/attention net with every argument a network may have: tests of methods take seconds.

One transformer for images (B, C, H, W) and video (B, C, F, H, W); an image is a video of one frame. 2x2
patches, a time per frame, adaLN, attention over all tokens with RoPE over (frame, row, column), a depthwise
convolution in the MLP. With `chunk` > 0 attention is block-causal over chunks of frames: a token sees every
token of its own and of earlier chunks, and the net takes a KV cache as wan does, kv (B, P, h, w, 2 D), of
which all frames given see all. To keep a window, index pos and each kv by frame; positions in the window
instead of absolute ones: pos = arange(P), start = P.

toy:tiny    1x8x8 images, edm schedule, x0 by EDM's preconditioning; options schedule=rf,pred=flow and so on
toy:video   1x6x8x8 video, chunks of 2 frames, rf schedule, flow; chunk=0 makes it bidirectional
"""
import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from common import BadInput, chunk_of, chunks, wide
from nets.layers import Net, Zero, grid, label_rows, maker, mean_token, per_frame, rope

sizes = dict(tiny=dict(label_dim=0), video=dict(label_dim=0, frames=6, chunk=2, schedule="rf", pred="flow"))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.table = nn.Parameter(torch.empty(6, dim))     # added to the modulation that all blocks share
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
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
        y = wide(logits).softmax(-1).to(v.dtype) @ v
        x = x + gate1 * self.proj(rearrange(y, "b n (f h w) d -> b f h w (n d)", f=frames, h=height))

        y = F.silu(self.up(F.layer_norm(x, (dim,)) * (1 + scale2) + shift2))
        y = F.silu(self.conv(rearrange(y, "b f h w d -> (b f) d h w")))
        y = F.dropout(rearrange(y, "(b f) d h w -> b f h w d", f=frames), self.dropout, self.training)
        return x + gate2 * self.down(y), kv.detach()


class Toy(Net):
    """frames = 0: images; chunk = 0: not causal; text_dim > 0: uses cond["text"] (B, L, text_dim) and, if
    there, text_mask (B, L); r: takes a second time; logvar: has the log-variance head."""
    optional, logvar_at, transformer = ("r_embed.", "logvar_head."), "logvar_head", False

    def __init__(self, channels=1, size=8, frames=0, chunk=0, schedule="edm", pred="x0", sigma_data=0.5,
                 label_dim=0, text_dim=0, r=False, logvar=False, dropout=0.0, dim=24, heads=2, depth=2):
        super().__init__((channels, frames, size, size) if frames else (channels, size, size), r, logvar)
        if dim % (6 * heads) or size % 2 or depth < 1 or chunk and not frames:
            raise BadInput(f"toy: dim {dim} must be a multiple of 6 x heads = {6 * heads}, size {size} even, "
                           f"depth {depth} at least 1, and chunk {chunk} needs frames > 0 (now {frames})")
        self.schedule, self.pred, self.sigma_data, self.chunk = schedule, pred, sigma_data, chunk
        self.dim, self.heads, self.label_dim, self.text_dim = dim, heads, label_dim, text_dim
        self.takes = ("skip", "start", "cache", "write") if chunk else ("skip",)
        self.blocks = [f"layers.{i}" for i in range(depth)]
        self.taps_at = [(dim, *self.x_shape[1:-2], size // 2, size // 2)] * depth

        self.patch = nn.Conv2d(channels, dim, 2, stride=2)
        self.t_embed = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.r_embed = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), Zero(dim, dim)) if r else None
        self.logvar_head = Zero(dim, 1) if logvar else None
        self.label_embed = nn.Embedding(self.label_dim, dim) if self.label_dim else None
        self.text_embed = nn.Linear(text_dim, dim) if text_dim else None
        self.mod = nn.Linear(dim, 6 * dim)
        self.layers = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.out = nn.Linear(dim, 4 * channels)

    def run(self, x, times, cond, tap, skip, start=0, cache=None, write=False):
        """cond: label (B,) int64 with -1 = none, text, text_mask. Any F, even H and W."""
        video = x.ndim == 5
        x = x if video else x[:, :, None]                                               # (B, C, F, H, W)
        frames, past = x.shape[2], len(cache["pos"]) if cache else 0

        waves = [self.wave(per_frame(t, x)).to(self.dtype) for t in times]              # (B, F, 16)
        e_t = self.t_embed(waves[0])                                                    # (B, F, D)
        e = e_t if len(waves) == 1 else e_t + self.r_embed(waves[1])
        mod = self.mod(F.silu(e + self.condition(cond))).unflatten(-1, (6, self.dim))   # (B, F, 6, D)

        h = self.patch(rearrange(x, "b c f h w -> (b f) c h w"))
        h = rearrange(h, "(b f) d h w -> b f h w d", f=frames)
        pos = torch.arange(start, start + frames, device=x.device)
        pos = torch.cat([cache["pos"], pos]) if cache else pos                          # (P + F,)
        angle, mask, tokens = self.angle(pos, *h.shape[2:4]), None, h.shape[2] * h.shape[3]
        if len(chunks(frames, self.chunk)) > 1:         # True = seen: cached, own or earlier chunk
            query = chunk_of(frames, self.chunk, x.device)                              # (F,)
            mask = F.pad(query, (past, 0), value=-1) <= query[:, None]                  # (F, P + F)
            mask = mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)
        kvs = []
        for i, layer in enumerate(self.layers):
            old = cache["kv"][i].to(self.dtype) if cache else None
            if i not in skip:
                h, kv = layer(h, mod, angle, mask, old)
                kvs.append(torch.cat([old, kv], dim=1) if write and cache else kv)
            feature = rearrange(h, "b f h w d -> b d f h w")
            if tap(i, feature if video else feature[:, :, 0]):
                return None, F.silu(e_t)

        out = rearrange(self.out(F.layer_norm(h, (self.dim,))),
                        "b f h w (p q c) -> b c f (h p) (w q)", p=2, q=2)
        return out if video else out[:, :, 0], F.silu(e_t), dict(pos=pos, kv=kvs)

    def coefficients(self, t):
        """Karras 2022, table 1; where the prediction is not x0 c_in alone; of another schedule none."""
        if self.schedule != "edm":
            return None
        s = self.sigma_data
        c_in = (s ** 2 + t ** 2).rsqrt()
        x0 = (s * c_in) ** 2, t * s * c_in
        return c_in, *(x0 if self.pred == "x0" else (torch.zeros_like(t), torch.ones_like(t)))

    def wave(self, t):
        """Sine and cosine features of ln(sigma) / 4 (edm) or t, at least float32: (B, F) -> (B, F, 16)."""
        u = t.clamp(min=1e-6).log() / 4 if self.schedule == "edm" else t
        u = u.to(torch.promote_types(self.dtype, torch.float32))
        angle = u[..., None] * 2 ** torch.linspace(0, 5, 8, dtype=u.dtype, device=u.device)
        return torch.cat([angle.cos(), angle.sin()], dim=-1)

    def condition(self, cond):
        """Embedded label plus mean of the embedded text: (B, 1, D), or 0."""
        total = 0
        if self.label_embed is not None and "label" in cond:
            total = total + label_rows(self.label_embed, cond["label"])[:, None]
        if self.text_embed is not None and "text" in cond:
            total = total + mean_token(self.text_embed(cond["text"]), cond)[:, None]
        return total

    def angle(self, pos, height, width):
        """RoPE angles of all tokens (frames h w, d / 2): a third each by frame, row and column."""
        pairs = self.dim // self.heads // 6                                             # per axis
        freq = 100 ** -(torch.arange(pairs, device=pos.device) / pairs)
        angle = torch.cat([p[:, None] * freq for p in grid(pos, height, width, device=pos.device)], dim=-1)
        return angle.to(torch.promote_types(self.dtype, torch.float32))


make = maker(Toy, sizes)
