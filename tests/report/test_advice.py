"""What a report advises: the right sentence for what is wrong, with its numbers, and none where nothing is."""

import pytest
from report_samples import attribute

from actoffload.report import GroupReport, HeldStorage, Holder, Reason, Report
from actoffload.report.build import DOING, INPUT, advise

MIB = 2**20


def block(index: int, *, offloaded: bool = True, **more: object) -> GroupReport:
    numbers = {
        "calls_offloaded": int(offloaded),
        "bytes_saved": 300 * MIB,
        "bytes_offloaded": 300 * MIB if offloaded else 0,
        "reloaded_ahead": 6 if offloaded else 0,
        "bytes_reloaded": 300 * MIB if offloaded else 0,
    }
    return GroupReport(f"layers.{index}", "Block", **{**numbers, **more})


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


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kept": {Reason.PARAMETER: (9, 900 * MIB), Reason.BUFFER: (1, MIB)}},
        {"kept": {Reason.DEVICE: (4, 900 * MIB)}},  # of no memory of this one
        {"calls_offloaded": 0, "bytes_offloaded": 0, "recomputed": True, "bytes_recomputed": 200 * MIB},
        {"stall_seconds": 0.0004},
    ],
)
def test_if_all_is_well_there_is_nothing_to_change(more):
    groups = [block(0, **more), block(1), block(2), block(3, offloaded=False)]
    known = report(*groups, step_seconds=0.4, seconds=0.3, baseline_seconds=0.298)  # less than 1 %
    assert only(advise(known)) == "Nothing to change."


def test_a_pass_that_is_longer_than_without_is_never_well():
    sentence = only(advise(report(seconds=0.11, baseline_seconds=0.1)))
    assert_has(sentence, "A pass takes 10.0 % longer", "larger memory_budget")
    stalled_too = advise(stalled(seconds=0.11, baseline_seconds=0.1))
    assert_has(stalled_too[0], "A pass takes 10.0 % longer")
    assert_has(stalled_too[1], "Compute stalled", ": raise memory_budget, if it is set.")
    assert only(advise(report(seconds=0.11, baseline_seconds=0.1, times=False))).startswith("Nothing to change")


def test_before_the_first_forward_one_sentence_says_so():
    sentence = only(advise(Report()))
    assert_has(sentence, "No group has run")
    assert only(advise(Report((block(0, calls=0),)))) == sentence


# Kept on the device


def kept_for(reason: Reason, nbytes: int, count: int = 4, **more: object) -> Report:
    groups = tuple(block(k, offloaded=k < 3, kept={reason: (count, nbytes)} if k == 0 else {}) for k in range(4))
    if reason is Reason.OUTSIDE:
        return report(outside={reason: (count, nbytes)}, **more)
    return report(*groups, **more)


@pytest.mark.parametrize("reason", DOING)
def test_a_large_share_for_a_reason_is_named_with_what_to_do(reason):
    sentence = only(advise(kept_for(reason, 300 * MIB)))
    share = "25.0 %" if reason is Reason.HOST_FULL else "20.0 %"  # those are among the bytes saved
    beginning = f'{share} of the activations (300.0 MiB in 4 tensors) were kept for the reason "{reason.value}": '
    assert sentence.startswith(beginning)
    assert len(sentence) > len(beginning) + 20


@pytest.mark.parametrize(("nbytes", "said"), [(99 * MIB, False), (101 * MIB, True)])
def test_only_a_tenth_and_more_of_what_is_offloaded_is_worth_a_sentence(nbytes, said):
    assert ('"smaller than the limit"' in " ".join(advise(kept_for(Reason.SMALL, nbytes)))) is said


def test_small_tensors_get_a_limit_with_which_most_of_their_bytes_are_offloaded():
    sentence = only(advise(kept_for(Reason.SMALL, 300 * MIB, count=400)))  # 768 KiB each
    assert "they have 768.0 KiB on average" in sentence
    assert f"min_bytes={384 * 1024}) " in sentence  # at most half of the mean
    tiny = only(advise(kept_for(Reason.SMALL, 300 * MIB, count=300 * MIB)))
    assert "min_bytes=1) " in tiny


