"""The command line itself: quick to answer, and helpful about typing mistakes."""

import os
import re
import resource
import subprocess
import sys

import pytest

from integration.cli.main import VERBS
from integration.ground.paths import REPO
from integration.jobs.catalog import CATALOG


def _run(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "integration", *arguments]
    return subprocess.run(line, cwd=REPO, capture_output=True, text=True)


@pytest.mark.parametrize("verb", ["", "patches", *VERBS])
def test_help_answers_at_once_and_without_torch(verb):
    code = (
        f"import sys; sys.argv = ['integration', *'{verb}'.split(), '--help']\n"
        "from integration.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    spent = []
    for _ in range(3):  # of processor time, as others may have the cores; they slow it all the same
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = subprocess.run(
            [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if spent[-1] < 0.5:
            break
    assert min(spent) < 0.5
    assert answer.stdout.strip().endswith("False"), answer.stderr
    assert f"usage: integration {verb}".strip() in answer.stdout


@pytest.mark.parametrize("verb", ["train", "plan", "dryrun", "launch", "ladder"])
def test_configs_are_listed_with_what_they_are_for(verb):
    told = " ".join(_run(verb, "--help").stdout.split())
    for name, job in CATALOG.items():
        assert f"{name} {job.about}" in told


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("trian", "mini"), "got trian; did you mean train?"),
        (("patches", "chekc"), "did you mean check?"),
        (("train", "mimi"), "did you mean mini?"),
        (("train", "mini", "--layers", "2"), "cut the config slice, and mini was asked for"),
        (("train", "leonardo_mini", "--ranks", "6"), "tp 2 = 4 must divide the 6 ranks"),
        (("train", "--without", "cpu_devise"), "did you mean cpu_device?"),
        (("test", "cpu_devise"), "did you mean cpu_device?"),
        (("test", "cpu_device", "--full", "--record"), "add --prove"),
        (("train", "--data", "/nowhere"), "/nowhere does not exist"),
        (("train", "--port", "70000"), "Unrecognized options: --port"),
        (("train", "--ranks", "0"), "--ranks must be at least 1, got 0"),
        (("train", "--ranks", "two"), "invalid literal for int() with base 10: 'two'"),
        (("train", "--rank", "2"), "--ranks INT"),
        (("train", "mini", "slice"), "Unrecognized options: slice"),
        (("launch",), "Missing"),
        (("patches", "drift"), "expected --against"),
        (("env", "--", "cpu_device"), "expected nothing after `--`"),
        (("--train",), "expected a verb after `integration`, got --train"),
    ],
)
def test_a_mistake_is_answered_in_words_and_with_an_exit_code(arguments, hint):
    answer = _run(*arguments)
    assert answer.returncode != 0
    assert hint in answer.stderr
    assert "Traceback" not in answer.stderr


def test_ctrl_c_is_answered_in_a_word():
    code = (
        "import integration.patchset.repository as r\n"
        "def load(): raise KeyboardInterrupt\n"
        "r.load = load\n"
        "from integration.cli.main import main; main(['patches', 'list'])"
    )
    line = [sys.executable, "-c", code]
    answer = subprocess.run(line, cwd=REPO, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), r"/x/y, found: Permission denied"),
        (PermissionError(1, "Operation not permitted", "/x/y"), "accessible"),
        (OSError(30, "Read-only file system", "/x/y"), "/x/y, found: Read-only .*for writing"),
        (OSError(28, "No space left on device", "/x/y"), "/x/y, found: No space .*free some space"),
        (OSError(122, "Disk quota exceeded"), "a file, found: Disk quota .*INTEGRATION_OUTPUTS"),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), None),  # a mistake of ours
        (PermissionError(1, "Operation not permitted"), None),  # of a signal, say
    ],
)
def test_what_the_machine_refuses_is_one_sentence(error, told, monkeypatch, capsys):
    from integration.cli import main as cli

    def load() -> None:
        raise error

    monkeypatch.setattr("integration.patchset.repository.load", load)
    monkeypatch.setenv("INTEGRATION_DEBUG", "")
    if told is None:
        with pytest.raises(OSError, match=re.escape(str(error))):
            cli.main(["patches", "list"])
        return
    with pytest.raises(SystemExit) as stop:
        cli.main(["patches", "list"])
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{told}", line)
    with pytest.raises(OSError, match=re.escape(str(error))):
        cli.main(["patches", "list", "--debug"])


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("train mini --training.steps 2", "train mini -- --training.steps 2"),
        (
            "ladder --a.no-b --training.steps=2 mini --ranks 2",
            "ladder mini --ranks 2 -- --a.no-b --training.steps=2",
        ),
        ("launch --a.b 1 --dry -- --c.d 2", "launch --dry -- --a.b 1 --c.d 2"),
    ],
)
def test_a_forgotten_separator_is_told_with_the_command(arguments, command, monkeypatch, capsys):
    from integration.cli import main as cli

    monkeypatch.setenv("INTEGRATION_DEBUG", "")
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "options come after `--`" in told
    assert told.endswith(f"nothing was run: integration {command}\n")


def test_debug_shows_the_trace():
    answer = _run("train", "mimi", "--debug")
    assert "Traceback" in answer.stderr


def test_titan_options_are_kept_apart(monkeypatch):
    from integration.cli import main as cli

    seen = {}
    monkeypatch.setattr(
        "integration.train.start.train", lambda request: seen.update(request=request)
    )
    with pytest.raises(SystemExit):
        cli.main(["train", "--without", "a", "slice", "--without=b", "--", "--training.steps", "5"])
    assert seen["request"].config == "slice"
    assert seen["request"].without == ("a", "b")
    assert seen["request"].options == ("--training.steps", "5")
    with pytest.raises(SystemExit):
        cli.main(["train"])
    assert seen["request"].options == ()  # none of the call before


def test_the_hook_leaves_files_alone_that_ruff_excludes():
    hooks = (REPO / ".pre-commit-config.yaml").read_text()
    (format_,) = re.findall(r"entry: \S+/ruff (format.*)", hooks)
    files = sorted((REPO / "torchtitan_contrib").rglob("*.py"))
    line = [sys.executable, "-m", "ruff", *format_.split(), "--check", *map(str, files)]
    answer = subprocess.run(line, cwd=REPO, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


def test_a_reader_that_ends_early_is_no_error():
    line = f"{sys.executable} -m integration patches list | head -n 1; echo ${{PIPESTATUS[0]}}"
    answer = subprocess.run(
        ["bash", "-c", line], cwd=REPO, capture_output=True, text=True, env=os.environ
    )
    assert not answer.stderr
