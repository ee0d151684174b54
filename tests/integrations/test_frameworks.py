"""Callbacks for training frameworks, the programs of the pages about these, and the names on the pages on migration.

All in one file, because importing the frameworks takes longer than the tests, and the tests of a file share a process.
"""

import copy
import importlib.util
import inspect
import pickle
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import actoffload
from actoffload import OffloadHandle
from actoffload.report import RankReports, Report

pytest.importorskip("transformers", reason="the callbacks derive from classes of the frameworks")
# Under the name that is installed; both packages have the same classes.
lightning: Any = pytest.importorskip(
    "pytorch_lightning" if importlib.util.find_spec("lightning") is None else "lightning.pytorch"
)
from actoffload.integrations import LightningOffloadCallback, OffloadCallback  # noqa: E402

INTEGRATIONS = Path(__file__).parents[2] / "docs" / "integrations"
MIGRATION = INTEGRATIONS.parent / "migration"

STEPS, BLOCKS = 4, 5
ROWS = torch.randn(2 * STEPS, 64, 64, generator=torch.Generator().manual_seed(0))
FAILS = 2


class Net(nn.Module):
    """Blocks whose forward takes a batch as the Trainer passes it, and returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(BLOCKS)
        )
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        for block in self.blocks:
            x = x + block(x)
        return {"loss": x.square().mean()}


def failing(net: Net) -> Net:
    """Let the forward with the number `FAILS` raise, once."""

    def hook(module: Net, args: Any) -> None:
        if module.calls == FAILS:
            module.calls += 1
            raise RuntimeError("out of luck")

    net.register_forward_pre_hook(hook)
    return net


def train_with_hugging_face(net: Net, folder: Path, callbacks: list[Any]) -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        optim="sgd",
    )
    trainer = Trainer(net, arguments, train_dataset=[{"x": row} for row in ROWS], callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def fit_with_lightning(net: Net, folder: Path, callbacks: list[Any]) -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = net, nn.MSELoss()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        default_root_dir=str(folder),
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(ROWS, batch_size=2))


FRAMEWORKS = [
    pytest.param(train_with_hugging_face, OffloadCallback, id="Trainer"),
    pytest.param(fit_with_lightning, LightningOffloadCallback, id="Lightning"),
]
pytestmark = pytest.mark.filterwarnings("default")  # those of the frameworks
both = pytest.mark.parametrize(("train", "make"), FRAMEWORKS)


@both
def test_offloads_in_training_and_reports_once(train, make, tmp_path, capsys):
    plain, net, texts = Net(), Net(), []
    train(plain, tmp_path, [])
    callback = make(report_at=3, log=texts.append, min_bytes=0)
    train(net, tmp_path, [callback])
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    assert callback.report.passes == 3
    assert callback.report.totals.calls_offloaded == BLOCKS - 2
    assert callback.report.totals.bytes_offloaded > 0
    assert texts == [str(callback.report)]
    assert not callback.handle.installed
    assert actoffload.OffloadHandle.of(net) is None


@both
def test_the_report_waits_for_the_final_plan(train, make, tmp_path, monkeypatch):
    settling = property(lambda handle: handle.statistics().passes < STEPS - 1)
    monkeypatch.setattr(actoffload.OffloadHandle, "settling", settling)
    texts = []
    callback = make(report_at=1, log=texts.append, min_bytes=0)
    train(Net(), tmp_path, [callback])
    assert callback.report.passes == STEPS - 1
    assert texts == [str(callback.report)]


@both
def test_a_short_training_is_reported_at_its_end_above_progress_bars(train, make, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("tqdm.tqdm.write", lambda text, **_: written.append(text))
    callback = make(min_bytes=0)
    train(Net(), tmp_path, [callback])
    assert callback.report.passes == STEPS
    assert str(callback.report) in written


@both
def test_a_smaller_last_batch_is_not_reported_and_none_logs_nothing(train, make, tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr(Net, "forward", lambda net, x, forward=Net.forward: forward(net, x[:1] if net.calls else x))
    callback = make(report_at=None, log=texts.append, min_bytes=1 << 17)  # more than a tensor of the later batches has
    train(Net(), tmp_path, [callback])
    assert not texts
    assert callback.report.passes == STEPS
    assert callback.report.totals.bytes_offloaded > 0


@both
def test_training_again_after_an_exception(train, make, tmp_path):
    net, callback = failing(Net()), make(report_at=STEPS, log=str, min_bytes=0)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(net, tmp_path, [callback])
    assert callback.report is None
    train(net, tmp_path, [callback])
    assert callback.report.passes == STEPS
    assert not callback.handle.installed


@pytest.mark.parametrize("missing", [[], ["torch._C.a_name"]])
@pytest.mark.parametrize("report_at", [None, 1])
def test_a_training_without_steps_and_one_that_pytorch_does_not_support(monkeypatch, missing, report_at):
    monkeypatch.setattr("actoffload._torch.MISSING", missing)
    state, net, texts = SimpleNamespace(is_world_process_zero=True), Net(), []
    callback = OffloadCallback(report_at=report_at, log=texts.append)
    callback.on_train_begin(None, state, None, model=net)
    for _ in range(3 * len(missing)):
        net(ROWS)["loss"].backward()
        callback.on_step_end(None, state, None)
    callback.on_train_end(None, state, None)
    assert OffloadHandle.of(net) is None
    expected = (
        "actoffload has no report of this training: There is nothing to report yet: no forward of the model with a "
    )
    assert [text.startswith(expected) for text in texts] == [True] * (report_at is not None)


@both
def test_arguments_are_checked_where_they_are_given(train, make):
    with pytest.raises(
        TypeError, match="Callback got an unexpected keyword argument 'num_layer'; expected arguments of"
    ):
        make(num_layer=3)
    for arguments, error, message in (
        ({"report_at": "soon"}, TypeError, "report_at is 'soon'"),
        ({"report_at": 0}, ValueError, "report_at is 0; expected a whole number, at least 1, or None"),
    ):
        with pytest.raises(error, match=message):
            make(**arguments)
    with pytest.raises(TypeError, match=r'module is a Net; expected a name, such as "model", or None\.'):
        LightningOffloadCallback(Net())


@both
def test_copies_and_pickles(train, make, tmp_path):
    """Lightning sends callbacks to processes that it spawns."""
    callback = make(report_at=7, num_layers=2)
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert type(copied) is type(callback)
        assert isinstance(copied, make)
        assert copied.report_at == 7


def test_the_module_of_a_lightning_module():
    whole = lightning.LightningModule()
    whole.net, whole.loss = nn.Sequential(nn.Linear(4, 4)), nn.MSELoss()
    assert LightningOffloadCallback()._chosen(whole) is whole.net
    assert LightningOffloadCallback("net.0")._chosen(whole) is whole.net[0]
    whole.head = nn.Linear(4, 4)
    assert LightningOffloadCallback("head")._chosen(whole) is whole.head
    assert LightningOffloadCallback()._chosen(whole) is whole
    with pytest.raises(AttributeError, match="nothing"):
        LightningOffloadCallback("nothing")._chosen(whole)


@pytest.mark.parametrize("lead", [True, False])
@pytest.mark.parametrize("ran", [True, False])
def test_with_several_ranks_one_of_them_logs_the_table_of_all(monkeypatch, lead, ran):
    """All ranks gather, because that is a collective, also those without a report."""
    several = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    gathered, texts, model = [], [], Net()

    def gather(report: Report | None) -> RankReports:
        gathered.append(report)
        if report is None:
            raise TypeError("gather_reports got an object of type NoneType in rank 1")
        return RankReports((report, report), (0, 1))

    monkeypatch.setattr(actoffload.integrations, "dist", several)
    monkeypatch.setattr(actoffload.integrations, "gather_reports", gather)
    # Ranks do not wait for their plans, which may become final after different steps.
    monkeypatch.setattr(actoffload.OffloadHandle, "settling", True)
    callback = OffloadCallback(report_at=1, log=texts.append, min_bytes=0)
    state = SimpleNamespace(is_world_process_zero=lead)
    callback.on_train_begin(None, state, None, model=model)
    if ran:
        model(ROWS)["loss"].backward()
    callback.on_step_end(None, state, None)
    assert gathered == [callback.report]
    callback.on_train_end(None, state, None)
    assert len(gathered) == 1
    assert not callback.handle.installed
    missing = "There is no table of all ranks: gather_reports got an object of type NoneType in rank 1"
    table = str(RankReports((callback.report, callback.report), (0, 1))) if ran else missing
    assert [text.endswith(f"\n\n{table}") for text in texts] == [True] * lead
    assert [text.startswith(str(callback.report)) for text in texts] == [ran] * lead


# Pages about frameworks

NEEDS = {
    "trainer": ("accelerate", "transformers"),
    "trl": ("datasets", "trl"),
    "lightning": ("pytorch_lightning",),
    "accelerate": ("accelerate",),
    "peft": ("peft", "transformers"),
    "diffusers": ("diffusers",),
    "torchtitan": (),
}


def test_every_page_is_tested():
    assert {page.stem for page in INTEGRATIONS.glob("*.md")} == {*NEEDS, "index"}


@pytest.mark.parametrize("page", NEEDS)
def test_the_program_of_a_page(page, tmp_path, monkeypatch, capsys):
    for package in NEEDS[page]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", (INTEGRATIONS / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(blocks), names)
    callback = names.get("callback")
    report = callback.report if callback else names.get("report", names.get("reports"))
    handle = callback.handle if callback else names["handle"]
    assert isinstance(handle, OffloadHandle)
    reports = report.reports if isinstance(report, RankReports) else (report,)
    for each in reports:
        assert isinstance(each, Report)
        assert each.coverage > 0.8
        assert each.totals.bytes_offloaded > 0
    assert "offloaded" in capsys.readouterr().out
    if callback:
        assert callback.report.passes == 2
        assert not handle.installed
    handle.remove()


# Pages on migration


def text() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in MIGRATION.glob("*.md"))


def takes(function: Any, *arguments: str) -> None:
    """Check that a function takes these arguments, and that a page names each of them."""
    parameters = inspect.signature(function).parameters
    for argument in arguments:
        assert argument in parameters
        assert argument in text()


def test_names_of_pytorch():
    takes(save_on_cpu, "pin_memory", "device_type")
    takes(checkpoint, "use_reentrant", "context_fn")
    takes(fully_shard, "offload_policy")
    takes(CPUOffloadPolicy, "pin_memory")
    takes(CPUOffload, "offload_params")
    for function in (checkpoint_sequential, checkpoint_wrapper.offload_wrapper, checkpoint_wrapper.checkpoint_wrapper):
        assert function.__name__ in text()
    assert hasattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts")


def test_names_of_transformers():
    import transformers

    known = {field.name for field in fields(transformers.TrainingArguments)}
    names = {"gradient_checkpointing", "activation_checkpointing", "activation_checkpointing_kwargs"}
    assert names <= known
    assert all(name in text() for name in names)
    takes(transformers.PreTrainedModel.activation_checkpointing_enable, "every_n_layers", "offload")
    assert hasattr(transformers.PreTrainedModel, "gradient_checkpointing_enable")


def test_the_trainer_reads_each_loss_unless_it_is_told_not_to():
    import transformers

    (argument,) = (f for f in fields(transformers.TrainingArguments) if f.name == "logging_nan_inf_filter")
    assert argument.default is True
    assert "torch.isnan(tr_loss_step)" in inspect.getsource(transformers.Trainer)
    assert f"`TrainingArguments({argument.name}=False)`" in (INTEGRATIONS / "trainer.md").read_text(encoding="utf-8")


def test_names_of_trl():
    trl = pytest.importorskip("trl")
    from trl.models.activation_offloading import NoOpManager, OffloadActivations, get_act_offloading_ctx_manager

    takes(OffloadActivations, "use_pin_memory", "use_streams", "min_offload_size", "max_fwd_stash_size")
    takes(get_act_offloading_ctx_manager, "model")
    assert NoOpManager.__name__ in text()
    parameters = inspect.signature(OffloadActivations).parameters
    for name in ("min_offload_size", "max_fwd_stash_size"):
        assert f"`{name}={parameters[name].default}`" in text()
    assert "activation_offloading" in {field.name for field in fields(trl.SFTConfig)}
