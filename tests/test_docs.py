"""The pages of docs/: their snippets run, and the files that they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/**/*.md"))
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def named_files(text: str) -> list[str]:
    """Return the paths in backticks, from the root of the repository."""
    return re.findall(r"`((?:amp_patch|csrc|tests|examples|docs)/[\w./-]*)`", text)


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize(
    "page",
    [ROOT / "docs" / "diagnose.md", ROOT / "docs" / "summary.md"],
    ids=lambda page: page.name,
)
def test_the_snippets_of_a_page_run_one_after_the_other(amp, page: Path) -> None:
    namespace = {"__name__": "__main__"}
    for source in snippets(page):
        exec(compile(source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    missing = [
        name for name in named_files(page.read_text(encoding="utf-8")) if not (ROOT / name).exists()
    ]
    assert not missing


def test_a_file_that_does_not_exist_is_seen() -> None:
    assert named_files("see `amp_patch/step/skip.py` and `step.skip`") == ["amp_patch/step/skip.py"]
    assert len(named_files(ARCHITECTURE)) > 25
