"""Nets that are exact for Gaussian data N(mean, std^2) per element, and what fits such data."""
import torch

import common
from run import turn

class Gauss(torch.nn.Module):
    """The exact prediction; mean 0 for the condition -1."""
    def __init__(self, mean, std, schedule="edm", pred="x0", learn=False):
        super().__init__()
        self.mean, self.std = (torch.nn.Parameter(torch.tensor(v), requires_grad=learn) for v in (mean, std))
        self.schedule, self.pred, self.sigma_data = schedule, pred, 0.5

    def forward(self, x_t, t, cond={}):
        alpha, sigma = (common.expand(c, x_t) for c in common.alpha_sigma(self.schedule, t))
        mean = self.mean * common.expand((cond["label"] >= 0).float(), x_t)
        x0 = mean + alpha * self.std ** 2 / (alpha ** 2 * self.std ** 2 + sigma ** 2) * (x_t - alpha * mean)
        return common.convert(self.schedule, x_t, x0, t, "x0", self.pred)

class Affine(Gauss):
    """A one-step student: G(z) = std z + mean."""
    def forward(self, x_t, t, cond={}):
        return self.std * x_t / common.expand(common.alpha_sigma(self.schedule, t)[1], x_t) + self.mean

class Exact(Gauss):
    """Predicts the ODE's map to 0, or given r the mean velocity; wrong by `off`."""
    off = 0.0
    def forward(self, x_t, t, cond={}, r=None):
        at = lambda c: common.expand(c, x_t)
        mean = self.mean * at((cond["label"] >= 0).float())
        (alpha, sigma), end = common.alpha_sigma(self.schedule, t), torch.zeros_like(t) if r is None else r
        a, b = common.alpha_sigma(self.schedule, end)
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

def optimum(loss, parameter):
    """Where loss(), a quadratic function of the parameter, is least; the parameter is left there."""
    grads = []
    for value in (0.0, 1.0):
        parameter.data.fill_(value)
        grads.append(torch.autograd.grad(loss(), parameter)[0])
    parameter.data.copy_(grads[0] / (grads[0] - grads[1]))
    return parameter.item()

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
