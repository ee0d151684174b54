"""What `find_synchronizations` makes of the warnings of torch, and what it restores; the warnings are imitated."""

import threading
import warnings
from collections.abc import Callable

import pytest
import torch

from actoffload import find_synchronizations

TEXT = "called a synchronizing CUDA operation (Triggered internally at c10/cuda/CUDAFunctions.cpp:350.)"


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The sync debug modes that were set, with CUDA imitated."""
    modes: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def item() -> None:
    warnings.warn(TEXT, UserWarning, stacklevel=1)


def line_of(function: Callable[..., object], offset: int = 1) -> int:
    return function.__code__.co_firstlineno + offset


def test_without_cuda_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"^find_synchronizations needs CUDA, .* run it on a machine with a GPU\.$"):
        find_synchronizations().__enter__()


@pytest.mark.usefixtures("mode")
def test_the_line_is_named_and_counted() -> None:
    with find_synchronizations() as found:
        for _ in range(3):
            item()
    (one,) = found
    assert (one.file, one.line, one.function) == (__file__, line_of(item), "item")
    assert (one.code, one.count) == ("warnings.warn(TEXT, UserWarning, stacklevel=1)", 3)
    assert len(found) == 1
    first, second, third = str(found).split("\n")
    assert first == "The host waits for the GPU 3 times, at 1 line."
    assert second.endswith(f"test_synchronization.py:{one.line} in item, 3 times")
    assert third.strip() == one.code


@pytest.mark.usefixtures("mode")
def test_a_line_of_a_package_counts_for_the_line_of_the_program_that_called_it() -> None:
    space: dict[str, object] = {"item": item}
    program = "warnings.warn(text, UserWarning, stacklevel=1)"
    code = compile(f"import warnings\ndef inside(text):\n    {program}\n", "/x/site-packages/y/z.py", "exec")
    exec(code, space)
    with find_synchronizations() as found:
        space["inside"](TEXT)  # type: ignore[operator]
    (one,) = found
    assert one.file == __file__
    assert one.code.startswith('space["inside"](TEXT)')


@pytest.mark.usefixtures("mode")
def test_what_built_in_operations_of_backward_warn_of_is_the_call_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch repeats the warnings of built-in operations when the backward that this line called ends."""
    engine: dict[str, object] = {"warnings": warnings, "text": TEXT}
    source = "def run(*args, **kwargs):\n    warnings.warn(text, UserWarning, stacklevel=1)"
    exec(compile(source, torch.__file__, "exec"), engine)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", engine["run"])
    x = torch.ones((), requires_grad=True)
    with find_synchronizations() as found:
        x.backward()
    (one,) = found
    assert (one.file, one.code) == (__file__, "x.backward()")


@pytest.mark.usefixtures("mode")
def test_waits_of_other_threads() -> None:
    with find_synchronizations() as found:
        threads = [threading.Thread(target=item) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (one,) = found
    assert (one.line, one.count) == (line_of(item), 4)


def test_mode_and_filters_are_restored_after_an_exception(mode: list[object]) -> None:
    def step() -> None:
        assert mode[-1] == "warn"
        item()
        raise KeyError

    mode.append(1)
    before = (warnings.showwarning, list(warnings.filters))
    with pytest.raises(KeyError), find_synchronizations() as found:
        step()
    assert mode[-1] == 1
    assert (warnings.showwarning, list(warnings.filters)) == before
    assert len(found) == 1


@pytest.mark.usefixtures("mode")
def test_other_warnings_are_shown() -> None:
    with pytest.warns(UserWarning, match="something else"), find_synchronizations() as found:
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert not found
    assert str(found) == "No synchronization was found."
