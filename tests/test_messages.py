"""docs/messages.md: each error and warning of the source is there, with its page.

``python tests/test_messages.py`` writes it: links stay as they are, and a new message gets the page
of its file by PAGES. Look whether that is the right one.
"""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path

import pytest
from source_messages import VALUE, Message, is_message
from source_messages import messages as read

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "messages.md"
ENTRY = re.compile(r"^### (.+)\n\n> (.+)\n\n(.+)\. See \[.+?\]\((.+?)\)\.$", re.MULTILINE)
#: beginning of a file's path below amp_patch/ -> the page of its messages; the longest one counts
PAGES = {
    "__init__.py": "plain-pytorch.md#where-the-lines-go",
    "apex/": "apex.md",
    "apex/environment.py": "enable.md#when-it-is-refused",
    "apex/packages/": "apex.md#what-is-supplied",
    "arguments/": "api.md",
    "backward_passes.py": "gradients.md#train-several-models-losses-and-optimizers",
    "common/call_site.py": "limits.md#in-the-step",
    "common/rules_file.py": "tune.md#the-rules-file",
    "casting/": "rules.md",
    "casting/libraries/half_saving.py": "graphs.md#what-is-cast",
    "cuda_graph.py": "compile.md#capture-the-step-in-a-cuda-graph",
    "debug/": "diagnose.md",
    "debug/logs.py": "logging.md",
    "debug/sinks.py": "logging.md",
    "distributed/": "several-gpus.md#what-is-refused",
    "distributed/pending_sums.py": "several-gpus.md#averages-by-hand",
    "gradients/": "gradients.md",
    "initialization.py": "rules.md#give-a-function-a-rule",
    "kernels/": "api.md#kernels",
    "mistakes/": "mistakes.md",
    "mistakes/averages.py": "mistakes.md#an-average-of-half-weights",
    "mistakes/clipping.py": "mistakes.md#clipping-or-stepping-inside-the-block",
    "mistakes/conversions.py": "mistakes.md#modelhalf-after-initialize",
    "mistakes/dtype_mends.py": "mistakes.md#dtypes-that-do-not-match-at-o2-o3-and-o5",
    "mistakes/dtype_notes.py": "mistakes.md#dtypes-that-do-not-match-at-o2-o3-and-o5",
    "mistakes/grad_scaler.py": "mistakes.md#a-gradscaler-is-left-in-the-script",
    "mistakes/early_wrapping.py": "several-gpus.md#what-is-refused",
    "mistakes/late_sharding.py": "several-gpus.md#what-is-refused",
    "mistakes/lone_overflows.py": "several-gpus.md#skipped-steps-loss-scales",
    "mistakes/master_inputs.py": "gradients.md#differentiate-by-what-the-optimizer-holds",
    "mistakes/running_statistics.py": "evaluate.md#running-statistics-in-float16",
    "mistakes/scaler_stages.py": "mistakes.md#a-gradscaler-is-left-in-the-script",
    "mistakes/split_backward.py": "several-gpus.md#what-is-refused",
    "mistakes/strange_optimizers.py": "mistakes.md#an-optimizer-that-initialize-never-got",
    "mistakes/unprepared.py": "mistakes.md#an-optimizer-that-initialize-never-got",
    "mistakes/wide_models.py": "mistakes.md#a-model-in-float64",
    "optimizers/half_eps.py": "pick-a-level.md#what-each-level-asks-of-a-script",
    "optimizers/": "compile.md#step-in-one-pass",
    "session.py": "checkpoints.md",
    "scaling/": "overflow.md#how-the-loss-scale-moves",
    "step/": "gradients.md",
    "step/closure.py": "overflow.md#the-first-steps-are-skipped",
    "step/reached_masters.py": "mistakes.md#reading-pgrad-at-o2-and-o5",
    "step/lookup.py": "plain-pytorch.md",
    "step/loss_scaling.py": "overflow.md#the-first-steps-are-skipped",
    "tools/": "sweep.md",
    "tools/check/": "check.md",
    "tools/compare/": "compare.md",
    "tools/disable.py": "enable.md",
    "tools/doctor/": "doctor.md",
    "tools/enable.py": "enable.md",
    "tools/run_report.py": "summary.md#at-the-end-of-a-run",
    "requested_level.py": "levels.md",
    "tools/run.py": "summary.md#at-the-end-of-a-run",
    "tools/sweep/": "sweep.md",
    "tools/tune/": "tune.md",
    "user_functions.py": "rules.md#give-a-function-a-rule",
    "weights/": "limits.md#at-o2-o3-and-o5",
    "weights/kept_inputs.py": "rules.md#leave-an-argument-of-the-model-alone",
    "weights/lost_writes.py": "limits.md#write-to-weights",
    "weights/module_rules.py": "tune.md#the-rules-file",
    "weights/out_of_range.py": "limits.md#keep-buffers",
    "weights/state_dicts.py": "limits.md#save-pickle-or-copy",
}
INTRODUCTION = """\
# Messages

Each error and warning of amp_patch, and the page that explains it. Where a message takes in a value
of yours, "…" stands here. To find a message, paste it into the search box of this site.

An error states the rule, what was received, and the call that mends it. What apex printed is
printed, where `verbosity` is above 0. At 2, so is a line for each tensor that O1 and O4 cast, such
as `Float->Half (linear)`. Everything else goes through `warnings`, and through `logging` by the
logger `amp_patch`.
"""
messages = functools.cache(read)
KINDS = {"warning": "A warning", "printed": "Printed", "note": "A note on an error"}


