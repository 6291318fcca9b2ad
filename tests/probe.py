"""A method for tests: what sharding has to stand. Several forward passes and one backward, taps of a frozen
net with gradients through it, a JVP, alternating phases, a replicated head in a group with a sharded net."""
import torch

import common
import shard

config = dict(net="toy:tiny", batch_size=12, lr=1e-3, update_ratio=1, optimizer="adamw", teacher="",
              bare=False)

class Head(torch.nn.Module):
    optional = ()
    def __init__(self, channels):
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, 1, 1)
        self.register_buffer("scale", torch.empty(1), persistent=False)
        self.reset_parameters()
    def reset_parameters(self):
        torch.nn.init.constant_(self.scale, 0.5)
    def forward(self, features):
        logits = [self.conv(f.to(self.conv.weight.dtype)).mean((1, 2, 3)) for f in features]
        return self.scale * torch.stack(logits, dim=1)

def build(cfg):
    student, fake, teacher = (common.make_net(cfg["net"], label_dim=cfg["classes"]) for _ in range(3))
    teacher.eval().requires_grad_(False)
    nets = dict(student=student, fake=fake, teacher=teacher, head=Head(student.dim))
    if cfg["bare"]:                                     # no named units: by size, with a small idea of big
        shard.LEAST = 2000
        for net in student, fake, teacher:
            net.blocks = []
    return nets

def init(cfg):
    return dict(teacher=cfg["teacher"], fake="teacher", student="fake") if cfg["teacher"] else {}

def optimizers(nets, cfg):
    fake = [*nets["head"].parameters(), *nets["fake"].parameters()]
    return {phase: common.optimizer(params, cfg["optimizer"], cfg["lr"])
            for phase, params in dict(student=nets["student"].parameters(), fake=fake).items()}

def phase(it, cfg):
    return "student" if it % (cfg["update_ratio"] + 1) == cfg["update_ratio"] else "fake"

def step(nets, batch, it, cfg):
    student, fake, teacher, head = (nets[n] for n in ("student", "fake", "teacher", "head"))
    x0, cond = batch["x0"], batch["cond"]
    t, eps = common.sample_t(len(x0), "lognormal", "edm", x0.device), torch.randn_like(x0)
    x_t = common.add_noise("edm", x0, eps, t)
    if phase(it, cfg) == "student":
        with torch.no_grad():
            tangents = eps, torch.ones_like(t)
            out, tangent = torch.func.jvp(lambda x, s: student(x, s, cond), (x_t, t), tangents)
        x = torch.func.jvp(lambda x, s: student(x, s, cond), (x_t, t), tangents)[0]      # and with a graph
        again = student(common.add_noise("edm", x, eps, t / 2), t / 2, cond)
        features = fake(again, t, cond, taps=(0, 1), stop=True)["taps"]
        fit = (x - out - 0.1 * tangent / (1 + tangent.abs())).square().mean()
        loss = fit + (again - teacher(x_t, t, cond)).square().mean() + 0.1 * head(features).square().mean()
        return loss, dict(fit=fit)
    with torch.no_grad():
        x = student(x_t, t, cond)
    out = fake(common.add_noise("edm", x, eps, t), t, cond, taps=(1,))
    dsm = (out["out"] - x).square().mean() + (fake(x_t, t, cond) - x0).square().mean()
    return dsm + (head(out["taps"] * 2) - 1).square().mean(), dict(dsm=dsm)

def sample(net, noise, batch, cfg, steps):
    z = noise(0)
    return net(z, common.t_like(1.0, z), batch["cond"])
