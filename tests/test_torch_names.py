"""Private names of PyTorch: without any one of them the package imports, and gradients keep every bit."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Linear, Parameter

import actoffload
from actoffload import _torch
from actoffload._torch import modules, tensors

SOURCES = Path(actoffload.__file__).parent

# Everything that `actoffload._torch` looks up by a name that is not public.
NAMES = [
    "UntypedStorage._cdata",
    "Tensor._version",
    "Tensor._base",
    "UntypedStorage._weak_ref",
    "UntypedStorage._expired",
    "UntypedStorage._free_weak_ref",
    "UntypedStorage._new_with_weak_ptr",
    "_neg_view",
    "_C.TensorBase",
    "_C.DisableTorchFunctionSubclass",
    "_C._DisableTorchDispatch",
    "_C._AutoDispatchBelowAutograd",
    "_C._DisableAutocast",
    "_C._functions.ExpBackward0",
    "_C._current_graph_task_id",
    "autograd.Variable._execution_engine",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "_C._functorch.get_interpreter_stack",
    "_C._functorch.TransformType",
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._dynamo.eval_frame",
    "utils._python_dispatch._get_current_dispatch_mode",
    "utils._pytree.tree_flatten",
    "_C._accelerator_getStream",
    "_C._cuda_isCurrentStreamCapturing",
    "_C._host_emptyCache",
    "nn.Module._call_impl",
]

# The name is hidden from `actoffload._torch` alone: PyTorch itself needs most of them.
PROGRAM = """
import builtins, operator, sys, warnings
import torch

hidden = sys.argv[1]
plain_attrgetter, plain_getattr = operator.attrgetter, getattr


def attrgetter(path):
    found = plain_attrgetter(path)

    def hiding(thing):
        if thing is torch:
            raise AttributeError(hidden)
        return found(thing)

    return hiding if f"{path}.".startswith(f"{hidden}.") else found


def getattr(thing, entry, *default):
    asks = sys._getframe(1).f_globals.get("__name__", "")
    if asks.startswith("actoffload._torch.") and thing is torch.nn.Module and hidden == f"nn.Module.{entry}":
        return default[0]
    return plain_getattr(thing, entry, *default)


operator.attrgetter, builtins.getattr = attrgetter, getattr
import actoffload
from actoffload._torch import MISSING
warnings.simplefilter("ignore")


def train(how):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(5)])
    x = torch.randn(8192, 32, requires_grad=True)
    if how == "model":
        handle = actoffload.offload(model, layers="*")
        y = model(x * 1.0)
    elif how == "context":
        context, sync = actoffload.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=5)
        y = x * 1.0
        for layer in model:
            with context:
                y = layer(y)
            y = sync(y)
    else:
        y = model(x * 1.0)
    y.square().mean().backward()
    if not MISSING and how == "model":
        assert handle.statistics().bytes_offloaded > 0
    return [x.grad, *(p.grad for p in model.parameters())]


plain = train("plain")
for how in ("model", "context"):
    for a, b in zip(plain, train(how), strict=True):
        assert torch.equal(a, b), how
print(*MISSING)
"""

ESSENTIAL = {
    "UntypedStorage._cdata",
    "Tensor._version",
    "Tensor._base",
    "UntypedStorage._weak_ref",
    "UntypedStorage._expired",
    "UntypedStorage._free_weak_ref",
    "_C._current_graph_task_id",
    "_C._autograd._top_saved_tensors_default_hooks",
    "autograd.Variable._execution_engine",
}


# Runs the program for each name in a process of its own, which is forked when torch has been imported.
FORKS = """
import gc, os, sys, traceback
import torch

