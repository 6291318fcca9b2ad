"""memory.py against what real runs hold and what torch's profiler sees the CPU's allocator do."""
import copy
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

import memory
import run
import startup
from run import batch_of, config, load, nets_of

def measured(method, cfg, nets, batch, it):
    """Bytes that the allocator handed out at most at a time, in a step with its backward pass."""
    with torch.profiler.profile(profile_memory=True) as prof:
        startup.call(method, nets, batch, it, cfg)[0].backward()
    now, peak = 0, 0
    for event in prof.profiler.kineto_results.events():
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now)
    return peak

@pytest.mark.parametrize("name", ["sft", "dmd2"])
@pytest.mark.parametrize("net", ["toy:tiny", "edm:digits"])
def test_a_step_on_fake_tensors_takes_what_the_allocator_gives_a_real_one(name, net):
    method = load(name)
    cfg = config(method, net=net, batch_size=32)
    nets, batch = nets_of(method, cfg), batch_of(cfg)
    for it in run.phases(method, cfg).values():
        fakes = copy.deepcopy(nets)
        with FakeTensorMode(allow_non_fake_inputs=True):
            memory.faked(cfg, fakes)
            example = memory.example(cfg, fakes["student"], 32)
        example["cond"]["label"] = example["uncond"]["label"] = batch["cond"]["label"]
        step, grads = memory.peak(method, cfg, fakes, example, it)
        run.turn(nets, method.optimizers(nets, cfg), method.phase(it, cfg))
        assert step + grads == pytest.approx(measured(method, cfg, nets, batch, it), rel=0.1)

def test_state_is_what_a_run_holds_and_a_dry_run_says_what_holds_it(capsys):
    method, cfg = load("dmd2"), config(load("dmd2"), max_iter=6, update_ratio=1, ema=("ema", "ema_b:0.9"))
    out = run.run(method, cfg)
    size = lambda tree: sum(x.nbytes for x in tree_iter(tree)                                    # noqa: E731
                            if torch.is_tensor(x) and x.ndim)
    state = run.saved(out.folder, 6)
    with torch.device("meta"):
        nets = method.build(cfg | dict(classes=10))
    gb, why = memory.per_rank(method, cfg | dict(classes=10), nets, 1)
    held = [size([net.state_dict() for net in out.nets.values()]), size(state["optims"]), size(state["emas"])]
    assert [round(gb[k] * 2 ** 30) for k in ("weights", "moments", "ema")] == held and not why
    run.trainer.train(method, cfg | dict(name="dry"), dry_run=True)
    assert f"memory per rank: {sum(gb.values()):.2f} GB" in (said := capsys.readouterr().out)
    assert "smallest device that holds it: 24 GB" in said
    assert memory.fits(dict(a=36.1)) == "80 GB" and memory.fits(dict(a=127.0)) == "none of 141 GB"

def test_state_is_shared_as_configured_and_a_step_that_reads_values_is_said_so():
    method, cfg = load("sft"), config(load("sft"), classes=10, batch_size=16)
    def each(world, **changes):
        with torch.device("meta"):
            nets = method.build(cfg)
        return memory.per_rank(method, cfg | changes, nets, world)
    one, (whole, _) = each(1)[0], each(4)
    rows, _ = each(4, parallel="fsdp")
    assert whole["weights"] == one["weights"] == pytest.approx(4 * rows["weights"], rel=0.1)
    assert each(4, parallel="fsdp", shard_size=2)[0]["ema"] == pytest.approx(one["ema"] / 2, rel=0.1)
    assert each(4, parallel="fsdp", offload=True)[0]["moments"] == 0 < rows["step"]
    assert each(1, recompute=True)[0]["step"] < one["step"]
    step = method.step
    method.step = lambda nets, batch, *rest: step(nets, batch, *rest) if batch["x0"].sum() > 0 else None
    gb, why = each(1)
    assert math.isnan(gb["step"]) and "DataDependent" in why and gb["weights"] == one["weights"]