def escaped(text: str) -> str:
    r"""Return a text as Markdown that shows it: ``a_b`` is ``a\_b``."""
    return re.sub(r"([\\`*_\[\]<>#|{}$~])", r"\\\1", text)


def heading(text: str) -> str:
    """Return the rule that a message begins with, or all of it where that says little."""
    first = re.split(r"; got |; call |\. [A-Z]|: …", text)[0].rstrip(".;")
    return first if is_message(first) and len(first.split()) >= 4 else text


def links() -> dict[str, str]:
    """Return the link of each message on the page."""
    found = ENTRY.findall(PAGE.read_text(encoding="utf-8"))
    return {re.sub(r"\\(.)", r"\1", text): link for _, text, _, link in found}


def page_of(file: str) -> str:
    """Return the page of a file's messages.

    Raises:
        KeyError: `PAGES` has none.
    """
    below = file.removeprefix("amp_patch/")
    return PAGES[max((start for start in PAGES if below.startswith(start)), key=len, default=below)]


def title_of(link: str) -> str:
    """Return the title of the page that a link leads to."""
    return (DOCS / link.partition("#")[0]).read_text(encoding="utf-8").partition("\n")[0][2:]


def entry(message: Message, link: str) -> str:
    kind = KINDS.get(message.kind, f"Raised as {message.kind}")
    if "warning" in message.kind and message.kind not in KINDS:
        kind = "Logged as a warning"
    return (
        f"### {escaped(heading(message.text))}\n\n> {escaped(message.text)}\n\n"
        f"{kind}. See [{title_of(link)}]({link}).\n"
    )


