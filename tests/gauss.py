"""Nets that are exact for Gaussian data N(mean, std^2) per element, and what fits such data."""
import torch

import common
from run import turn

class Gauss(torch.nn.Module):
    """The exact prediction, mean 0 where the label is -1; its features are its input. Without common.convert.
    Parameters are float64: 0-dim, they leave x its own dtype."""
    n_taps = 1
    def __init__(self, mean, std, schedule="edm", pred="x0", learn=False):
        super().__init__()
        self.mean, self.std = (torch.nn.Parameter(torch.as_tensor(v, dtype=torch.float64), learn)
                               for v in (mean, std))
        self.schedule, self.pred, self.sigma_data = schedule, pred, 0.5

    def given(self, x, cond):
        """The mean of each sample, shaped to multiply x."""
        return common.expand((self.mean * (cond.get("label", torch.tensor(-1)) >= 0)).expand(len(x)), x)

    def forward(self, x_t, t, cond={}, taps=(), stop=False, logvar=False):
        a, b, da, db = (common.expand(c, x_t) for c in common.curve(self.schedule, t))
        mean, var = self.given(x_t, cond), a ** 2 * self.std ** 2 + b ** 2
        x0, eps = mean + a * self.std ** 2 / var * (x_t - a * mean), b / var * (x_t - a * mean)
        out = dict(x0=x0, eps=eps, v=a * eps - b * x0, flow=da * x0 + db * eps)[self.pred]
        return dict(out=out, taps=[x_t], logvar=t.log()) if taps or logvar else out

class Affine(Gauss):
    """A one-step student: G(z) = std z + mean."""
    def forward(self, x_t, t, cond={}):
        return self.std * x_t / common.expand(common.alpha_sigma(self.schedule, t)[1], x_t) + self.mean

class Exact(Gauss):
    """Predicts the ODE's map to 0, or given r the mean velocity; wrong by `off`."""
    off = 0.0
    def forward(self, x_t, t, cond={}, r=None):
        at = lambda c: common.expand(c, x_t)
        mean, end = self.given(x_t, cond), torch.zeros_like(t) if r is None else r
        (alpha, sigma), (a, b) = (common.alpha_sigma(self.schedule, s) for s in (t, end))
        scale = ((a ** 2 * self.std ** 2 + b ** 2) / (alpha ** 2 * self.std ** 2 + sigma ** 2)).sqrt()
        x_r = at(a) * mean + at(scale) * (x_t - at(alpha) * mean)
        if r is None:
            return common.convert(self.schedule, x_t, x_r + self.off * at(t.sin()) * x_t, t, "x0", self.pred)
        u = (x_t - x_r) / at((t - r).clamp(min=1e-9))
        u = torch.where(at(t > r) > 0, u, super().forward(x_t, t, cond))
        return u + self.off * at(t * t * (1 + r)) * x_t

class Scale(torch.nn.Module):
    """flow = a(t, t - r) x, a of 2 layers of 64 units."""
    schedule, pred = "rf", "flow"
    def __init__(self):
        super().__init__()
        first, second, last = (torch.nn.Linear(*size) for size in ((2, 64), (64, 64), (64, 1)))
        self.a = torch.nn.Sequential(first, torch.nn.SiLU(), second, torch.nn.SiLU(), last)

    def forward(self, x_t, t, cond={}, r=None):
        a = self.a(torch.stack([t, t if r is None else t - r], dim=1).float())
        return common.expand(a[:, 0], x_t) * x_t

def labelled(x0):
    label = torch.zeros(len(x0), dtype=torch.int64)
    return dict(x0=x0, cond=dict(label=label), uncond=dict(label=label - 1))

def fit(method, cfg, nets, std, *shape):
    """max_iter iterations on new data N(0, std^2); -> the student's parameters, mean of the last fifth."""
    opts, path = method.optimizers(nets, cfg), []
    factor = lambda it: common.lr_factor(cfg["lr_schedule"], it, cfg["warmup"], cfg["max_iter"])
    rates = {phase: torch.optim.lr_scheduler.LambdaLR(opt, factor) for phase, opt in opts.items()}
    for it in range(cfg["max_iter"]):
        phase = method.phase(it, cfg)
        turn(nets, opts, phase)
        method.step(nets, labelled(std * torch.randn(shape)), it, cfg)[0].backward()
        opts[phase].step()
        rates[phase].step()
        if it >= 0.8 * cfg["max_iter"]:
            path.append(torch.nn.utils.parameters_to_vector(nets["student"].parameters()).detach())
    return torch.stack(path).mean(0).tolist()
