"""What is installed from the wheel, as a stranger finds it: run by `make test-wheel`."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import infinity
from infinity.optional_dependencies import EXTRAS
from support import bare as program
from support.wheel_environment import Environment, public_python, without_checkout

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"infinity": ROOT, "infinity_daemon": ROOT / "daemon", "infinity_tools": ROOT / "tools"}
MODULES = {str(file.relative_to(folder)) for name, folder in PACKAGES.items() for file in (folder / name).rglob("*.py")}
SITE = {f"infinity_daemon/site/{file.name}" for file in (ROOT / "daemon/infinity_daemon/site").iterdir()}
NAME = f"infinity_offload-{infinity.__version__}"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user may enter, and write into its `tmp` and `nvme`."""
    folder = Path(tempfile.mkdtemp(prefix="infinity-wheel-"))
    folder.chmod(0o755)
    for name in ("tmp", "nvme"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    (folder / "readonly").mkdir(mode=0o555)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def built(place: Path) -> Path:
    """The folder of sdist and wheel, which is built from the sdist; both without what is in the test environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):  # a folder of builds has what earlier ones left
        if (ROOT / name).is_file():
            (place / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / "source" / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(place / "dist"), str(place / "source")],
        capture_output=True, text=True, check=False, env=without_checkout(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """The wheel."""
    return built / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def described(wheel: Path) -> Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def bare(place: Path, wheel: Path, described: Message) -> Environment:
    """An environment with the wheel and what it always needs."""
    made = Environment.make(place / "bare", *public_python(place / "python"))
    made.link(described.get_all("Requires-Dist", ()))
    made.pip("install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return made


@pytest.fixture(scope="module")
def whole(bare: Environment, described: Message) -> Environment:
    """The same environment, later, with what the extra `all` brings."""
    extras = described.get_all("Provides-Extra", ())
    assert set(extras) == {*EXTRAS, "all", "dev", "wide"}
    bare.link(described.get_all("Requires-Dist", ()), ("cli", "daemon", "data", "hf", "peft", "tensorboard"))
    return bare


def test_the_sdist_is_what_the_wheel_is_built_from(built: Path) -> None:
    """Sources, license and README; no tests, benchmarks or settings of this checkout."""
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"{PACKAGES[module.partition('/')[0]].relative_to(ROOT) / module}" for module in MODULES}
    assert names >= sources | {"LICENSE", "README.md", "pyproject.toml", "infinity/py.typed"}
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs", "docker", "."))]


def test_the_wheel_has_every_package_and_no_tests(wheel: Path) -> None:
    """Exactly the modules of this checkout, the files of the page, the mark of types, the license."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"{NAME}.dist-info/")}
        license = archive.read(f"{NAME}.dist-info/licenses/LICENSE")
    assert names == {*MODULES, *SITE, "infinity/py.typed"}
    assert license == (ROOT / "LICENSE").read_bytes()


def test_what_the_wheel_says_of_itself(described: Message) -> None:
    """One version, the license, the authors; torch is asked for, extras are not."""
    assert described["Version"] == infinity.__version__
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Author"] == "The infinity authors"
    always = [line for line in described.get_all("Requires-Dist", ()) if "extra ==" not in line]
    names = {re.match(r"[\w-]+", line)[0] for line in always}
    assert names == {"torch", "numpy", "xxhash", "safetensors", "psutil"}


def test_the_library_alone(bare: Environment, place: Path) -> None:
    """It trains, checkpoints, goes on and exports for a stranger; commands say what they need."""
    bare.pip("check")
    optional = sorted({package for packages in EXTRAS.values() for package in packages})
    find = f"from importlib.util import find_spec as find; print(find('infinity').origin, *filter(find, {optional}))"
    found = bare.run("python", "-c", find)
    assert found.stdout == f"{bare.site / 'infinity' / '__init__.py'}\n", found.stderr
    shutil.copy(program.__file__, place / "program.py")
    (place / "program.py").chmod(0o644)
    done = bare.run("python", str(place / "program.py"), str(place / "nvme"))
    assert (done.returncode, done.stdout) == (0, "2 4\n"), done.stderr
    for command, extra in (("infinity", "cli"), ("infinityd", "daemon")):
        done = bare.run(command, "--help")
        assert done.returncode == 2
        assert done.stderr.endswith(f"pip install 'infinity-offload[{extra}]'\n"), done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_everything_is_declared(whole: Environment) -> None:
    """Nothing that the extras need is missing or too old."""
    whole.pip("check")


def test_commands_of_a_stranger(whole: Environment, place: Path) -> None:
    """Training in a folder that is not his own writes where he says, and nowhere else; the other commands start."""
    out = place / "tmp" / "out"
    train = ["infinity", "train", "--model", "tiny", "--steps", "3", "--threads", "1", "--json"]
    refused = whole.run(*train)
    assert refused.returncode == 2
    assert "--out" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    done = whole.run(*train, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert {file.name for file in out.iterdir()} >= {"summary.json", "summary.png", "steps.jsonl"}
    assert not [*(place / "readonly").iterdir()]
    assert out.stat().st_uid == (65534 if os.geteuid() == 0 else os.geteuid())
    for command, said in ((["infinity", "version"], infinity.__version__), (["infinityd", "--help"], "--port")):
        done = whole.run(*command)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_the_snippet_of_the_readme(whole: Environment, place: Path) -> None:
    """As printed, where its user may write."""
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    (place / "snippet.py").write_text(snippet)
    (place / "snippet.py").chmod(0o644)
    done = whole.run("python", str(place / "snippet.py"), folder="tmp")
    assert done.returncode == 0, done.stderr
