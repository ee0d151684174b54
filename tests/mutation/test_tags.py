import ast
import json
import marshal
from collections import Counter
from functools import cache
from pathlib import Path

import mutants
import mutate

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def test_every_wait_of_the_engine_has_a_tag() -> None:
    assert mutants.untagged(SOURCE) == []


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
