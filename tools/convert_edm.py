"""Converts a pickled network of NVIDIA's EDM and EDM2 releases to a plain file of weights.

    python tools/convert_edm.py edm-cifar10-32x32-cond-vp.pkl edm-cifar10.pth

Neither their code nor any other that the pickle names is run. It may call the few functions and classes of
`allowed` below; every other name becomes an inert object that only keeps its attributes, and of those only
modules, parameters and persistent buffers are read. The result is bit-equal to the network's state_dict().
"""
import collections
import io
import pickle
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckpt, train  # noqa: E401, E402
from common import BadInput  # noqa: E402


class Inert(torch.nn.Module):
    """Stands for a class, function or object of the pickle: takes any call and only keeps attributes; those
    of a module are what Module.state_dict reads."""

    def __init__(self, *args, **kwargs):
        super().__init__()

    def __setstate__(self, state):
        if isinstance(state, dict):
            super().__setstate__(state)

    append = __setitem__ = lambda self, *args: None


def persistent_object(meta):
    """Of an object's state and its class's source code, `module_src`, which stays unread."""
    found = Inert()
    found.__setstate__(meta["state"])
    return found


allowed = {
    "torch_utils.persistence._reconstruct_persistent_obj": persistent_object, "dnnlib.util.EasyDict": dict,
    "collections.OrderedDict": collections.OrderedDict, "builtins.set": set,
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
    "torch.storage._load_from_bytes": lambda b: torch.load(io.BytesIO(b), "cpu", weights_only=True)}


class Unpickler(pickle.Unpickler):
    refused = frozenset()

    def find_class(self, module, name):
        name = f"{module}.{name}"
        self.refused |= {name} - allowed.keys()
        return allowed.get(name, Inert)


def read(path):
    """State dict in a pickle (of its `ema`, else its `model`, else itself), the names that stayed inert."""
    try:
        with open(path, "rb") as file:
            unpickler = Unpickler(file)
            found = unpickler.load()
        if isinstance(found, dict):
            found = found.get("ema", found.get("model", found))
        weights = found.state_dict() if isinstance(found, Inert) else found
    except Exception as e:  # a broken pickle can raise anything
        raise BadInput(f"{path} is not readable as an EDM pickle ({type(e).__name__}); get it again") from e
    if not isinstance(weights, dict) or {isinstance(v, torch.Tensor) for v in weights.values()} != {True}:
        raise BadInput(f"{path} holds no network: expected `ema` or `model` in it, as in NVIDIA's releases")
    return {k: v.detach().clone() for k, v in weights.items()}, unpickler.refused


def main(argv):
    if len(argv) != 2:
        return print(__doc__)
    weights, refused = read(argv[0])
    ckpt.save(Path(argv[1]), weights)
    print(f"{argv[1]}: {len(weights)} tensors; kept inert: {', '.join(sorted(refused)) or 'nothing'}")


if __name__ == "__main__":
    train.run(main)
