"""The package imports and runs where torch has no CUDA, and where it has no torch.distributed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# torch, diffusers, transformers and accelerate look at torch.cuda themselves, at import and on every call,
# and get the real one. Our own code gets an error for any attribute.
GUARD = """
import sys
import types
import torch

OURS = ("usp", "runtime", "launchers", "tests", "__main__")

def guard(name, allowed=()):
    real = sys.modules[name]
    class Guarded(types.ModuleType):
        def __getattribute__(self, attribute):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.split(".")[0] in OURS and attribute not in allowed:
                raise RuntimeError(f"{caller} touched {name}.{attribute}")
            return getattr(real, attribute)
    guarded = Guarded(name)
    sys.modules[name] = guarded
    setattr(torch, name.removeprefix("torch."), guarded)
"""

RUN = """
def refused(name):
    try:
        getattr(torch, name).anything
    except RuntimeError as error:
        return str(error) == f"__main__ touched torch.{name}.anything"

from tests import tiny
import usp
want = tiny.build("t2v")(**tiny.call("t2v"), generator=torch.Generator().manual_seed(7)).frames
with usp.ParallelPipeline(tiny.build("t2v")) as pipe:
    assert torch.equal(pipe(**tiny.call("t2v"), seed=7).frames, want)
    assert (pipe.world.world_size, pipe.world.device.kind, pipe.world.group) == (1, "cpu", None)
"""

TWO_RANKS = """
def go():
    with usp.ParallelPipeline(tiny.build("t2v"), "ring2") as pipe:
        return (pipe(**tiny.call("t2v"), seed=7).frames - want).abs().max().item()

if __name__ == "__main__":
    from tests.ranks import Ranks
    pool = Ranks(2)
    assert max(pool.run(go)) <= 1e-5
    pool.stop()
"""


def run(script: str) -> str:
    """What a fresh interpreter prints; it must end well."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_b08_nothing_of_ours_touches_torch_cuda():
    """B08, req 18: torch.cuda raises on any attribute: import, a pipeline on one rank and on two (ring)."""
    guard = f"{GUARD}\nguard('torch.cuda')\n"
    assert run(f"{guard}{RUN}\nassert refused('cuda')\n{TWO_RANKS}\nprint('fine')") == "fine\n"


def test_b08_one_rank_needs_no_torch_distributed():
    """B08: a torch without distributed has `is_available` (False) and a ProcessGroup stub; one rank works."""
    guard = f"""{GUARD}
import torch.distributed
torch.distributed.is_available = lambda: False
guard('torch.distributed', allowed=('is_available', 'ProcessGroup'))
"""
    assert run(f"{guard}{RUN}\nassert refused('distributed')\nprint('fine')") == "fine\n"
