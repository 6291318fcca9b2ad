"""Cosmos-Predict2 and 2.5, 2B and 14B (NVIDIA 2025, arXiv 2511.00062): text to image, text or video to video,
on 16-channel latents.

State-dict keys are those of the diffusers folders (CosmosTransformer3DModel); NVIDIA's own files load too.
The net predicts the flow eps - x0 at t in [0, 1], embedded as it is, one t for the clip or one per frame.
Predict2 was trained as EDM's denoiser of x0 + s eps; at t = s / (s + 1) that is the same flow. video2world:
where condition_mask is 1 the net sees condition_frames in x's place, at time `condition_t`, and its flow is
the one that leads to them. Additions: a second time r, a log-variance head on the embedding of t, taps: the
tokens after each block.
"""
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from common import BadInput, expand, karras, prediction, wide
from nets.layers import (FeedForward, Linear, MLP2, Net, Zero, angles, attention, flow_euler, grid, modulate,
                         pack, per_frame, rope, sin_emb, unipc)

small, large = dict(depth=28, dim=2048, heads=16), dict(depth=36, dim=5120, heads=40)
image = dict(x_shape=(16, 1, 96, 170), text_dim=1024, stretch=(1.0, 4.0, 4.0), levels=(0.002, 80.0))
world = image | dict(x_shape=(16, 24, 88, 160), stretch=(1.0, 3.0, 3.0), video2world=True, condition_t=1e-4)
later = world | dict(x_shape=(16, 24, 60, 104), text_dim=100352, text_proj=1024, unipc=True,
                     levels=(0.01, 200.0))
sizes = {"t2i_2b": image | small, "t2i_14b": image | large, "v2w_2b": world | small,
         "v2w_14b": world | large | dict(stretch=(20 / 24, 2.0, 2.0)), "2.5_2b": later | small,
         "2.5_14b": later | large}


def make(size, /, label_dim=0, **options):
    """Net of a named size; options (those of `Cosmos`) override its entry. It has no class labels."""
    return Cosmos(**sizes[size] | {k: v for k, v in options.items() if v is not None})


class TimeEmbed(nn.Module):
    """Of waves s (B, F, D): their RMS norm, and what all modulations have in common (B, F, 3 D)."""
    def __init__(self, dim):
        super().__init__()
        self.t_embedder = nn.ModuleDict(dict(linear_1=Linear(dim, dim, bias=False),
                                             linear_2=Linear(dim, 3 * dim, bias=False)))
        self.norm = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, s):
        return self.norm(s), self.t_embedder["linear_2"](F.silu(self.t_embedder["linear_1"](s)))


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
        q, k, v = (rearrange(y, "b s (n d) -> b n s d", n=self.heads)
                   for y in (self.to_q(flat), self.to_k(source), self.to_v(source)))
        q, k = self.norm_q(q), self.norm_k(k)
        if angle is not None:                           # the reference turns pairs (j, j + d / 2)
            q, k = (rope(rearrange(y, "b n s (two d) -> b n s (d two)", two=2), angle) for y in (q, k))
        return self.to_out[0](rearrange(attention(q, k, v), "b n (f s) d -> b f s (n d)", f=x.shape[1]))


