"""The tests that transformers has for every model of its own, from the source distribution of the installed version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

from tests.models.cases import VARIANTS

ROOT = Path(__file__).parents[2]
LEAST = 100  # tests that pass for a variant; more are there with a checkout than with a source distribution


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


def count_passed(output: str) -> int:
    """How many tests passed, by the last line that pytest wrote."""
    found = re.search(r"(\d+) passed", output.splitlines()[-1])
    return 0 if found is None else int(found[1])


def test_skipped_tests_do_not_count_as_passed() -> None:
    assert count_passed("...\n104 passed, 65 skipped, 1 xfailed, 1136 subtests passed in 40.28s\n") == 104
    assert count_passed("1 passed\n169 skipped, 3 subtests passed in 0.10s\n") == 0


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
    assert count_passed(done.stdout) >= LEAST, done.stdout[-2_000:]
