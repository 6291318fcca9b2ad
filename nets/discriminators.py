"""Discriminator heads on a net's features. Layout and keys follow FastGen's discriminators."""
import torch
from torch import nn

from common import BadInput, all_mean
from nets.layers import Zero, label_rows, mean_token


def group_norm(channels):
    """GroupNorm with the largest divisor of channels up to min(32, channels / 4) as group count. As FastGen's
    for up to 32 and from 128 channels; between, FastGen may put 2 channels in a group, which on a 1x1 map
    leaves only the sign of their difference."""
    most = min(32, max(1, channels // 4))
    return nn.GroupNorm(max(g for g in range(1, most + 1) if channels % g == 0), channels)


class Head(nn.Sequential):
    """Layers that end in one logit per place; -> their mean (B, 1), plus what they show along e (B, C)."""
    def forward(self, x, e=None):
        *layers, last = self
        for layer in layers:
            x = layer(x)
        logit = last(x).flatten(2).mean(2)
        return logit if e is None else logit + (x.flatten(2).mean(2) * e).sum(1, keepdim=True)


class ZeroEmbedding(nn.Embedding):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class Heads(nn.Module):
    """One head per feature map (C, [T,] H, W), made by a family's `head(C, [T,] H, W)` and kept in `name`.
    With label_dim or text_dim a head is conditioned by projection (Miyato 2018, arXiv 1802.05637) on the
    label, the mean of the text, or both; that part starts at 0."""
    optional = ()

    def __init__(self, tap_shapes, label_dim=0, text_dim=0):
        super().__init__()
        self.shapes = [tuple(shape) for shape in tap_shapes]
        heads = nn.ModuleList(self.head(*shape) for shape in self.shapes)
        setattr(self, self.name, heads)
        widths = [head[-1].in_channels for head in heads]
        self.labels = nn.ModuleList(ZeroEmbedding(label_dim, n) for n in widths) if label_dim else None
        self.texts = nn.ModuleList(Zero(text_dim, n, bias=False) for n in widths) if text_dim else None
        # wrap units for sharding; a small discriminator has none and is replicated
        big = sum(p.numel() for p in self.parameters()) >= 1e6
        self.blocks = [f"{self.name}.{i}" for i in range(len(self.shapes))] if big else []

    def forward(self, features, cond={}):
        """features: list of (B, C, [T,] H, W) in the order of tap_shapes -> logits (B, heads). Of cond:
        label, text, text_mask."""
        if [tuple(x.shape[1:]) for x in features] != self.shapes:
            raise BadInput(f"features {[tuple(x.shape) for x in features]} do not fit a discriminator built "
                           f"for {self.shapes}; build it with the net's tap_shapes(taps)")
        logits = []
        for i, (head, x) in enumerate(zip(getattr(self, self.name), features)):
            x = x.to(head[0].weight.dtype)
            logits.append(head(x, self.condition(cond, i, x.dtype)))
        return torch.cat(logits, dim=1)

    def condition(self, cond, i, dtype):
        """The direction (B, C) that head i adds for cond, or None."""
        parts = []
        if self.labels is not None and "label" in cond:
            parts.append(label_rows(self.labels[i], cond["label"]))
        if self.texts is not None and "text" in cond:
            parts.append(self.texts[i](mean_token(cond["text"].to(dtype), cond)))
        return sum(parts) if parts else None


class UNetHead(Heads):
    """For features of a U-Net; C and size may differ from map to map. A head halves the map down to 4x4,
    takes what is left to 1x1 in one convolution, and ends in one logit."""
    name = "discriminator_heads"

    @staticmethod
    def head(c, h, w):
        layers = []
        while max(h, w) > 4:
            layers += [nn.Conv2d(c, c, 4, stride=2, padding=1), group_norm(c), nn.SiLU()]
            h, w = h // 2, w // 2
        return Head(*layers, nn.Conv2d(c, c, (h, w)), group_norm(c), nn.SiLU(), nn.Conv2d(c, 1, 1))


class ImageDiTHead(Heads):
    """For features of an image transformer: a head halves the map once; its logit is a mean over places."""
    name = "cls_pred_heads"

    @staticmethod
    def head(c, h, w):
        half = nn.Conv2d(c, c // 2, 4, stride=2, padding=1), group_norm(c // 2), nn.LeakyReLU(0.2)
        return Head(*half, nn.Conv2d(c // 2, 1, 1))


class VideoDiTHead(Heads):
    """For features of a video transformer: a head halves all axes once; its logit is a mean over places."""
    name = "cls_pred_heads"

    @staticmethod
    def head(c, t, h, w):
        half = nn.Conv3d(c, c // 2, (min(2, t), 4, 4), stride=2, padding=(0, 1, 1))
        return Head(half, group_norm(c // 2), nn.LeakyReLU(0.2), nn.Conv3d(c // 2, 1, 1))


def make_head(net, taps, cond=False):
    """The discriminator for features of `net` at these taps, of the kind that suits the net; with cond it
    sees the net's conditions."""
    kind = ImageDiTHead if getattr(net, "transformer", False) else UNetHead
    kind = VideoDiTHead if len(net.x_shape) == 4 else kind
    sees = dict(label_dim=getattr(net, "label_dim", 0), text_dim=getattr(net, "text_dim", 0)) if cond else {}
    return kind(net.tap_shapes(taps), **sees)


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
