"""The tests that transformers has for every model of its own, from the source distribution of the installed version."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

from tests.models.cases import VARIANTS

ROOT = Path(__file__).parents[2]


def pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"the source of transformers {transformers.__version__} cannot be fetched: {' '.join(reason)}")


@pytest.fixture(scope="session")
def common_tests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `common_models.py` finds the tests, and what they import beside transformers."""
    packages = str(tmp_path_factory.mktemp("packages"))
    pip("install", "--no-deps", "--target", packages, "parameterized")
    folder = os.environ.get("TRANSFORMERS_TESTS")
    if folder is None:
        target = tmp_path_factory.mktemp("source")
        version = transformers.__version__
        pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(target), f"transformers=={version}")
        with tarfile.open(target / f"transformers-{version}.tar.gz") as archive:
            archive.extractall(target)
        tests = target / f"transformers-{version}" / "tests"
        (tests / "__init__.py").touch()
        folder = str(tests)
    path = os.pathsep.join([str(ROOT), packages])
    return os.environ | {"PYTHONPATH": path, "TRANSFORMERS_TESTS": folder, "RUN_SLOW": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_common_tests_of_transformers_pass(variant: str, common_tests: dict[str, str]) -> None:
    options = ["-q", "-rfEx", "-W", "ignore", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        "tests/ecosystem/common_models.py",
        "-k",
        f"Test{variant.upper()}",
    ]
    done = subprocess.run(command, cwd=ROOT, env=common_tests, capture_output=True, text=True)
    print("\n".join(done.stdout.splitlines()[-3:]))
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