def test_a_full_host_is_always_named_with_the_missing_bytes():
    sentence = only(advise(kept_for(Reason.HOST_FULL, 3 * MIB + 1, host_bytes_high_water=100 * MIB)))
    assert f"raise max_host_bytes, if it is set, to at least {104 * MIB} (104.0 MiB)." in sentence
    held = only(advise(kept_for(Reason.HOST_FULL, MIB, host_bytes=106 * MIB, host_bytes_high_water=100 * MIB)))
    assert (
        f"raise max_host_bytes, if it is set, to at least {108 * MIB} (108.0 MiB)." in held
    )  # more than any limit with 106 held


# Not freed


def not_freed(nbytes: dict[int, int]) -> list[GroupReport]:
    """Return four groups, of some of which bytes are not freed."""
    return [block(k, offloaded=k < 3, bytes_not_freed=nbytes.get(k, 0)) for k in range(4)]


@pytest.mark.parametrize(("nbytes", "said"), [(119 * MIB, False), (121 * MIB, True)])
def test_an_input_of_the_model_is_named_only_if_it_is_large(nbytes, said):
    held = HeldStorage("layers.0", nbytes, (INPUT,))
    sentence = only(advise(report(*not_freed({0: nbytes}), held=(held,))))
    assert ("because of the input of the model: inputs are freed" in sentence) is said
    assert sentence.startswith("Nothing to change") is not said


def test_what_refers_to_memory_that_is_not_freed_is_named_with_its_share():
    held = HeldStorage("layers.1", 123 * MIB, (attribute("cache", "encoder (Encoder)"), Holder("global", "x", "a")))
    sentence = only(advise(report(*not_freed({1: 123 * MIB}), held=(held,))))
    assert_has(sentence, "41.0 %", "layers.1", "123.0 MiB of 300.0 MiB", *map(str, held.holders))


def test_equal_holders_of_many_groups_are_one_sentence():
    held = tuple(HeldStorage(f"layers.{k}", 30 * MIB, (attribute("seen", f"layers.{k} (Block)"),)) for k in range(3))
    sentence = only(advise(report(*not_freed(dict.fromkeys(range(3), 30 * MIB)), held=held)))
    assert_has(sentence, "10.0 %", "3 groups (layers.0 ... 2)", "90.0 MiB of 900.0 MiB", str(held[0].holders[0]))
    assert "other groups" in sentence


def test_without_a_record_and_without_a_holder_the_sentence_says_so():
    held = (HeldStorage("layers.0", 40 * MIB), HeldStorage("layers.1", 20 * MIB, ()))
    unnamed, unseen = advise(report(*not_freed({0: 40 * MIB, 1: 20 * MIB}), held=held))
    assert_has(unnamed, "13.3 %", "layers.0", "40.0 MiB of 300.0 MiB", "handle.recording()")
    assert_has(unseen, "6.7 %", "layers.1", "20.0 MiB of 300.0 MiB", "autograd of another graph, a library, or C++")


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
    held = HeldStorage("layers.1", 30 * MIB, (Holder(kind, path, "the model"),))
    assert words in only(advise(report(*not_freed({1: 30 * MIB}), held=(held,))))


# Reloads on demand, stalls, nothing offloaded


def test_reloads_on_demand_name_their_groups_and_the_likely_reason():
    groups = [block(0), block(1, reloaded_on_demand=2, reloaded_ahead=4), block(2), block(3, offloaded=False)]
    assert_has(only(advise(report(*groups))), "2 of 18 reloads", "11.1 %", "layers.1", "execution order")


def stalled(longest: float = 0.01, **more: object) -> Report:
    groups = [block(k, offloaded=k < 3, stall_seconds=longest * (k == 1) + longest / 2 * (k == 2)) for k in range(4)]
    return report(*groups, step_seconds=0.1, **more)


def test_measured_stalls_are_named_from_half_a_percent_on():
    assert_has(only(advise(stalled())), "15.0 %", "layers.1 (10.00 ms)", ": offload fewer groups.")
    assert only(advise(stalled(0.0003))).startswith("Nothing to change")  # 0.45 %
    assert only(advise(stalled(0.0004))).startswith("Compute stalled")  # 0.6 %
    assert only(advise(stalled(times=False))).startswith("Nothing to change")


def test_nothing_is_offloaded():
    none = tuple(block(k, offloaded=False) for k in range(3))
    assert_has(only(advise(report(*none))), "None of 3 groups is offloaded", "with layers")
    assert only(advise(report(*none, because="All fits."))).startswith("Nothing to change")
    assert_has(only(advise(report(*none, because="All fits.", times=False))), "None of 3 groups")
