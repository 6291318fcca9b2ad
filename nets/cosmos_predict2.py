"""Cosmos-Predict2 and 2.5, 2B and 14B (NVIDIA 2025, arXiv 2511.00062): text to image, text or video to video,
on 16-channel latents.

State-dict keys are those of the diffusers folders (CosmosTransformer3DModel); NVIDIA's own files load too.
The net predicts the flow eps - x0 at t in [0, 1], embedded as it is, one t for the clip or one per frame.
Predict2 was trained as EDM's denoiser of x0 + s eps; at t = s / (s + 1) that is the same flow. video2world:
where condition_mask is 1 the net sees condition_frames in x's place, at time `condition_t`, and its flow is
the one that leads to them. Taps: the tokens after each block.
"""
from collections import OrderedDict

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from common import BadInput, karras
from nets.layers import (Linear, Net, Zero, angles, attend, feed_forward, flow_euler, flow_to, grid, maker,
                         mlp2, modulate, pack, per_frame, sin_emb, split, thirds, unipc)

small, large = dict(depth=28, dim=2048, heads=16), dict(depth=36, dim=5120, heads=40)
image = dict(x_shape=(16, 1, 96, 170), text_dim=1024, stretch=(1.0, 4.0, 4.0), levels=(0.002, 80.0))
world = image | dict(x_shape=(16, 24, 88, 160), stretch=(1.0, 3.0, 3.0), video2world=True, condition_t=1e-4)
later = world | dict(x_shape=(16, 24, 60, 104), text_dim=100352, text_proj=1024, unipc=True,
                     levels=(0.01, 200.0))
sizes = {"t2i_2b": image | small, "t2i_14b": image | large, "v2w_2b": world | small,
         "v2w_14b": world | large | dict(stretch=(20 / 24, 2.0, 2.0)), "2.5_2b": later | small,
         "2.5_14b": later | large}


class Modulation(nn.Module):
    """n chunks (B, F, D): a map of silu(e) through `rank` channels, plus the common part."""
    def __init__(self, dim, rank, n):
        super().__init__()
        self.n = n
        self.linear_1, self.linear_2 = Linear(dim, rank, bias=False), Zero(rank, n * dim, bias=False)

    def forward(self, e, common):
        own = self.linear_2(self.linear_1(F.silu(e)))
        return (own + common[..., :own.shape[-1]]).chunk(self.n, dim=-1)


