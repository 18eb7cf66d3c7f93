"""The data of library_rules: its words mean something, and each row stands for a function."""

import importlib
import importlib.util
import re

import graph_libraries  # noqa: F401 - quietly
import pytest

from amp_patch.casting import rules as cast_rules
from amp_patch.casting.autocast_questions import CAST_BY_RULES
from amp_patch.casting.libraries import library_rules
from amp_patch.casting.libraries.library_casts import PLACES, WORDS
from amp_patch.casting.libraries.library_rules import REASONS, RULES
from amp_patch.patching import resolve_in

pytestmark = pytest.mark.usefixtures("graph_libraries_imported")
ROWS = [(module, name, *row) for module, names in RULES.items() for name, row in names.items()]
#: What `amp_patch[graphs]` brings, and torchvision where it is at hand; the others must be compiled
#: for the torch at hand.
INSTALLED = ["dgl", "torch_geometric"]
if importlib.util.find_spec("torchvision"):
    INSTALLED.append("torchvision")


@pytest.mark.parametrize(("module", "name", "casts", "in_float", "reason"), ROWS)
def test_a_row_says_known_words_and_why(
    module: str, name: str, casts: str, in_float: str, reason: str
) -> None:
    assert casts in WORDS
    assert casts not in ("frames", "rows") or module.startswith("dgl.")
    assert in_float in PLACES
    assert in_float != "hubs" or module.startswith("dgl.")
    assert reason in REASONS


def test_what_is_said_elsewhere_of_the_same_functions_agrees() -> None:
    asking = {module.partition(".")[0] for module, *_, reason in ROWS if reason == "autocast"}
    assert asking == CAST_BY_RULES
    listed = {op for op, rule in cast_rules.LISTED_WITHOUT_HALF.items() if rule == "no_half"}
    without_kernel = {name for _, name, *_, reason in ROWS if reason == "no kernel anywhere"}
    assert without_kernel == {op.removeprefix("linalg_") for op in listed}


def test_each_word_is_explained() -> None:
    entries, _, places = library_rules.__doc__.partition("\n\nThe second word: ")
    heads = re.findall(r'^- ("[^:]*):', entries, re.MULTILINE)
    explained = {word for head in heads for word in re.findall(r'"(\w+)"', head)}
    # "float_on_cpu" is a word of `rules` alone; "cell" is explained beside "product"
    assert explained == WORDS.keys() - {"float_on_cpu", "cell"}
    assert set(re.findall(r'"(\w+)"', places.partition("\n\n")[0])) == PLACES.keys()


@pytest.mark.parametrize(
    ("module", "name"), [row[:2] for row in ROWS if row[0].partition(".")[0] in INSTALLED]
)
def test_a_row_names_what_the_installed_version_has(module: str, name: str) -> None:
    found = importlib.import_module(module)
    if not name.startswith("*"):
        assert callable(resolve_in(found, name)[2])
