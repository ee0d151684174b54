"""What a report advises: the right sentence for what is wrong, with its numbers, and none where nothing is."""

import re

import pytest
from report_samples import attribute

from actoffload.report import GroupReport, HeldStorage, Holder, Reason, Report
from actoffload.report.advice import IN_ORDER, advise

MIB = 2**20


def block(index: int, *, offloaded: bool = True, **more: object) -> GroupReport:
    numbers = {
        "bytes_saved": 300 * MIB,
        "bytes_offloaded": 300 * MIB if offloaded else 0,
        "storages": 6,
        "reloaded_ahead": 6 if offloaded else 0,
        "bytes_reloaded": 300 * MIB if offloaded else 0,
    }
    return GroupReport(f"layers.{index}", "Block", offloaded=offloaded, **{**numbers, **more})


def report(*groups: GroupReport, **more: object) -> Report:
    """Return a report of these groups, or of four of which three are offloaded."""
    groups = groups or tuple(block(k, offloaded=k < 3) for k in range(4))
    return Report(groups, **{"passes": 3, **more})


def only(sentences: tuple[str, ...]) -> str:
    (sentence,) = sentences
    return sentence


def assert_has(sentence: str, *parts: str) -> None:
    """Assert that a sentence has these numbers, names and arguments, in this order."""
    at = 0
    for part in parts:
        assert part in sentence[at:], (part, sentence)
        at = sentence.index(part, at) + len(part)


# Nothing to change


RECOMPUTED = {"bytes_saved": 100 * MIB, "recomputed": True, "bytes_recomputed": 200 * MIB}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, ("900.0 MiB of 1.17 GiB of activations (75.0 %)", "3 of 4 groups")),
        ({0: {"kept": {Reason.PARAMETER: (9, 900 * MIB), Reason.BUFFER: (1, MIB)}}}, ("900.0 MiB of 1.17 GiB",)),
        ({0: {"kept": {Reason.DEVICE: (4, 900 * MIB)}}}, ("900.0 MiB of 2.05 GiB",)),  # of no memory of this one
        ({2: {"bytes_wasted": 50 * MIB}}, ("850.0 MiB of 1.17 GiB", "70.8 %")),
        ({0: {"bytes_not_freed": 4 * MIB}}, ("900.0 MiB of 1.17 GiB",)),  # hardly counts
        ({3: RECOMPUTED}, ("of 1.17 GiB of saved and recomputed activations", "1 group is recomputed")),
        ({2: RECOMPUTED, 3: RECOMPUTED}, ("2 groups are recomputed",)),
        ({0: {"forward_stall_seconds": 0.0, "backward_stall_seconds": 0.0004}}, ("stalled for 0.1 % of the step",)),
    ],
)
def test_if_all_is_well_one_sentence_says_so_with_the_numbers(more, words):
    groups = [block(k, offloaded=k < 3, **more.get(k, {})) for k in range(4)]
    known = report(*groups, step_seconds=0.4, seconds=0.3, baseline_seconds=0.298)  # less than 1 %
    assert_has(only(advise(known)), "Nothing to change: ", *words)


def test_a_pass_that_is_longer_than_without_is_never_well():
    sentence = only(advise(report(seconds=0.11, baseline_seconds=0.1)))
    assert_has(sentence, "A pass takes 10.0 % longer", "larger memory_budget", "else nothing is to change")
    stalled_too = advise(stalled(seconds=0.11, baseline_seconds=0.1))
    assert_has(stalled_too[0], "A pass takes 10.0 % longer")
    assert_has(stalled_too[1], "Compute stalled", ": raise memory_budget, if it is set.")
    assert only(advise(report(seconds=0.11, baseline_seconds=0.1, times=False))).startswith("Nothing to change: ")


def test_before_the_first_forward_one_sentence_says_so():
    sentence = only(advise(Report()))
    assert_has(sentence, "No group has run", "0 forward passes")
    assert only(advise(Report((block(0, calls=0),)))) == sentence


# Kept on the device


