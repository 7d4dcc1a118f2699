"""`dltta help TOPIC`."""

import re

import pytest

from dltta.cli.help import topics
from streams import typed
from walking import COMMANDS

TOPICS = topics()


def test_without_a_topic_all_are_listed(monkeypatch, capsys):
    code, out, _ = typed(monkeypatch, capsys, "help")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[: len(TOPICS)]] == list(TOPICS)
    assert {"start", "shadow", "exit-codes"} <= set(TOPICS)


def test_a_topic_is_shown_as_its_file_has_it(monkeypatch, capsys):
    code, out, _ = typed(monkeypatch, capsys, "help", "shadow")
    assert code == 0
    assert out.startswith("shadow - see what adaptation would do")
    assert "--mode frozen" in out


def test_a_misspelled_topic_is_one_line_with_the_nearest(monkeypatch, capsys):
    code, out, err = typed(monkeypatch, capsys, "help", "shadov")
    assert (code, out) == (2, "")
    assert err == "error: there is no topic 'shadov'; did you mean 'shadow'?\n"


def test_the_name_of_a_command_leads_to_its_help(monkeypatch, capsys):
    code, out, _ = typed(monkeypatch, capsys, "help", "adapt")
    assert code == 0
    assert "dltta adapt --help" in out


@pytest.mark.parametrize("topic", TOPICS)
def test_topics_fit_the_terminal_and_name_what_exists(topic):
    text = TOPICS[topic]
    assert re.match(rf"{topic} - \S.*\n\n[A-Z]", text)
    assert max(map(len, text.splitlines())) <= 78
    for other in text.split("SEE ALSO\n")[1].strip().split(", "):
        assert other in TOPICS
    for words in re.findall(r"dltta ([a-z]+(?: [a-z]+)?)", text):
        first, *second = words.split()
        assert (first,) in COMMANDS or (first, *second) in COMMANDS or first == "adapts", words


def test_options_that_topics_name_exist():
    known = {name for command in COMMANDS.values() for each in command.params for name in each.opts}
    known |= {"--debug", "--help", "--install-completion", "--show-completion"}
    for topic, text in TOPICS.items():
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known, topic