def page(known: dict[str, str]) -> str:
    """Return the page: messages by the page that they lead to, in the site's order of pages."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    order = re.findall(r"^(?:.+ <)?([\w-]+)>?$", index, re.MULTILINE)
    by_page: dict[str, dict[str, str]] = {name: {} for name in order}
    for message in messages():
        link = known.get(message.text) or page_of(message.file)
        by_page[link.partition(".md")[0]][message.text] = entry(message, link)
    sections = [
        f"## {title_of(name + '.md')}\n\n" + "\n".join(entries[text] for text in sorted(entries))
        for name, entries in by_page.items()
        if entries
    ]
    return "\n".join(["---\ntocdepth: 2\n---\n", INTRODUCTION, *sections])


def test_every_message_of_the_source_is_on_the_page_and_no_other() -> None:
    of_source = {message.text for message in messages()}
    assert of_source == set(links()), "run: python tests/test_messages.py, and look at the links"


def test_a_message_of_a_file_without_a_page_is_filed_nowhere() -> None:
    assert all(page_of(message.file) for message in messages())
    with pytest.raises(KeyError, match="new_room/module"):
        page_of("amp_patch/new_room/module.py")


def test_the_page_is_as_it_is_written() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(links()), "run: python tests/test_messages.py"


def test_no_message_has_an_article_before_a_value() -> None:
    """Which of "a" and "an" is right depends on the value: "an optimizer of type AdamW" is."""
    article = re.compile(r'\b[Aa]n? (?:"\s*f")?\{\w')
    package = DOCS.parent / "amp_patch"
    found = [
        f"{path.relative_to(package)}: {match[0]}"
        for path in sorted(package.rglob("*.py"))
        for match in article.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.fixture
def package(tmp_path: Path):
    def read_source(source: str) -> list[tuple[str, str]]:
        folder = tmp_path / "package"
        folder.mkdir()
        (folder / "module.py").write_text(textwrap.dedent(source))
        return [(message.kind, message.text) for message in read(folder)]

    return read_source


def test_a_message_is_put_together_from_its_parts(package) -> None:
    source = """
        RULE = "scales must be above 0"

        def check(value, **options):
            mend = f"call it with {value}."
            raise ValueError(f"{RULE}; got {value!r}{options}; " + mend)
    """
    assert package(source) == [
        ("ValueError", f"scales must be above 0; got {VALUE}; call it with {VALUE}.")
    ]


def test_a_message_of_a_function_and_each_of_a_condition_is_found(package) -> None:
    source = """
        def absent(name):
            if name:
                return ImportError(f"there is no {name} any more")
            return ImportError("there is nothing to import")

        def get(name, is_bad):
            raise absent(name)

        def tell(is_bad):
            warn_once("this is a bad thing" if is_bad else "this is a good thing")
    """
    assert sorted(text for _, text in package(source)) == [
        "there is no … any more",
        "there is nothing to import",
        "this is a bad thing",
        "this is a good thing",
    ]


def test_a_message_has_the_texts_that_its_function_is_called_with(package) -> None:
    source = """
        def number(name, given):
            raise TypeError(f"{name} must be a number; got {given}")

        def check(a, b):
            number("max_norm", a)
            number("norm_type", b)
    """
    assert package(source) == [
        ("TypeError", "max_norm must be a number; got …"),
        ("TypeError", "norm_type must be a number; got …"),
    ]


def test_a_message_that_is_passed_on_is_found(package) -> None:
    source = """
        class Guard:
            def check(self, value):
                self._tell(value, f"a value must be small; got {value}")

            def _tell(self, value, message):
                warn_once(message)
    """
    assert package(source) == [("warning", "a value must be small; got …")]


def test_a_message_has_a_text_for_each_choice_of_fixed_words_in_it(package) -> None:
    source = """
        def told(scale, fell, name):
            change = "reducing the scale" if fell else "keeping the scale"
            return f"a step was skipped, {change} to {scale} of {name or 'all'}"

        def skip(scale):
            reason = told(scale, True, "")
            announce(reason)
    """
    assert package(source) == [
        ("printed", "a step was skipped, keeping the scale to … of …"),
        ("printed", "a step was skipped, reducing the scale to … of …"),
    ]


def test_what_has_no_words_of_its_own_is_no_message(package) -> None:
    source = """
        def fail(error, loop):
            for text in loop:
                raise RuntimeError(text) from error
            raise SystemExit(0)
    """
    assert package(source) == []


if __name__ == "__main__":
    PAGE.write_text(page(links()), encoding="utf-8")
