"""Discriminator heads on a teacher's features. Layout and keys follow FastGen's discriminators."""
import torch
from torch import nn

from common import BadInput, all_mean


def group_norm(channels):
    """GroupNorm with the largest divisor of channels up to min(32, channels / 4) as group count. Between 32
    and 128 FastGen may put 2 in a group, which on a 1x1 map leaves only the sign of their difference."""
    most = min(32, max(1, channels // 4))
    return nn.GroupNorm(max(g for g in range(1, most + 1) if channels % g == 0), channels)


class UNetHead(nn.Module):
    """One convolutional head per feature map (C, H, W) of a U-Net, of any C and size: it halves the map down
    to 4x4, takes what is left to 1x1 in one convolution, and ends in one logit."""
    optional = ()

    def __init__(self, tap_shapes):
        super().__init__()
        self.shapes = [tuple(shape) for shape in tap_shapes]
        self.discriminator_heads = nn.ModuleList(self.head(*shape) for shape in self.shapes)

    @staticmethod
    def head(c, h, w):
        layers = []
        while max(h, w) > 4:
            layers += [nn.Conv2d(c, c, 4, stride=2, padding=1), group_norm(c), nn.SiLU()]
            h, w = h // 2, w // 2
        return nn.Sequential(*layers, nn.Conv2d(c, c, (h, w)), group_norm(c), nn.SiLU(), nn.Conv2d(c, 1, 1))

    def forward(self, features):
        """features: list of (B, C, H, W) in the order of tap_shapes -> logits (B, heads)."""
        if [tuple(x.shape[1:]) for x in features] != self.shapes:
            raise BadInput(f"features {[tuple(x.shape) for x in features]} for a discriminator built for "
                           f"{self.shapes}; build it with the net's tap_shapes(taps)")
        dtype = self.discriminator_heads[0][-1].weight.dtype
        logits = [head(x.to(dtype)).flatten(1) for head, x in zip(self.discriminator_heads, features)]
        return torch.cat(logits, dim=1)


class DensityRatio(nn.Module):
    """Ratios r (B,) over their running mean in the bin that each belongs to, as E[p/q] over q is 1. The means
    are those of all ranks and move, by 1 - decay, only where gradients are on."""

    def __init__(self, bins, decay):
        super().__init__()
        if bins < 1 or not 0 <= decay < 1:
            raise BadInput(f"{bins} bins of a ratio must be at least 1, the decay {decay} from 0 to below 1")
        self.decay = decay
        self.register_buffer("means", torch.empty(bins))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.means)

    def forward(self, r, bins):
        member = nn.functional.one_hot(bins, len(self.means)).to(r.dtype)                   # (B, bins)
        total, count = all_mean(torch.stack([(r[:, None] * member).sum(0), member.sum(0)]))
        means = torch.lerp(total / count, self.means, self.decay)
        means = torch.where(means.isfinite(), means, self.means)                            # none in a bin
        if torch.is_grad_enabled():
            self.means.copy_(means)
        return r / means[bins]
