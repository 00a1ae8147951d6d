"""The hub's way of saving and loading: a folder is loaded by whoever has the package, and by nobody who has not."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, RepoUrl
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.dynamic_module_utils import get_imports

from tests.models import forecasters
from tests.models.cases import config, model
from titans import TitansConfig, TitansForCausalLM, TitansForSequenceClassification, TitansModel
from titans.models.configuration import LOADER
from titans.models.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
KINDS = ["TitansForCausalLM", "TitansModel", "TitansForSequenceClassification", "TitansForPrediction"]
AUTO = {
    "TitansForCausalLM": "AutoModelForCausalLM",
    "TitansModel": "AutoModel",
    "TitansForSequenceClassification": "AutoModelForSequenceClassification",
    "TitansForPrediction": "AutoModelForTimeSeriesPrediction",
}
# What a user does who writes no line of ours: loads folders, each for its Auto class, and saves them again.
FRESH = """
import sys, transformers
assert not any(name.split(".")[0] == "titans" for name in sys.modules)
for folder, auto, kind in zip(*[iter(sys.argv[1:])] * 3):
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == kind and type(model).__module__.startswith("titans.models."), type(model)
    assert type(config) is type(model.config) and type(config).__module__ == "titans.models.configuration"
    model.save_pretrained(folder + "/again")
"""


def tiny(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "TitansForPrediction":
        return forecasters.model(torch.float32)
    if kind == "TitansForCausalLM":
        return model("mac", torch.float32, vocab_size=257)
    return {"TitansModel": TitansModel, "TitansForSequenceClassification": TitansForSequenceClassification}[kind](
        config("mac")
    )


def python(program: str, *arguments: str, home: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, with a cache of its own and nobody at the keyboard."""
    environment = os.environ | {"HF_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def is_complete(folder: Path, kind: str) -> bool:
    """Whether a folder says where its classes are, and has the file that it says they are in, and no other."""
    names = json.loads((folder / "config.json").read_text())["auto_map"]
    files = [path.name for path in folder.glob("*.py")]
    return names[AUTO[kind]] == f"titans_model.{kind}" and files == ["titans_model.py"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_names_its_classes_however_often_it_is_saved(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny(kind)
    made.save_pretrained(tmp_path / "one")
    assert is_complete(tmp_path / "one", kind)
    loaded = type(made).from_pretrained(tmp_path / "one")
    monkeypatch.setattr(type(made.config), "_auto_class", None)
    type(made.config).register_for_auto_class()  # as transformers does after it has run the file
    loaded.save_pretrained(tmp_path / "two")
    assert is_complete(tmp_path / "two", kind)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] | weights[1])


def test_a_config_alone_and_a_checkpoint_of_the_trainer_name_their_classes(tmp_path: Path) -> None:
    config("mac").save_pretrained(tmp_path / "config")
    assert is_complete(tmp_path / "config", "TitansForCausalLM")
    options = {"max_steps": 1, "save_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path / "run"), per_device_train_batch_size=1, **options)
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}]
    Trainer(tiny("TitansForCausalLM"), arguments, train_dataset=rows).train()
    assert is_complete(tmp_path / "run" / "checkpoint-1", "TitansForCausalLM")


def test_a_config_goes_to_the_hub_with_the_file_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: RepoUrl(f"https://huggingface.co/{repo_id}"))
    monkeypatch.setattr(
        HfApi, "create_commit", lambda self, operations, **_: sent.extend(each.path_in_repo for each in operations)
    )
    config("mac").save_pretrained(str(tmp_path), push_to_hub=True, repo_id="me/mine")
    assert sorted(sent) == ["config.json", "titans_model.py"]


def test_a_config_of_somebody_else_is_saved_as_the_library_does(tmp_path: Path) -> None:
    class Own(TitansConfig):
        model_type = "own"

    Own(**config("mac").to_dict()).save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text()) and not list(tmp_path.glob("*.py"))


OWN = """
from titans import TitansForCausalLM
class OwnModel(TitansForCausalLM): pass
"""


def test_a_model_of_somebody_else_is_named_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_model").OwnModel
    own.register_for_auto_class("AutoModelForCausalLM")
    own(config("lmm")).save_pretrained(tmp_path / "own")
    names = json.loads((tmp_path / "own" / "config.json").read_text())["auto_map"]
    assert names["AutoModelForCausalLM"] == "own_model.OwnModel" and (tmp_path / "own" / "own_model.py").is_file()
    assert names["AutoConfig"] == "titans_model.TitansConfig"
    TitansForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    TitansForCausalLM.from_pretrained(tmp_path / "own").save_pretrained(tmp_path / "ours")
    assert is_complete(tmp_path / "ours", "TitansForCausalLM")


def test_the_file_asks_for_the_package_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_imports(LOADER) == []  # or the library would ask for a package by the name of the import
    monkeypatch.setitem(sys.modules, "titans.models", None)
    with pytest.raises(ImportError, match=r"needs the package titan-memory .*: pip install 'titan-memory\[models\]'$"):
        exec(LOADER.read_text(), {})


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:3], KINDS[3:]], ids=lambda kinds: kinds[0])
def test_a_saved_model_loads_where_only_transformers_was_imported(kinds: list[str], tmp_path: Path) -> None:
    made = {kind: tiny(kind) for kind in kinds}
    for kind in kinds:
        made[kind].save_pretrained(tmp_path / kind)
    python(FRESH, *(word for kind in kinds for word in (str(tmp_path / kind), AUTO[kind], kind)), home=tmp_path)
    for kind in kinds:
        assert is_complete(tmp_path / kind / "again", kind)
        again = type(made[kind]).from_pretrained(tmp_path / kind / "again").state_dict()
        assert all(torch.equal(again[name], value) for name, value in made[kind].state_dict().items())


