import ast
import json
import marshal
from collections import Counter
from functools import cache
from pathlib import Path

import mutants
import mutate
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def test_every_wait_of_the_engine_has_a_tag() -> None:
    assert mutants.untagged(SOURCE) == []


def test_a_wait_without_a_tag_is_found(tmp_path: Path) -> None:
    engine = tmp_path / "actoffload" / "engine"
    engine.mkdir(parents=True)
    (engine / "some.py").write_text(
        "def wait(self):\n"
        "    backend.wait(a, b)\n"
        "    self.wait(a, b)  # [wait: tagged]\n"
        "    # [wait: tagged above]\n"
        "    transfers.join(a, b)\n"
        "    transfers.join(a, b)  # a comment\n"
        "    print(', '.join(names))\n"
    )
    assert mutants.untagged(tmp_path) == [
        "some.py:2: backend.wait(a, b)",
        "some.py:6: transfers.join(a, b)  # a comment",
    ]


def test_tags_name_one_place_each() -> None:
    names = Counter(mutant.name for mutant in mutants.tagged(SOURCE))
    assert [name for name, count in names.items() if count > 1] == []
    assert sum(name.startswith("wait: ") for name in names) > 10
    assert sum(name.startswith("guard: ") for name in names) > 40


def test_every_tag_has_a_test_that_exists() -> None:
    killers = json.loads(mutate.KILLERS.read_text(encoding="utf-8"))
    assert killers.keys() == {mutant.name for mutant in mutants.tagged(SOURCE)}
    for name, killer in killers.items():
        path, _, test = killer.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        assert test.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_every_mutant_is_a_program_that_differs_from_the_source() -> None:
    found = list(mutants.tagged(SOURCE))

    @cache
    def compiled(path: str) -> bytes:
        return marshal.dumps(compile((SOURCE / path).read_text(encoding="utf-8"), path, "exec"))

    for mutant in found:
        assert marshal.dumps(compile(mutant.text, mutant.path, "exec")) != compiled(mutant.path), mutant.name
    assert len({(mutant.path, mutant.text) for mutant in found}) == len(found)


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        ("if a:  # [guard: x]\n    b()\n", "if False:  # [guard: x]\n    b()\n"),
        ("if a:  # [guard: x -> True]\n    b()\n", "if True:  # [guard: x -> True]\n    b()\n"),
        ("if a:\n    b()\nelif c:  # [guard: x]\n    d()\n", "if a:\n    b()\nelif False:  # [guard: x]\n    d()\n"),
        ("# [guard: x -> removed]\nif a:\n    b()\nc()\n", "# [guard: x -> removed]\npass\nc()\n"),
        ("a(b,\n  c)  # [wait: x]\n", "pass  # [wait: x]\n"),
        ("d = (\n    a\n    and b  # [guard: x]\n)\n", "d = (\n    a\n    and True  # [guard: x]\n)\n"),
        ("d = (\n    a\n    or b  # [guard: x]\n)\n", "d = (\n    a\n    or False  # [guard: x]\n)\n"),
        ("d = a if b else c  # [guard: x -> True]\n", "d = a if True else c  # [guard: x -> True]\n"),
        ("d = a  # [guard: x -> False]\n", "d = False  # [guard: x -> False]\n"),
        ("d = a  # [guard: x]\n", "pass  # [guard: x]\n"),
        ("d = a  # [guard: known]\n", "d = 'µ'  # [guard: known]\n"),
        ("while a:  # [guard: known condition]\n    b()\n", "while not a:  # [guard: known condition]\n    b()\n"),
    ],
)
def test_what_a_tag_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, broken: str) -> None:
    every = {"guard: known": "d = 'µ'", "guard: known condition": "not a"}
    monkeypatch.setattr(mutants, "INSTEAD", {k: v for k, v in every.items() if f"[{k}]" in source})
    (tmp_path / "some.py").write_text(source)
    (mutant,) = mutants.tagged(tmp_path)
    assert mutant.text == broken


def test_several_tags_may_stand_above_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "INSTEAD", {})
    (tmp_path / "some.py").write_text("# [guard: x -> True]\n# [guard: y -> removed]\n# reason\na = b\n")
    first, second = mutants.tagged(tmp_path)
    assert (first.name, first.text.splitlines()[-1]) == ("guard: x", "a = True")
    assert (second.name, second.text.splitlines()[-1]) == ("guard: y", "pass")


def test_a_replacement_without_a_tag_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "INSTEAD", {"guard: gone": "pass"})
    with pytest.raises(LookupError, match="guard: gone"):
        list(mutants.tagged(tmp_path))


def test_a_reference_without_a_replacement_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "INSTEAD", {})
    (tmp_path / "some.py").write_text("a = b  # [keep: x]\n")
    with pytest.raises(LookupError, match=r"\[keep: x\] of some\.py"):
        list(mutants.tagged(tmp_path))
