"""Every preset: nets at full size, a step of each phase with tiny ones; tools/presets.py lists them."""
import importlib
import time
from unittest import mock

import pytest
import torch

import common
import memory
import run
from run import refused
from tools import presets

# by family, then size: options that make it tiny but keep its levels and taps
TINY = dict(
    edm=dict(x_shape=(3, 8, 8), width=64, blocks=1, attn=(4,)),
    edm2=dict(x_shape=(3, 8, 8), width=16, blocks=1, attn=(4,), head_dim=8),
    dit=dict(x_shape=(4, 8, 8), dim=32, depth=2, heads=4),
    sd=dict(x_shape=(4, 8, 8), width=16, layers=1, groups=4, text_dim=12),
    flux=dict(x_shape=(16, 8, 8), dim=32, heads=2, axes=(4, 6, 6), text_dim=12, pooled_dim=5),
    qwen_image=dict(x_shape=(16, 8, 8), dim=32, heads=2, axes=(4, 6, 6), text_dim=12),
    wan=dict(x_shape=(16, 6, 4, 4), dim=24, heads=2, hidden=32, text_dim=12), i2v_14b=dict(image_dim=10),
    cogvideox=dict(x_shape=(16, 2, 4, 4), dim=32, heads=2, time_dim=16, text_dim=12),
    cosmos_predict2=dict(x_shape=(16, 2, 4, 4), dim=32, heads=2, rank=8, text_dim=12, text_proj=8),
    sd15=dict(heads=(2, 2, 4, 4)), sdxl=dict(heads=(2, 2, 4), depths=(0, 1, 2), pooled_dim=6, id_dim=4))
ALL = presets.names()

def shrunk(method, cfg, n=4):
    """(config, nets, a batch of n as encode gives it) of a preset whose net is made tiny."""
    head, *options = cfg["net"].split(",", 1)
    family, size = head.split(":")
    sizes = importlib.import_module(f"nets.{family}").sizes
    cfg = cfg | dict(net=",".join([head, *(o for o in options if "x_shape" not in o)]))
    common.seed_default(0)
    small = {each: sizes[each] | TINY[family] | TINY.get(each, {}) for each in sizes}     # the teacher's too
    with mock.patch.dict(sizes, small):
        nets = method.build(cfg)
    for p in (p for net in nets.values() for p in net.parameters()):    # none that starts at 0 hides another
        p.data.add_(0.05 * torch.randn_like(p))
    return cfg, nets, memory.example(cfg, nets["student"], n, tokens=5, views=3)

def steps(method, cfg, nets, batch):
    """Of each phase (name, CPU ms, loss, logs) of its first step, whose gradients the nets then hold."""
    for phase, it in run.phases(method, cfg).items():
        run.turn(nets, method.optimizers(nets, cfg), phase)
        start = time.process_time()
        loss, logs = method.step(nets, batch, it, cfg)
        loss.backward()
        yield phase, 1000 * (time.process_time() - start), loss, logs

@pytest.mark.parametrize("name, preset", ALL)
def test_a_preset_builds_at_full_size_and_takes_a_step_of_each_phase(name, preset):
    assert ALL.count((name, preset)) == 1               # none hides another
    start = time.process_time()
    method, cfg, nets = presets.load(name, preset)
    assert {*method.init(cfg)} <= {*nets} and time.process_time() - start < 4     # imports included
    assert sum(p.numel() for p in nets["student"].parameters()) > 1e5
    cfg, nets, batch = shrunk(method, cfg)
    owned = run.owned(method, nets, cfg)
    for phase, _, loss, logs in steps(method, cfg, nets, batch):
        grads = run.gradients(nets)     # Qwen-Image's last block makes text that nothing reads
        assert all(torch.as_tensor(v).isfinite().all() for v in (loss, *logs.values(), *grads.values()))
        moved = {k.split(".")[0] for k, g in grads.items() if g.any()}
        assert {*grads} <= owned[phase] and moved == {k.split(".")[0] for k in owned[phase]}

def test_the_list_of_presets_has_their_sizes_and_memory(capsys):
    presets.main(["sft/sit_xl", "dmd2/sdxl", "--ranks=16", "--steps"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    (student, _, *sit), (sdxl, _, *sharded) = (
        [float(v) for v in row[3:] if v.replace(".", "").isdigit()] for row in rows)
    assert [row[:3] for row in rows] == [["sft", "sit_xl", "dit:sit_xl2"], ["dmd2", "sdxl", "sd:sdxl"]]
    one = 4 * student * 1e6 / 2 ** 30                   # GB of one float32 copy
    assert student == pytest.approx(674.8, abs=0.1)
    assert sit == pytest.approx([one, 2 * one, 2 * one, one, 6 * one, sit[5]], abs=0.06)
    assert sdxl == pytest.approx(2567, abs=3) and len(sharded) == 7     # with the ms of two phases
    assert sharded[0] == pytest.approx(3 * 4 * sdxl * 1e6 / 2 ** 30 / 16, rel=0.02)     # three nets, 16 rows
    refused(presets.main, ["dmd2/sdlx"], says=["did you mean dmd2/sdxl"])