class Block(nn.Module):
    """Tokens x (B, F, N, D), F = 1 or one per frame, text (B, L, width), e (B, F, D), common (B, F, 3 D)."""
    def __init__(self, dim, heads, width, rank, eps, dropout):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (Modulation(dim, rank, 3) for _ in range(3))
        self.attn1, self.attn2 = Attention(dim, heads, dim, eps), Attention(dim, heads, width, eps)
        self.ff = FeedForward(dim, dropout, bias=False, act=F.gelu)

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
        (r"\.norm2\.linear_", ".adaln_modulation_cross_attn."), (r"\.norm3\.linear_",
         ".adaln_modulation_mlp."), (r"\.attn1\.", ".self_attn."), (r"\.attn2\.", ".cross_attn."),
        (r"\.to_([qkv])\.", r".\1_proj."), (r"\.norm_([qk])\.", r".\1_norm."), (r"\.to_out\.0",
         ".output_proj"), (r"\.ff\.net\.0\.proj", ".mlp.layer1"), (r"\.ff\.net\.2", ".mlp.layer2"),
        (r"time_embed\.t_embedder", "t_embedder.1"), (r"time_embed\.norm", "t_embedding_norm"),
        (r"patch_embed\.proj", "x_embedder.proj.1"), (r"norm_out\.linear_",
         "final_layer.adaln_modulation."), ("proj_out", "final_layer.linear"))
    layouts = dict(public=(), fastgen=nvidia, nvidia=(*nvidia, ("^", "net.")))

    def __init__(self, x_shape, depth, dim, heads, text_dim, text_proj=0, rank=256, stretch=(1.0, 1.0, 1.0),
                 video2world=False, eps=1e-6, condition_t=0.0, levels=(0.002, 80.0), unipc=False,
                 r=False, logvar=False, dropout=0.0):
        super().__init__(x_shape, r, logvar)
        if dim % (2 * heads) or dim // heads < 12:
            raise BadInput(f"cosmos_predict2: dim {dim} must be a multiple of 2 x heads = {2 * heads}, and a "
                           "head have at least 12 channels")
        self.stretch = tuple(stretch)
        self.dim, self.heads, self.video2world, self.condition_t = dim, heads, video2world, condition_t
        self.text_dim, self.text_proj = text_dim, text_proj
        self.levels, self.unipc = tuple(levels), unipc
        channels, frames, rows, columns = x_shape
        self.blocks = [f"transformer_blocks.{i}" for i in range(depth)]
        self.taps_at = [(dim, frames, rows // 2, columns // 2)] * depth

        inputs = channels + video2world + 1             # and a padding mask, which is 0
        self.patch_embed = nn.ModuleDict(dict(proj=Linear(4 * inputs, dim, bias=False)))
        self.time_embed = TimeEmbed(dim)
        if text_proj:
            self.crossattn_proj = nn.Sequential(Linear(text_dim, text_proj), nn.GELU())
        self.r_embedder = MLP2(dim, dim, Zero) if r else None
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
        d = self.dim // self.heads
        axes = d - 4 * (d // 6), 2 * (d // 6), 2 * (d // 6)
        places = grid(*(torch.arange(n, device=device) for n in (frames, rows, columns)))
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

    def forward(self, x_t, t, cond={}, r=None, **kw):
        """As Net's; given frames come out as x0, exactly, whatever the weights' type."""
        result, mask = super().forward(x_t, t, cond, r, **kw), self.mask_of(cond, x_t)
        if mask is None or isinstance(result, dict) and "out" not in result:
            return result
        clean, t = self.need_frames(cond, "condition_frames", x_t.shape[1], 0, x_t), per_frame(t, x_t)
        # x_t - t flow = clean; at t = 0 any flow gives x_t
        flow = (wide(x_t) - clean) * expand((t > 0) / t.clamp(min=1e-6), x_t)
        out = mask * flow + (1 - mask) * prediction(result)
        return dict(result, out=out) if isinstance(result, dict) else out

    def run(self, x, times, cond, tap, skip):
        """cond: text (B, L, text_dim), seen whole with its padding; fps (B,) or none; for video2world
        condition_frames (B, C, T, H, W) and condition_mask (B, 1, T, H or 1, W or 1), or neither. Any T, even
        H, W."""
        (text,) = self.need(cond, text=self.text_dim)
        frames, rows, columns = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
        wave = lambda v: sin_emb(v.flatten(), self.dim, self.dtype).unflatten(0, v.shape)       # noqa: E731
        times = at = [per_frame(t, x) if t.ndim == 2 else t[:, None] for t in times]    # (B, F), F = 1 or T
        mask, seen, zeros = self.mask_of(cond, x), x, torch.zeros_like(x[:, :1])
        if mask is not None:
            clean = self.need_frames(cond, "condition_frames", x.shape[1], 0, x)
            seen = mask * clean + (1 - mask) * x
            whole = mask[:, 0].flatten(2).amin(2) > 0.5                                         # (B, T)
            at = [torch.where(whole, self.condition_t, t) for t in times]
        e_t = self.time_embed.norm(wave(times[0]))                                              # (B, F, D)
        e, common = self.time_embed(wave(at[0]))
        if len(at) > 1:
            e = e + self.r_embedder(wave(at[1]))
        text = self.crossattn_proj(text) if self.text_proj else text
        angle = self.angle(frames, rows, columns, cond, x.device)

        parts = [seen, zeros if mask is None else mask] if self.video2world else [seen]
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


def teacher_sample(net, noise, cond, steps, uncond=None, guidance=1.0):
    """As diffusers' pipelines, whose guidance_scale is ours - 1, at t = s / (s + 1) for Karras' levels s.
    2.5 by UniPC. Predict2 by Euler down to the lowest level, which stays in the result."""
    ts = [s / (s + 1) for s in karras(steps, *net.levels).tolist()]
    if net.unipc:
        return unipc(net, noise, cond, 1.0, steps, uncond, guidance, times=ts)
    if steps < 2:
        raise BadInput("--steps 1 leaves Cosmos-Predict2's sampler at the noise; it needs at least 2")
    return flow_euler(net, lambda k: ts[0] * noise(k), cond, ts, uncond, guidance) / (1 - ts[-1])