@pytest.mark.slow
def test_what_training_leaves_loads_where_only_transformers_was_imported(tmp_path: Path) -> None:
    (tmp_path / "fox.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    recipe = str(ROOT / "configs" / "train" / "cpu-minutes.yaml")
    fields = "--steps 2 --save-every 1 --length 32 --batch-tokens 64 --model.hidden_size 32 --model.num_hidden_layers 1"
    for arguments in (
        ["prepare", "fox.txt", "--validation", "0.1", "--out", "data"],
        ["train", recipe, *fields.split(), "--output", "run"],
    ):
        command = [sys.executable, "-m", "titans", *arguments]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert "trust_remote_code=True" in (tmp_path / "run" / "README.md").read_text()
    folders = [tmp_path / "run", *sorted((tmp_path / "run").glob("checkpoint-*"))]
    assert len(folders) > 1 and all(is_complete(folder, "TitansForCausalLM") for folder in folders)
    pairs = ((str(folder), "AutoModelForCausalLM", "TitansForCausalLM") for folder in folders)
    python(FRESH, *(word for pair in pairs for word in pair), home=tmp_path)


@pytest.mark.slow
def test_without_the_package_or_without_trust_a_sentence_says_what_is_missing(tmp_path: Path) -> None:
    tiny("TitansForCausalLM").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    load = "from transformers import {0}; {0}.from_pretrained('model', trust_remote_code={1})"
    hidden = "import sys; sys.modules['titans'] = None; "
    done = python(hidden + load.format("AutoModelForCausalLM", True), home=tmp_path, check=False)
    assert "pip install 'titan-memory[models]'" in done.stderr.strip().splitlines()[-1]
    done = python(load.format("AutoModelForCausalLM", False), home=tmp_path, check=False)
    assert "pass the argument `trust_remote_code=True`" in done.stderr.strip().splitlines()[-1]
    python(hidden + load.format("AutoTokenizer", False), home=tmp_path)  # a tokenizer needs none of our code


@pytest.mark.parametrize("trust", [None, True])
def test_the_auto_classes_and_the_pipeline_take_our_own_classes(trust: bool | None, tmp_path: Path) -> None:
    tiny("TitansForCausalLM").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)) is TitansConfig
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)) is TitansForCausalLM
    assert len(AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=trust)) == 257
    write = pipeline("text-generation", model=str(tmp_path), trust_remote_code=trust)
    (written,) = write("fox", max_new_tokens=2, return_full_text=True)
    assert type(write.model) is TitansForCausalLM and written["generated_text"].startswith("fox")


@pytest.mark.parametrize("load", [TitansForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_a_variant_is_one_of_ours_or_one_of_the_files(load: Any, tmp_path: Path) -> None:
    made = tiny("TitansForCausalLM")
    made.save_pretrained(tmp_path)
    made.half().save_pretrained(tmp_path, variant="fp16")
    assert (tmp_path / "model.fp16.safetensors").is_file()
    assert load(tmp_path, variant="fp16", dtype="auto").dtype is torch.float16
    (tmp_path / "model.safetensors").unlink()
    assert load(tmp_path, variant="fp16").config.variant == "mac"
    with pytest.raises(OSError, match=r"model\.fp8\.safetensors"):
        load(tmp_path, variant="fp8")
    made.save_pretrained(tmp_path)
    assert load(tmp_path, variant="mac").config.variant == "mac" == load(tmp_path, variant=None).config.variant
    with pytest.raises(ValueError, match="holds a mac model; expected mag, the variant that was asked for"):
        load(tmp_path, variant="mag")


def test_a_pipeline_takes_the_variant_of_the_files(tmp_path: Path) -> None:
    tiny("TitansForCausalLM").half().save_pretrained(tmp_path, variant="fp16")
    byte_tokenizer().save_pretrained(tmp_path)
    made = pipeline("text-generation", model=str(tmp_path), model_kwargs={"variant": "fp16"})
    assert made.model.config.variant == "mac"


@pytest.mark.parametrize("name", ["sdpa", "eager", None])
def test_either_name_of_the_attention_is_the_one_that_we_have(name: str | None, tmp_path: Path) -> None:
    made = tiny("TitansForCausalLM")
    made.save_pretrained(tmp_path)
    ids = torch.arange(24)[None]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert torch.equal(loaded(ids).logits, made(ids).logits)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "someone/kernel", "fast"])
def test_any_other_attention_is_refused(name: str, tmp_path: Path) -> None:
    tiny("TitansForCausalLM").save_pretrained(tmp_path)
    expected = re.escape(f"attn_implementation is {name!r}; expected one of sdpa, eager")
    for load in (
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name),
        lambda: AutoModel.from_config(config("mac"), attn_implementation=name),
        lambda: AutoModelForSequenceClassification.from_config(config("mac")).set_attn_implementation(name),
    ):
        with pytest.raises(ValueError, match=f"^{expected}$"):
            load()