def kept_for(reason: Reason, nbytes: int, count: int = 4, **more: object) -> Report:
    groups = tuple(block(k, offloaded=k < 3, kept={reason: (count, nbytes)} if k == 0 else {}) for k in range(4))
    if reason is Reason.OUTSIDE:
        return report(outside={reason: (count, nbytes)}, **more)
    return report(*groups, **more)


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason not in IN_ORDER])
def test_a_large_share_for_a_reason_is_named_with_what_to_do(reason):
    sentence = only(advise(kept_for(reason, 300 * MIB)))
    assert " in 1 tensor) " in only(advise(kept_for(reason, 300 * MIB, count=1)))
    share = "25.0 %" if reason is Reason.HOST_FULL else "20.0 %"  # those are among the bytes saved
    beginning = f'{share} of the activations (300.0 MiB in 4 tensors) were kept for the reason "{reason.value}": '
    assert sentence.startswith(beginning)
    assert len(sentence) > len(beginning) + 20
    small = [block(0, bytes_saved=MIB, bytes_offloaded=0, kept={reason: (9, MIB)})]
    if reason not in (Reason.OUTSIDE, Reason.HOST_FULL):
        found = advise(report(*small, *(block(k, offloaded=False) for k in range(1, 4))))
        assert reason.value not in " ".join(found), "a share of a small group is worth no sentence"


@pytest.mark.parametrize(("nbytes", "said"), [(99 * MIB, False), (101 * MIB, True)])
def test_only_a_tenth_and_more_of_what_is_offloaded_is_worth_a_sentence(nbytes, said):
    assert ('"smaller than the limit"' in " ".join(advise(kept_for(Reason.SMALL, nbytes)))) is said


def test_small_tensors_get_a_limit_with_which_most_of_their_bytes_are_offloaded():
    sentence = only(advise(kept_for(Reason.SMALL, 300 * MIB, count=400)))  # 768 KiB each
    assert "they have 768.0 KiB on average" in sentence
    assert f"min_bytes={256 * 1024} " in sentence  # at most half of the mean
    tiny = only(advise(kept_for(Reason.SMALL, 300 * MIB, count=300 * MIB)))
    assert "min_bytes=1 " in tiny


def test_a_full_host_is_always_named_with_the_missing_bytes():
    sentence = only(advise(kept_for(Reason.HOST_FULL, 3 * MIB + 1, host_bytes_high_water=100 * MIB)))
    assert f"raise max_host_bytes, if it is set, to at least {104 * MIB} (104.0 MiB)." in sentence
    held = only(advise(kept_for(Reason.HOST_FULL, MIB, host_bytes=106 * MIB, host_bytes_high_water=100 * MIB)))
    assert (
        f"raise max_host_bytes, if it is set, to at least {108 * MIB} (108.0 MiB)." in held
    )  # more than any limit with 106 held


def test_what_is_saved_outside_names_the_module_to_choose():
    outside = {Reason.OUTSIDE: (3, 400 * MIB)}
    modules = {"tail": MIB, "head": 190 * MIB, "layers.*.norm": 170 * MIB, "*.b": 40 * MIB}
    named = only(advise(report(outside=outside, outside_modules=modules)))
    assert_has(named, "`head` (190.0 MiB), `layers.*.norm` (170.0 MiB), `*.b` (40.0 MiB) save the most", "with layers")
    assert_has(only(advise(report(outside=outside))), "record a step with handle.recording()", "modules")
    assert_has(only(advise(report(outside=outside, step_passes=1))), "the code of the model itself")
    few = {"head": 40 * MIB}  # most is saved in no module, so none that is chosen could help
    assert_has(
        only(advise(report(outside=outside, outside_modules=few, step_passes=1))), "the code of the model itself"
    )


# Not freed


def not_freed(nbytes: dict[int, int]) -> list[GroupReport]:
    """Return four groups, of some of which bytes are not freed."""
    return [block(k, offloaded=k < 3, bytes_not_freed=nbytes.get(k, 0)) for k in range(4)]


