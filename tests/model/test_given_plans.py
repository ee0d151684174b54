"""Plans that are given back: to the model that they are of, in the same or in other wrappers."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from whole_model import Mlp, Wave, Waves, offload

import actoffload
from actoffload.schedule import Plan

ROWS = torch.randn(16, 32)


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(Wave(), Wave()) for _ in range(6)))


def bytes_offloaded(model: nn.Module, **arguments) -> int:
    """Return what a step offloads after the first, and remove the handle."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = actoffload.offload(model, min_bytes=0, **arguments)
    for _ in range(2):
        handle.reset_statistics()
        model(ROWS).sum().backward()
    nbytes = handle.statistics().bytes_offloaded
    handle.remove()
    return nbytes


def plan_of(model: nn.Module, **arguments) -> Plan:
    with actoffload.offload(model, min_bytes=0, **arguments) as handle:
        model(ROWS).sum().backward()
        return handle.plan


def test_groups_that_are_containers_are_not_opened(tmp_path):
    model = blocks()
    plan = plan_of(model)
    assert plan.names == tuple("012345")
    path = tmp_path / "plan.json"
    plan.save(path)
    for given in (path, str(path), Plan.load(path)):
        assert bytes_offloaded(model, plan=given) == bytes_offloaded(model) > 0
    with actoffload.offload(model, plan=plan) as handle:
        assert (handle.groups, handle.plan) == (plan.names, plan)


WRAPPERS = {
    "module": DistributedDataParallel,
    "_orig_mod.module.": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.usefixtures("one_process")
def test_plans_of_wrapped_models_and_of_what_they_wrap(wrap):
    model = Waves(block=Mlp)
    plan = plan_of(model, num_layers=3)
    wrapped = wrap(model)
    with actoffload.offload(wrapped, num_layers=3, min_bytes=0) as handle:
        assert handle.groups == plan.names
    for given in (model, wrapped, DataParallel(wrapped)):
        with actoffload.offload(given, plan=plan) as handle:
            assert handle.groups == handle.plan.names == plan.names
            assert handle.plan.steps == plan.steps
            assert "blocks.*: 3 of 6 offloaded" in str(handle)


def test_the_whole_model_as_a_group():
    model = Waves()
    plan = plan_of(model, layers=[model], num_layers=0)
    assert plan.names == ("(the whole model)",)
    for given in (model, DataParallel(model)):
        with actoffload.offload(given, plan=plan) as handle:
            assert handle.groups == ("(the whole model)",)


def test_a_plan_of_no_module_of_the_model():
    plan = Plan(2, names=("layers.0", "layers.1"), nbytes=(0, 0))
    expected = (
        r"^plan has the group 'layers\.0', which is no module of this Waves that runs: give a plan of the same model\."
    )
    for model in (Waves(), DataParallel(Waves())):
        with pytest.raises(ValueError, match=expected):
            offload(model, plan=plan)
    with pytest.raises(ValueError, match=r"^plan is of rank 1 of a pipeline; give the plan of a model\.$"):
        offload(Waves(), plan=replace(plan, rank=1))
    lists = Plan(1, names=("blocks",), nbytes=(0,))
    with pytest.raises(ValueError, match=r"^plan has the group 'blocks', which is no module of this Waves that"):
        offload(Waves(), plan=lists)


def test_a_plan_of_a_smaller_model_warns():
    plan = plan_of(Waves(6))
    expected = r"^plan does not have the blocks blocks\.6, 7 of this Waves, which are kept, although it has"
    for model in (Waves(8), DataParallel(Waves(8))):
        with pytest.warns(UserWarning, match=expected):
            offload(model, plan=plan)
    model = Waves(8)
    for block in list(model.blocks)[6:]:
        block.requires_grad_(False)  # saves nothing, and would be in no plan
    assert bytes_offloaded(model, plan=plan)
