"""The memory column and the order of the gallery, and the alternatives of its figures."""

from pathlib import Path


def test_the_order_lists_every_example_and_nothing_else():
    from recordings import TEACHING_ORDER

    examples = Path(__file__).parents[2] / "examples"
    assert sorted(TEACHING_ORDER.ordered_list_start) == sorted(path.name for path in examples.glob("[!_]*.py"))


def test_every_figure_of_an_example_has_a_description():
    from recordings import FIGURES

    examples = {
        path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "examples").glob("*.py")
    }
    assert {name: len(of) for name, of in FIGURES.items()} == {
        name: text.count(".savefig(") for name, text in examples.items()
    }


def test_every_example_leads_to_guides_that_exist():
    from recordings import FIGURES, GUIDES, add_guides

    guides = Path(__file__).parents[2] / "docs" / "guide"
    assert GUIDES.keys() == FIGURES.keys()
    assert all((guides / f"{name}.md").is_file() for names in GUIDES.values() for name in names)
    page = add_guides("text\n\n.. rst-class:: sphx-glr-timing\n", "basic")
    assert page.startswith("text\n\n**Further reading:** :doc:`/guide/default_scheduling`")