def test_what_refers_to_memory_that_is_not_freed_is_named_with_its_share():
    held = HeldStorage("layers.1", 123 * MIB, (attribute("cache", "encoder (Encoder)"), Holder("global", ("x",), "a")))
    sentence = only(advise(report(*not_freed({1: 123 * MIB}), held=(held,))))
    assert_has(sentence, "41.0 %", "layers.1", "123.0 MiB of 300.0 MiB", *map(str, held.holders))


def test_equal_holders_of_many_groups_are_one_sentence():
    held = tuple(HeldStorage(f"layers.{k}", 30 * MIB, (attribute("seen", f"layers.{k} (Block)"),)) for k in range(3))
    sentence = only(advise(report(*not_freed(dict.fromkeys(range(3), 30 * MIB)), held=held)))
    assert_has(sentence, "10.0 %", "3 groups (layers.0 ... 2)", "90.0 MiB of 900.0 MiB", str(held[0].holders[0]))
    assert "other groups" in sentence


def test_without_a_record_and_without_a_holder_the_sentence_says_so():
    unnamed, unseen = advise(
        report(*not_freed(dict.fromkeys(range(2), 30 * MIB)), held=(HeldStorage("layers.1", 20 * MIB),))
    )
    assert_has(unnamed, "6.7 %", "2 groups (layers.0, layers.1)", "40.0 MiB of 600.0 MiB", "handle.recording()")
    assert_has(unseen, "6.7 %", "layers.1", "20.0 MiB of 300.0 MiB", "autograd of another graph, a library, or C++")


@pytest.mark.parametrize(("nbytes", "said"), [(119 * MIB, False), (121 * MIB, True)])
def test_an_input_of_the_model_is_named_only_if_it_is_large(nbytes, said):
    held = HeldStorage("layers.0", nbytes, (Holder("input", ("",), "the model"),), is_input=True)
    sentence = only(advise(report(*not_freed({0: nbytes}), held=(held,))))
    assert ("because of the input of the model: inputs are freed" in sentence) is said
    assert sentence.startswith("Nothing to change") is not said


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("past_key_values.layers[0].keys", "output", "use_cache=False"),
        ("['inner'].past_key_values.layers[0].keys", "output", "use_cache=False"),
        ("cache.layers[0].keys", "output", "use_cache=False"),
        ("decoder_hidden_states[1]", "output", "output_hidden_states=False"),
        ("attentions[0]", "output", "output_attentions=False"),
        ("[1]['seen'][2]", "output", "return only what the loss needs"),
        ("kwargs['input_ids']", "input", "mark_not_offload"),
        ("args[0].layers[0].keys", "input", "mark_not_offload"),
        ("", "output", "return only what the loss needs"),
    ],
)
def test_what_to_do_about_inputs_and_outputs(path, kind, words):
    held = HeldStorage("layers.1", 30 * MIB, (Holder(kind, (path,), "the model"),))
    assert words in only(advise(report(*not_freed({1: 30 * MIB}), held=(held,))))


# Reloads on demand, stalls, nothing offloaded


def test_reloads_on_demand_name_their_groups_and_the_likely_reason():
    groups = [block(0), block(1, reloaded_on_demand=2, reloaded_ahead=4), block(2), block(3, offloaded=False)]
    assert_has(only(advise(report(*groups))), "2 of 18 reloads", "11.1 %", "layers.1", "execution order")
    groups[2:] = [block(2, reloaded_on_demand=6, reloaded_ahead=0), block(3, offloaded=False, calls=0)]
    assert_has(only(advise(report(*groups))), "layers.1, layers.2", "later groups", "did not run")