gc.freeze()  # no process collects what torch made
program, folder, *names = sys.argv[1:]
sys.dont_write_bytecode, sys.pycache_prefix = False, folder  # the first process compiles the package for all
for number, name in enumerate(names):
    if not os.fork():
        failed = 1
        for stream in (1, 2):
            os.dup2(os.open(f"{folder}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        try:
            sys.argv[1:] = [name]
            exec(program, {"__name__": "__main__"})
            failed = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failed)
    _, status = os.wait()
    with open(f"{folder}/{number}.status", "w") as file:
        file.write(str(status))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """For each name the exit status, the output and the errors of the program without it."""
    folder = tmp_path_factory.mktemp("names")
    env = {**os.environ, "PYTHONPATH": str(SOURCES.parent), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", FORKS, PROGRAM, str(folder), *NAMES]
    subprocess.run(arguments, check=True, env=env)

    def written(number: int) -> tuple[str, str, str]:
        status, output, errors = ((folder / f"{number}.{what}").read_text() for what in ("status", "1", "2"))
        return status, output, errors

    return {name: written(number) for number, name in enumerate(NAMES)}


@pytest.mark.parametrize("name", NAMES)
def test_without_one_name_the_package_imports_and_gradients_keep_every_bit(
    outcomes: dict[str, tuple[str, str, str]], name: str
) -> None:
    status, output, errors = outcomes[name]
    assert status == "0", errors
    missing = output.split()
    assert bool(missing) is (name in ESSENTIAL), missing


def test_every_private_name_is_in_one_package_and_in_the_list_above() -> None:
    private = re.compile(r"\btorch(\.\w+)*\._[a-zA-Z]\w*|torch\.utils\._\w+|\._cdata\b|\._version\b")
    for path in SOURCES.rglob("*.py"):
        if path.parent.name == "_torch":
            continue
        code = ast.unparse(_without_docstrings(ast.parse(path.read_text(encoding="utf-8"))))
        assert not (found := private.search(code)), f"{path.name}: {found[0]}"


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_this_torch_has_all_of_them() -> None:
    assert _torch.MISSING == []
    assert _torch.unsupported() is None


def test_autograd_nodes_have_the_names_that_identify_casts() -> None:
    weight = Parameter(torch.randn(3, 2))
    made = {
        type(node).__name__
        for node in (weight.to(torch.bfloat16).grad_fn, weight.t().grad_fn, weight.transpose(0, 1).grad_fn)
    }
    assert made == tensors.CASTS


class View(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_what_nodes_that_save_nothing_have_made_is_saved_as_an_input() -> None:
    leaf = torch.randn(3, 2, requires_grad=True)
    x, edited = leaf * 1.0, leaf * 1.0
    edited[0].exp_()
    assert all(map(tensors.saved_as_input, [leaf.t(), x.t(), x[0], x.view(-1), x + 1.0, x.to(torch.float64)]))
    assert not any(map(tensors.saved_as_input, [leaf, x, x.exp(), View.apply(x), View.apply(x).t().sin()]))
    assert type(edited.grad_fn).__name__ == "CopySlices"
    assert not any(map(tensors.saved_as_input, [edited, edited.t()]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, when torch.compile is imported
def test_wrappers_have_the_attributes_and_classes_that_identify_them() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    compiled, checkpointed = torch.compile(Linear(2, 2)), checkpoint_wrapper(Linear(2, 2))
    names = {*dict(compiled.named_children()), *dict(checkpointed.named_children())}
    assert names == {"_orig_mod", "_checkpoint_wrapped_module"} < set(modules.WRAPPED_AS)
    assert "_fsdp_wrapped_module" in Path(sys.modules[FullyShardedDataParallel.__module__].__file__).read_text()
    assert hasattr(FSDPModule, modules.RESHARD)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, when torch._dynamo is imported
def test_compiled_autograd_has_the_flag_that_is_read() -> None:
    assert importlib.import_module("torch._dynamo.compiled_autograd").in_compiled_autograd_region is False


def test_modules_are_called_by_the_functions_that_are_looked_for() -> None:
    of_torch = {code.co_qualname for code in modules.CALLS if not code.co_filename.startswith(str(SOURCES))}
    assert of_torch == {"Module._call_impl", "Module._wrapped_call_impl"}
    assert set(modules.CALL_VARIABLES) <= {
        name for code in modules.CALLS for name in code.co_varnames + code.co_cellvars
    }
