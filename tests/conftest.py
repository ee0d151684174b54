"""Settings of all tests: one torch thread, and the same hypothesis examples on every run."""

import contextlib
import gc
import logging
import os
import sys
import types
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the tests compute on small tensors
# cuBLAS chooses algorithms by workspace size; with a fixed size, eager, side-stream and captured runs are comparable.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)
# Dynamo writes a trace if this logger has a handler, and pytest adds its own to loggers that do not propagate.
logging.getLogger("torch.__trace").propagate = True
pytest.register_assert_rewrite("adversary.harness")

import composing  # noqa: E402
import helpers  # noqa: E402

# Tests must not fail because of a loaded machine or a random seed.
settings.register_profile(
    "same", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# For the mutation check, which only needs to know whether a test fails: do not shrink examples.
settings.register_profile("mutation", settings.get_profile("same"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("same")


@pytest.fixture
def offload_small_tensors() -> Iterator[None]:
    """Offload tensors of 64 elements or more."""
    with helpers.min_elements(64):
        yield


def pytest_collection_finish() -> None:
    """Leave what the imports made out of all collections: it is never garbage, and many tests collect."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Leave out also what the files before this one made: after they have compiled, a collection takes long."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Let Dynamo forget what it compiled, before and after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the global variable `kept` of a module `program`.

    The module is new, because the report does not find what is frozen, such as the globals of the test files.
    """
    module = types.ModuleType("program")
    variables: dict[str, object] = {}
    vars(module)["kept"] = variables
    monkeypatch.setitem(sys.modules, "program", module)
    return variables


# Places, and ways of composition

ACCELERATOR = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.filterwarnings("default")])


@pytest.fixture(params=["cpu", ACCELERATOR])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Return where models and data are: on the CPU with the reference device, or on the accelerator."""
    monkeypatch.setattr(helpers, "PLACE", torch.device(request.param))
    with helpers.deterministic() if request.param == "cuda" else contextlib.nullcontext():
        yield helpers.PLACE


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


@pytest.fixture(params=[False, True, PRODUCTS], ids=["offloaded", "recomputed", "recomputed but products"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `composing.both` offload what groups save, or recompute it and offload their inputs."""
    monkeypatch.setitem(composing.WAY, "recompute", request.param)


@pytest.fixture
def one_process() -> Iterator[None]:
    """Give a process group of one process, without any network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