def test_measured_stalls_are_named_from_half_a_percent_on():
    def stalled(seconds: float) -> tuple[str, ...]:
        stalls = [(0.0, 0.0), (seconds, 0.0), (0.0, seconds / 2), (0.0, 0.0)]
        groups = [
            block(k, offloaded=k < 3, forward_stall_seconds=forward, backward_stall_seconds=backward)
            for k, (forward, backward) in enumerate(stalls)
        ]
        return advise(report(*groups, step_seconds=0.1))

    assert_has(only(stalled(0.010)), "15.0 %", "10.00 ms in forward", "5.00 ms in backward", "layers.1 (10.00 ms)")
    assert only(stalled(0.0003)).startswith("Nothing to change")  # 0.45 %
    assert only(stalled(0.0004)).startswith("Compute stalled")  # 0.6 %


def stalled(**more: object) -> Report:
    groups = [block(k, offloaded=k < 3, backward_stall_seconds=0.01 * (k < 3)) for k in range(4)]
    return report(*groups, step_seconds=0.1, **more)


def test_advice_about_stalls_without_a_plan_is_fewer_groups():
    assert only(advise(stalled())).endswith(": offload fewer groups.")
    assert only(advise(stalled(times=False))).startswith("Nothing to change")


def test_nothing_to_change_needs_groups_that_cover_the_activations():
    def outside(nbytes: int) -> Report:
        return report(outside={Reason.SMALL: (900, nbytes * MIB), Reason.PARAMETER: (1, MIB)})

    sentence = only(advise(outside(1300)))
    assert_has(sentence, "Only 48.0 % of the activations lie in groups", '"smaller than the limit"')
    assert only(advise(outside(1200))).startswith("Nothing to change")


def test_nothing_is_offloaded():
    none = tuple(block(k, offloaded=False) for k in range(3))
    sentence = "None of 3 groups is offloaded: the last of each kind is always kept."
    assert only(advise(report(*none))) == sentence
    because = "no copy fits beside the compute."
    assert only(advise(report(*none, because=because))) == "No copy fits beside the compute."
    assert only(advise(report(*none, because=because, times=False))) == sentence, "nothing was measured"
    copied_none = tuple(block(k, bytes_offloaded=0) for k in range(3))
    assert_has(only(advise(report(*copied_none))), "3 of 3 groups", "900.0 MiB of 900.0 MiB")
    replayed = report(*(block(k, offloaded=False, **RECOMPUTED) for k in range(3)))
    assert_has(only(advise(replayed)), "Nothing to change in memory: 3 groups are recomputed.")
    some = [block(0, bytes_offloaded=0, kept={Reason.SMALL: (1, 8 * MIB)}), block(1, bytes_offloaded=0)]
    some += [block(2, offloaded=False, kept={Reason.SMALL: (1, 16 * MIB)})]  # not a group that is offloaded
    assert "600.0 MiB of 608.0 MiB" in only(advise(report(*some)))


def test_what_is_offloaded_without_a_lower_peak_is_named():
    freed = {"expected_bytes": 900 * MIB, "dropped_bytes": 900 * MIB}
    sentence = only(advise(report(**freed, peak_resident_bytes=1150 * MIB)))
    assert_has(sentence, "900.0 MiB were offloaded", "only 50.0 MiB lower", "smaller groups", "or offload nothing")
    assert only(advise(report(**freed, peak_resident_bytes=1100 * MIB))).startswith("Nothing to change")


def test_the_most_bytes_come_first_and_the_order_is_always_the_same():
    kept = {Reason.SMALL: (9, 200 * MIB), Reason.MARKED: (2, 400 * MIB), Reason.LAYOUT: (9, 200 * MIB)}
    outside = {Reason.OUTSIDE: (1, 900 * MIB)}
    groups = [block(0, kept=kept), block(1), block(2, offloaded=False)]
    sentences = advise(report(*groups, outside={}))
    again = advise(report(block(0, kept=dict(reversed(kept.items()))), *groups[1:], outside={}))
    assert sentences == again
    reasons = [re.findall(r'"(.*)"', sentence)[0] for sentence in sentences]
    assert reasons == [reason.value for reason in (Reason.MARKED, Reason.LAYOUT, Reason.SMALL)]
    assert '"saved outside' in advise(report(*groups, outside=outside))[0]
