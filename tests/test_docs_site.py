"""The site: it is built without a warning, and a browser reads and searches it from disk."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from pages import README, ROOT, text_of
from support import PROFILE, made_once
from torch import nn


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as the README says; -W makes a warning an error, of a broken link too."""
    (options,) = re.findall(r"sphinx-build (-W docs)\s", text_of(README))

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "sphinx", "-q", "--keep-going", *options.split(), folder]
        done = processes.run(command, cwd=ROOT)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")

    return made_once(tmp_path_factory, "site", build)


@pytest.fixture
def page(site: Path, browser: Any) -> Iterator[Any]:
    """Open a page; what it asks for must lie on the disk."""
    page = browser.new_page(reduced_motion="reduce")  # or each jump to a message takes 2 s
    page.set_default_timeout(120_000)  # of milliseconds: a machine may be busy
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    yield page
    page.close()
    assert asked
    assert [url for url in asked if not url.startswith(site.as_uri())] == []


def test_every_page_is_shown_without_the_network(site: Path, page: Any) -> None:
    """The ordinary run opens every third page: all share the template, and are built."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    pages = sorted(set(site.glob("*.html")) - {site / "search.html"})
    assert len(pages) > 25
    for path in pages if PROFILE == "nightly" else pages[::3]:
        page.goto(path.as_uri())
        assert page.locator("h1").first.inner_text(), path
        broken = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
        assert page.evaluate(broken) == [], path
    assert said == []
    scrolls = "getComputedStyle(document.documentElement).scrollBehavior"
    assert page.evaluate(scrolls) == "auto"  # as whoever wants no motion asked


def search(site: Path, page: Any, query: str) -> None:
    """Type a query into the search box of the first page, and enter it."""
    page.goto((site / "index.html").as_uri())
    page.get_by_placeholder("Search").fill(query)
    page.get_by_placeholder("Search").press("Enter")


def half_model(amp: Any) -> None:
    amp.initialize(nn.Linear(4, 2).half(), verbosity=0)


def unknown_level(amp: Any) -> None:
    amp.initialize(nn.Linear(4, 2), opt_level="o1", verbosity=0)


def strange_optimizer(amp: Any) -> None:
    model = nn.Linear(4, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    other = torch.optim.Adam(nn.Linear(3, 3).parameters())
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), other):
        pass


def no_number(amp: Any) -> None:
    amp.clip_grad_norm_(torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1), "1.0")


@pytest.mark.slow(instead="every page of the site")
@pytest.mark.parametrize("mistake", [half_model, unknown_level, strange_optimizer, no_number])
def test_the_search_finds_a_message_as_it_was_raised(
    site: Path, page: Any, amp: Any, mistake: Callable[[Any], None]
) -> None:
    with pytest.raises(Exception, match="amp") as raised:
        mistake(amp)
    search(site, page, str(raised.value))
    first = page.locator("#messages a").first
    pieces = [re.escape(piece) for piece in first.inner_text().split("…")]
    assert re.fullmatch(".*".join(pieces), str(raised.value), re.DOTALL)
    first.click()
    answer = page.locator(f"section{page.evaluate('location.hash')} a[href*='.html']")
    answer.first.click()
    assert page.url.partition("#")[0] != (site / "messages.html").as_uri()


@pytest.mark.slow(instead="a search for a loss that is NaN")
def test_the_search_finds_what_torch_says_of_two_dtypes(site: Path, page: Any, amp: Any) -> None:
    model = amp.initialize(nn.Linear(4, 2), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="dtype") as raised:
        model.forward(torch.ones(1, 4))
    search(site, page, f"RuntimeError: {raised.value}")
    page.locator("#messages a").first.click()
    assert page.url.startswith((site / "mistakes.html").as_uri() + "#dtypes-that-do-not-match")


def test_the_page_of_all_messages_is_not_the_first_that_a_search_finds(
    site: Path, page: Any
) -> None:
    search(site, page, "loss is nan")
    page.locator("#search-results a", has_text="Messages").wait_for()
    assert "Overflow" in page.locator("#search-results .search a").first.inner_text()


@pytest.mark.slow(instead="every page of the site")
@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("AveragedModel", "save and resume"),
        pytest.param("save the three states", "save and resume", marks=pytest.mark.slow),
        pytest.param("attention mask", "Common mistakes", marks=pytest.mark.slow),
        pytest.param("keep a layer in float32", "Rules and regions", marks=pytest.mark.slow),
        ("choose a level bf16", "Pick a level"),
    ],
)
def test_the_search_finds_words_that_are_no_message(
    site: Path, page: Any, words: str, title: str
) -> None:
    search(site, page, words)
    page.locator("#search-results a", has_text=title).first.wait_for()
    assert page.locator("#messages").count() == 0
