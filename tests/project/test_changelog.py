"""The changelog's open section consists of fragments: one sentence each."""

import re

from tests.support.ranks.scripts import ROOT

FRAGMENTS = sorted((ROOT / "changelog.d").iterdir())


def test_a_fragment_is_one_sentence_of_at_most_25_words_of_a_known_kind():
    assert FRAGMENTS
    for path in FRAGMENTS:
        text = path.read_text()
        assert re.fullmatch(r"\+[a-z0-9-]+\.(added|changed|fixed)\.md", path.name), path.name
        assert len(text.split()) <= 25, path.name
        prose = re.sub(r"`[^`]*`|\([^)]*\)|\d\.\d", "x", text)
        assert re.fullmatch(r"[^.!?]+\.\n", prose), path.name


def test_links_of_fragments_lead_somewhere():
    """Links are those of CHANGELOG.md, which lies at the root."""
    for path in FRAGMENTS:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert (ROOT / target).exists(), (path.name, target)
