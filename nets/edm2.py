"""EDM2: the magnitude-preserving U-Net of Karras et al. 2024 (arXiv 2312.02696) with EDM preconditioning.

Keys are those of NVIDIA's public pickles (tools/convert_edm.py), whose gains without a dimension become (1,).
After each optimizer step `post_step` puts the rows of weights back to unit size. The second time r is mixed
in by a gain that starts at 0 (FastGen's embedder). Tap k: the last encoder block of level k.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from nets.edm import Preconditioned, Skeleton, attend
from nets.layers import maker

SILU = 0.596        # magnitude of silu(x) for a normal x
imagenet64 = dict(x_shape=(3, 64, 64), label_dim=1000, mult=(1, 2, 3, 4), blocks=3, attn=(16, 8))
sizes = {f"imagenet64_{k}": imagenet64 | dict(width=v) for k, v in dict(s=192, m=256, l=320, xl=384).items()}


def normalize(x, *dims):
    """x over its root mean square along dims (none: all but the first), taken in at least float32."""
    dims, wide = dims or tuple(range(1, x.ndim)), torch.promote_types(torch.float32, x.dtype)
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=wide)
    return x / (1e-4 + norm / math.sqrt(math.prod(x.shape[d] for d in dims))).to(x.dtype)


def mp_sum(a, b, t):
    """(1 - t) a + t b, scaled so that the magnitude stays."""
    return ((1 - t) * a + t * b) / ((1 - t) ** 2 + t ** 2) ** 0.5


class Fourier(nn.Module):
    """(B,) -> (B, n): sqrt(2) cos(f x + phase), both random and kept in checkpoints, f of this bandwidth."""
    def __init__(self, n, bandwidth):
        super().__init__()
        self.bandwidth = bandwidth
        for name in ("freqs", "phases"):
            self.register_buffer(name, torch.empty(n))
        self.reset_parameters()

    def reset_parameters(self):
        self.freqs.normal_(0, 2 * math.pi * self.bandwidth)
        self.phases.uniform_(0, 2 * math.pi)

    def forward(self, x):
        return (x[:, None] * self.freqs.to(x.dtype) + self.phases.to(x.dtype)).cos() * math.sqrt(2)


class MPConv(nn.Module):
    """k x k convolution, k = 0: linear layer. Of a weight's row only the direction counts."""
    def __init__(self, cin, cout, k=0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty((cout, cin, k, k) if k else (cout, cin)))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight)

    def forward(self, x, gain=1.0):
        w = self.weight.to(torch.promote_types(torch.float32, self.weight.dtype))
        w = (normalize(w) * (gain / math.sqrt(w[0].numel()))).to(x.dtype)
        return F.conv2d(x, w, padding=w.shape[-1] // 2) if w.ndim == 4 else F.linear(x, w)


class Block(nn.Module):
    """Residual block (B, cin, H, W), embedding (B, emb) -> (B, cout, H', W'), with optional attention.
    up, down: sampling by 2 comes first; encoder: the channels of a pixel are normalized; heads: 0 = none."""
    def __init__(self, cin, cout, emb, encoder, dropout, heads=0, up=False, down=False):
        super().__init__()
        self.dropout, self.encoder, self.heads, self.up, self.down = dropout, encoder, heads, up, down
        self.emb_gain, self.emb_linear = nn.Parameter(torch.empty(1)), MPConv(emb, cout)
        self.conv_res0, self.conv_res1 = MPConv(cout if encoder else cin, cout, 3), MPConv(cout, cout, 3)
        self.conv_skip = MPConv(cin, cout, 1) if cin != cout else nn.Identity()
        if heads:
            self.attn_qkv, self.attn_proj = MPConv(cout, 3 * cout, 1), MPConv(cout, cout, 1)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.emb_gain)

    def forward(self, x, e):
        x = F.avg_pool2d(x, 2) if self.down else F.interpolate(x, scale_factor=2) if self.up else x
        x = normalize(self.conv_skip(x), 1) if self.encoder else x
        y = self.conv_res0(F.silu(x) / SILU)
        y = F.silu(y * (self.emb_linear(e, self.emb_gain) + 1)[:, :, None, None].to(y.dtype)) / SILU
        y = self.conv_res1(F.dropout(y, self.dropout, self.training))
        x = mp_sum(x if self.encoder else self.conv_skip(x), y, 0.3)
        if self.heads:
            y = attend(self.attn_qkv(x), self.heads, lambda qkv: normalize(qkv, -2))
            x = mp_sum(x, self.attn_proj(y), 0.3)
        return x.clip(-256, 256)


