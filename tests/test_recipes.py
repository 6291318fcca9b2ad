"""Every preset: nets at full size, a step of each phase with tiny ones. `-s` prints parameters, CPU times."""
import importlib
import time

import pytest
import torch

import augment
import common
import run
import startup
import train

# by family, then size: options that make it tiny but keep its levels and taps
TINY = dict(
    edm=dict(x_shape=(3, 8, 8), width=64, blocks=1, attn=(4,)),
    edm2=dict(x_shape=(3, 8, 8), width=16, blocks=1, attn=(4,), head_dim=8),
    dit=dict(x_shape=(4, 8, 8), dim=32, depth=2, heads=4),
    sd=dict(x_shape=(4, 8, 8), width=16, layers=1, groups=4, text_dim=12),
    flux=dict(x_shape=(16, 8, 8), dim=32, heads=2, axes=(4, 6, 6), text_dim=12, pooled_dim=5),
    qwen_image=dict(x_shape=(16, 8, 8), dim=32, heads=2, axes=(4, 6, 6), text_dim=12),
    wan=dict(x_shape=(16, 6, 8, 8), depth=2, dim=24, heads=2, hidden=32, text_dim=12),
    sd15=dict(heads=(2, 2, 4, 4)), sdxl=dict(heads=(2, 2, 4), depths=(0, 1, 2), pooled_dim=6, id_dim=4))
OWN = [(name, preset) for name in run.METHODS for preset in getattr(run.load(name), "presets", {})]

def random_batch(net, cfg, n=4):
    """What encode gives: labels, text, augmentation and a teacher's states, as net and config have them."""
    draw = lambda *shape: torch.randn(n, *shape)
    def cond(label):
        sizes = dict(text=(5, getattr(net, "text_dim", 0)), pooled=(getattr(net, "pooled_dim", 0),),
                     augment=(augment.dim(cfg),))
        return {k: draw(*size) for k, size in sizes.items() if size[-1]} | dict(label=label)
    none, path_t = torch.full((n,), -1), torch.tensor(cfg.get("t_list", ()), dtype=torch.float64)
    return dict(x0=draw(*net.x_shape), cond=cond(torch.arange(n) if cfg["classes"] else none),
                uncond=cond(none), path=draw(len(path_t), *net.x_shape), path_t=path_t)

@pytest.mark.parametrize("name, preset", [*OWN, *train.recipes.presets])
def test_a_preset_builds_at_full_size_and_takes_a_step_of_each_phase(name, preset, monkeypatch):
    assert [*OWN, *train.recipes.presets].count((name, preset)) == 1    # none hides another
    cfg = train.resolve(method := run.load(name), ["--preset", preset])[0]
    startup.check(cfg, 8, train.trainer.defaults)
    head, *options = cfg["net"].split(",", 1)
    family, size = head.split(":")
    sizes = importlib.import_module(f"nets.{family}").sizes
    cfg["classes"] = cfg["classes"] and sizes[size].get("label_dim", 0)     # -1 = those of the data
    start = time.process_time()
    with torch.device("meta"):
        nets = method.build(cfg)
    seconds = time.process_time() - start
    count = {n: sum(p.numel() for p in net.parameters()) / 1e6 for n, net in nets.items()}
    assert count["student"] > 0.1 and seconds < 2 and {*method.init(cfg)} <= {*nets}
    for each in sizes:                  # a teacher may be of another size
        monkeypatch.setitem(sizes, each, sizes[each] | TINY[family] | TINY.get(each, {}))
    cfg["net"] = ",".join([head, *(o for o in options if "x_shape" not in o)])
    common.seed_default(0)
    nets = method.build(cfg)
    for p in (p for net in nets.values() for p in net.parameters()):    # none that starts at 0 hides another
        p.data.add_(0.05 * torch.randn_like(p))
    batch, owned, ms = random_batch(nets["student"], cfg), run.owned(method, nets, cfg), {}
    for phase, it in run.phases(method, cfg).items():
        run.turn(nets, method.optimizers(nets, cfg), phase)
        start = time.process_time()
        loss, logs = method.step(nets, batch, it, cfg)
        loss.backward()
        ms[phase] = 1000 * (time.process_time() - start)
        assert all(torch.as_tensor(v).isfinite() for v in (loss, *logs.values()))
        grads = run.gradients(nets)     # Qwen-Image's last block makes text that nothing reads
        assert {*grads} <= owned[phase] and all(g.isfinite().all() for g in grads.values())
        moved = {k.split(".")[0] for k, g in grads.items() if g.any()}
        assert moved == {k.split(".")[0] for k in owned[phase]}
    print(f"\n{name:9} {preset:19} {count['student']:7.1f} of {sum(count.values()):7.1f} M, {seconds:4.2f} s",
          *(f"{phase} {t:.0f} ms" for phase, t in ms.items()), sep="  ", end="")
