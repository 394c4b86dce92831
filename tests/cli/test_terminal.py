"""Text of a model cannot drive the terminal."""

import io

from afl_cli.terminal import escaped, say, write


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_drives_a_terminal_is_spelled_out():
    assert escaped("a\x1b[2J\x07\r\x9b1m\x7f\u202eb\u2066c") == r"a\x1b[2J\x07\r\x9b1m\x7f\u202eb\u2066c"
    assert escaped("tab\there\nnaïve 你好 👩\u200d🔬 \xa0") == "tab\there\nnaïve 你好 👩\u200d🔬 \xa0"


def test_a_terminal_gets_escapes_and_a_pipe_the_text():
    terminal, pipe = Terminal(), io.StringIO()
    write("x\x1b[31m", terminal)
    write("x\x1b[31m", pipe)
    assert (terminal.getvalue(), pipe.getvalue()) == (r"x\x1b[31m", "x\x1b[31m")


def test_messages_are_escaped_everywhere(capsys):
    say("tensor \x1b]0;title\x07", "error")
    assert capsys.readouterr().err == "afl: error: tensor \\x1b]0;title\\x07\n"