class UNet(Skeleton):
    """F of the preconditioning. width: channels at mult 1; mult: one per level; blocks: per level of the
    encoder, one more in the decoder; attn: resolutions with attention, head_dim channels a head; dropout_res:
    the highest resolution with dropout, 0 = all; bandwidth: of the time embedding where it is drawn."""
    def __init__(self, x_shape, label_dim, r, width, mult, blocks, attn, head_dim=64, dropout=0.0,
                 dropout_res=0, bandwidth=1.0):
        super().__init__()
        self.label_dim, c, emb = label_dim, width * mult[0], width * max(mult)
        self.emb_fourier, self.emb_noise = Fourier(c, bandwidth), MPConv(c, emb)
        if r:
            self.emb_fourier_r, self.emb_noise_r = Fourier(c, bandwidth), MPConv(c, emb)
            self.emb_gain_r = nn.Parameter(torch.empty(1))
        if label_dim:
            self.emb_label = MPConv(label_dim, emb)

        def block(encoder, cin, cout, res, attn=False, **way):
            drop = dropout if res <= (dropout_res or res) else 0.0
            return Block(cin, cout, emb, encoder, drop, cout // head_dim if attn else 0, **way)

        c = self.build(x_shape, MPConv(x_shape[0] + 1, c, 3), width, mult, blocks, attn, block, c)
        self.out_conv, self.out_gain = MPConv(c, x_shape[0], 3), nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self):
        for gain in self.parameters(recurse=False):
            nn.init.zeros_(gain)

    def join(self, x, skip):
        """Their channels, scaled so that both contribute the same."""
        scale = [math.sqrt((x.shape[1] + skip.shape[1]) / 2 / part.shape[1]) for part in (x, skip)]
        return torch.cat([x * scale[0], skip * scale[1]], dim=1)

    def forward(self, x, c_noise, label, tap):
        """x in the weights' type, c_noise (B,) of each time, one-hot label -> F, or None if stopped."""
        e = self.emb_noise(self.emb_fourier(c_noise[0]))                            # (B, emb), as c_noise
        if len(c_noise) > 1:
            e = mp_sum(e, self.emb_noise_r(self.emb_fourier_r(c_noise[1])), self.emb_gain_r)
        if self.label_dim:
            e = mp_sum(e, self.emb_label(label.to(e.dtype) * math.sqrt(self.label_dim)), 0.5)
        x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)                        # in place of biases
        x = self.walk(x, F.silu(e) / SILU, tap)
        return x if x is None else self.out_conv(x, self.out_gain)


class EDM2(Preconditioned):
    """r: takes a second time; logvar: has the log-variance head, which NVIDIA's files hold."""
    optional = "logvar_", "unet.emb_fourier_r.", "unet.emb_noise_r.", "unet.emb_gain_r"

    def __init__(self, x_shape, label_dim=0, sigma_data=0.5, r=False, logvar=False, logvar_dim=128, **unet):
        super().__init__(x_shape, label_dim, sigma_data, r, logvar)
        self.unet = UNet(x_shape, label_dim, r, **unet)
        self.taps_at = self.unet.taps_at
        self.blocks = [name for name, m in self.named_modules() if isinstance(m, Block)]
        if logvar:
            self.logvar_fourier, self.logvar_linear = Fourier(logvar_dim, 1.0), MPConv(logvar_dim, 1)

    def adapt(self, key, tensor):
        """A source's tensor in this net's shape; None for a part built off here."""
        tensor = super().adapt(key, tensor)
        return tensor if tensor is None or tensor.ndim else tensor.reshape(1)

    def run(self, x, times, cond, tap):
        c_noise, label = self.embeddable(times, cond)
        wave = self.logvar_fourier(c_noise[0]) if self.built["logvar"] else None
        return self.unet(x, c_noise, label, tap), wave

    @torch.no_grad()
    def post_step(self):
        """Forced weight normalization: unit RMS in each row of every weight, in place. A shard holds rows."""
        for weight in (m.weight for m in self.modules() if isinstance(m, MPConv)):
            w = weight.to_local() if hasattr(weight, "to_local") else weight
            w.copy_(normalize(w))


make = maker(EDM2, sizes)