class Attention(nn.Module):
    """From tokens x (B, F, N, D) over text (B, L, width), or, where that is None, over themselves."""
    def __init__(self, dim, heads, width, eps):
        super().__init__()
        self.heads, self.to_q = heads, Linear(dim, dim, bias=False)
        self.to_k, self.to_v = (Linear(width, dim, bias=False) for _ in range(2))
        self.norm_q, self.norm_k = (nn.RMSNorm(dim // heads, eps=eps) for _ in range(2))
        self.to_out = nn.ModuleList([Linear(dim, dim, bias=False)])

    def forward(self, x, text=None, angle=None):
        flat = x.flatten(1, 2)
        source = flat if text is None else text
        q, k, v = split(self.heads, self.to_q(flat), self.to_k(source), self.to_v(source))
        q, k = self.norm_q(q), self.norm_k(k)
        if angle is not None:                           # the reference turns pairs (j, j + d / 2)
            q, k = (rearrange(y, "b n s (two d) -> b n s (d two)", two=2) for y in (q, k))
        return self.to_out[0](attend(q, k, v, angle).view(x.shape))


class Block(nn.Module):
    """Tokens x (B, F, N, D), F = 1 or one per frame, text (B, L, width), e (B, F, D), common (B, F, 3 D)."""
    def __init__(self, dim, heads, width, rank, eps, dropout):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (Modulation(dim, rank, 3) for _ in range(3))
        self.attn1, self.attn2 = Attention(dim, heads, dim, eps), Attention(dim, heads, width, eps)
        self.ff = feed_forward(dim, dropout, bias=False, gelu="none")

    def forward(self, x, text, e, common, angle):
        for norm, layer in ((self.norm1, lambda y: self.attn1(y, angle=angle)),
                            (self.norm2, lambda y: self.attn2(y, text)), (self.norm3, self.ff)):
            shift, scale, gate = norm(e, common)
            x = x + gate[:, :, None] * layer(modulate(x, shift, scale))
        return x


class Cosmos(Net):
    """text_proj: width to which text is mapped first (0: taken as it is); rank: of the modulations; stretch:
    of RoPE's wavelengths along (frame, row, column); video2world: has a channel for condition_mask; eps: of
    the norms of queries and keys, 1e-6 as NVIDIA's (diffusers' class has 1e-5); condition_t: see above;
    levels, unipc: the ends of the noise levels and the kind of teacher_sample."""
    schedule, pred, exact, takes = "rf", "flow", ("fps",), ("skip",)
    nvidia = (
        ("^transformer_blocks", "blocks"), (r"\.norm1\.linear_", ".adaln_modulation_self_attn."),
        (r"\.norm2\.linear_", ".adaln_modulation_cross_attn."), ("proj_out", "final_layer.linear"),
        (r"\.norm3\.linear_", ".adaln_modulation_mlp."), (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."), (r"\.to_([qkv])\.", r".\1_proj."), (r"\.to_out\.0", ".output_proj"),
        (r"\.norm_([qk])\.", r".\1_norm."), (r"\.ff\.net\.0\.proj", ".mlp.layer1"),
        (r"\.ff\.net\.2", ".mlp.layer2"), (r"time_embed\.t_embedder", "t_embedder.1"),
        (r"time_embed\.norm", "t_embedding_norm"), (r"patch_embed\.proj", "x_embedder.proj.1"),
        (r"norm_out\.linear_", "final_layer.adaln_modulation."))
    layouts = dict(public=(), fastgen=nvidia, nvidia=(*nvidia, ("^", "net.")))

    def __init__(self, x_shape, depth, dim, heads, text_dim, text_proj=0, rank=256, stretch=(1.0, 1.0, 1.0),
                 video2world=False, eps=1e-6, condition_t=0.0, levels=(0.002, 80.0), unipc=False,
                 r=False, logvar=False, dropout=0.0):
        super().__init__(x_shape, r, logvar)
        if dim % (2 * heads) or dim // heads < 12:
            raise BadInput(f"cosmos_predict2: dim {dim} must be a multiple of 2 x heads = {2 * heads}, and a "
                           "head have at least 12 channels")
        self.dim, self.heads, self.stretch = dim, heads, tuple(stretch)
        self.video2world, self.condition_t = video2world, condition_t
        self.text_dim, self.text_proj, self.levels, self.unipc = text_dim, text_proj, tuple(levels), unipc
        channels, frames, rows, columns = x_shape
        self.blocks = [f"transformer_blocks.{i}" for i in range(depth)]
        self.taps_at = [(dim, frames, rows // 2, columns // 2)] * depth

        inputs = channels + video2world + 1             # and a padding mask, which is 0
        self.patch_embed = nn.ModuleDict(dict(proj=Linear(4 * inputs, dim, bias=False)))
        t_embedder = nn.Sequential(OrderedDict(linear_1=Linear(dim, dim, bias=False), act=nn.SiLU(),
                                               linear_2=Linear(dim, 3 * dim, bias=False)))
        self.time_embed = nn.ModuleDict(dict(t_embedder=t_embedder, norm=nn.RMSNorm(dim, eps=1e-6)))
        if text_proj:
            self.crossattn_proj = nn.Sequential(Linear(text_dim, text_proj), nn.GELU())
        self.r_embedder = mlp2(dim, dim, Zero) if r else None
        self.logvar_linear = Zero(dim, 1) if logvar else None
        self.transformer_blocks = nn.ModuleList(
            Block(dim, heads, text_proj or text_dim, rank, eps, dropout) for _ in range(depth))
        self.norm_out, self.proj_out = Modulation(dim, rank, 2), Zero(dim, 4 * channels, bias=False)

    def adapt(self, key, tensor):
        """NVIDIA's files hold tables and counters besides the weights."""
        dropped = "pos_embedder." in key or "accum_" in key or key.endswith("_extra_state")
        return None if dropped else super().adapt(key, tensor)

    def angle(self, frames, rows, columns, cond, device):
        """RoPE angles (T x h x w, d / 2), or (B, 1, T x h x w, d / 2) where cond has frames per second: then
        a position in time counts 24ths of a second."""
        axes = thirds(self.dim // self.heads)
        places = grid(frames, rows, columns, device=device)
        time, *sides = (angles([p], [n], 1e4 * ratio ** (n / (n - 2)))
                        for p, n, ratio in zip(places, axes, self.stretch))
        if "fps" in cond:
            time = time * (24 / cond["fps"].double())[:, None, None, None]
        return torch.cat([time, *(a.expand(*time.shape[:-1], -1) for a in sides)], dim=-1)

    def mask_of(self, cond, x):
        """condition_mask as (B, 1, T, H, W); None where nothing is given."""
        if not self.video2world or "condition_mask" not in cond:
            return None
        mask, want = cond["condition_mask"], (len(x), 1, x.shape[2])
        if mask.shape[:3] != want or mask.ndim != 5:
            raise BadInput(f"Cosmos needs condition_mask (B, 1, T, H or 1, W or 1), here beginning with "
                           f"{want}; cond has {tuple(mask.shape)}")
        return mask.expand(-1, -1, -1, *x.shape[3:])

    def settle(self, out, x_t, t, cond, start):
        """Given frames come out as x0, exactly, whatever the weights' type."""
        if (mask := self.mask_of(cond, x_t)) is None:
            return out
        clean = self.need_frames(cond, "condition_frames", x_t.shape[1], 0, x_t)
        return mask * flow_to(clean, x_t, per_frame(t, x_t)) + (1 - mask) * out

    def run(self, x, times, cond, tap, skip):
        """cond: text (B, L, text_dim), seen whole with its padding; fps (B,) or none; for video2world
        condition_frames (B, C, T, H, W) and condition_mask (B, 1, T, H or 1, W or 1), or neither. Any T, even
        H, W."""
        (text,) = self.need(cond, text=self.text_dim)
        frames, rows, columns = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
        times = at = [per_frame(t, x) if t.ndim == 2 else t[:, None] for t in times]    # (B, F), F = 1 or T
        mask, zeros = self.mask_of(cond, x), torch.zeros_like(x[:, :1])
        if mask is not None:
            clean = self.need_frames(cond, "condition_frames", x.shape[1], 0, x)
            x = mask * clean + (1 - mask) * x
            whole = mask[:, 0].flatten(2).amin(2) > 0.5                                         # (B, T)
            at = [torch.where(whole, self.condition_t, t) for t in times]
        wave_t, wave, *wave_r = (sin_emb(v, self.dim, self.dtype) for v in (times[0], *at))
        e_t, e = map(self.time_embed["norm"], (wave_t, wave))                                   # (B, F, D)
        common = self.time_embed["t_embedder"](wave)              # to all modulations: (B, F, 3 D)
        e = e + self.r_embedder(*wave_r) if wave_r else e
        text = self.crossattn_proj(text) if self.text_proj else text
        angle = self.angle(frames, rows, columns, cond, x.device)

        parts = [x, zeros if mask is None else mask] if self.video2world else [x]
        h = self.patch_embed["proj"](pack(torch.cat([*parts, zeros], dim=1)))     # zeros: a padding mask
        h = rearrange(h, "b (f s) d -> b f s d", f=e.shape[1])
        for k, block in enumerate(self.transformer_blocks):
            if k not in skip:
                h = block(h, text, e, common, angle)
            if tap(k, rearrange(h.flatten(1, 2), "b (t h w) d -> b d t h w", t=frames, h=rows)):
                return None, e_t
        out = self.proj_out(modulate(h, *self.norm_out(e, common))).flatten(1, 2)
        out = rearrange(out, "b (t h w) (p q c) -> b c t (h p) (w q)", t=frames, h=rows, p=2, q=2)
        return out, e_t


make = maker(Cosmos, sizes)


def teacher_sample(net, noise, cond, steps, uncond=None, guidance=1.0):
    """As diffusers' pipelines, whose guidance_scale is ours - 1, at t = s / (s + 1) for Karras' levels s.
    2.5 by UniPC. Predict2 by Euler down to the lowest level, which stays in the result."""
    ts = [s / (s + 1) for s in karras(steps, *net.levels).tolist()]
    if net.unipc:
        return unipc(net, noise, cond, 1.0, steps, uncond, guidance, times=ts)
    if steps < 2:
        raise BadInput("--steps 1 leaves Cosmos-Predict2's sampler at the noise; it needs at least 2")
    return flow_euler(net, lambda k: ts[0] * noise(k), cond, ts, uncond, guidance) / (1 - ts[-1])
