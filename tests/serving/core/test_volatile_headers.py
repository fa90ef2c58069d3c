"""`HeaderCanonicaliser`: what changes at the head of a prompt goes, and nothing else."""

import random
import re

import pytest

from serving.core.volatile_headers import BILLING, HeaderCanonicaliser, VolatileHeader

LINE = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};\n"
REST = "You are an agent.\nx-anthropic-billing-header: cch=12345; (quoted)\n"


def test_two_turns_begin_alike():
    freeze, strip = HeaderCanonicaliser(), HeaderCanonicaliser(mode="strip")
    rng = random.Random(0)
    turns = [LINE.format(f"{rng.randrange(16**5):05x}") + REST for _ in range(5)]
    assert {freeze.text(turn) for turn in turns} == {LINE.format("00000") + REST}
    assert {strip.text(turn) for turn in turns} == {REST}
    assert (freeze.changed, strip.changed) == (5, 5)
    again = freeze.text(LINE.format("00000") + REST)
    assert again == LINE.format("00000") + REST
    assert freeze.changed == 5


@pytest.mark.parametrize("mode", ["freeze", "strip"])
@pytest.mark.parametrize("text", ["", "\n", REST, " " + LINE, "You\r\n" + LINE, "x-anthropic-billing-header"])
def test_other_texts_stay(mode, text):
    canonical = HeaderCanonicaliser(mode=mode)
    assert canonical.text(text) == text
    assert canonical.changed == 0


def test_messages_change_in_the_first_system_message_only():
    canonical = HeaderCanonicaliser(mode="strip")
    line = LINE.format("abcde")
    user = {"role": "user", "content": line}
    parts = [{"type": "text", "text": line + REST, "cache_control": {}}, {"type": "text", "text": line}]
    messages = [{"role": "system", "content": parts, "name": "n"}, user]
    result = canonical.messages(messages)
    assert result == [{"role": "system", "content": [{**parts[0], "text": REST}, parts[1]], "name": "n"}, user]
    assert parts[0]["text"] == line + REST  # the client's own message is not touched
    assert canonical.messages([{"role": "developer", "content": line}]) == [{"role": "developer", "content": ""}]
    assert canonical.changed == 2
    for untouched in ([], [user], [{"role": "system", "content": None}], [{"role": "system", "content": []}], [{}]):
        assert canonical.messages(untouched) == untouched
    assert canonical.changed == 2


def test_own_headers_may_be_given():
    mine = VolatileHeader("# session", re.compile(r"id (\d+)"))
    canonical = HeaderCanonicaliser([BILLING, mine])
    assert canonical.text("# session id 77 of 9\n" + LINE.format("1") + "id 5") == (
        "# session id 00 of 9\n" + LINE.format("0") + "id 5"
    )


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="mode='drop'"):
        HeaderCanonicaliser(mode="drop")
    with pytest.raises(ValueError, match="2 groups, not one"):
        VolatileHeader("a", re.compile("(a)(b)"))
    for prefix in ("", "a\nb"):
        with pytest.raises(ValueError, match="beginning of one line"):
            VolatileHeader(prefix, re.compile("(a)"))
