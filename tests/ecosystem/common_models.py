"""The common tests of transformers for each variant: `test_common.py` runs this file, once it has found them.

TRANSFORMERS_TESTS names the folder `tests` of a checkout of transformers, or of its source distribution, which leaves
out what lies deeper: the mixins for generation and for export.
"""

from __future__ import annotations

import os
import sys
import unittest
import unittest.mock
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.models.cases import VARIANTS, VOCAB, config
from titans import TitansConfig, TitansForCausalLM, TitansModel
from titans.models.classification import TitansForSequenceClassification
from titans.models.pretrained import TitansPreTrainedModel

FOLDER = os.environ["TRANSFORMERS_TESTS"]
DEEPER = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": {}},
}
# A checkpoint without weights is refused here; these look at what initialisation makes of one.
WITHOUT_WEIGHTS = ("test_can_init_all_missing_weights", "test_model_weights_reload_no_missing_tied_weights")
EXCEPTIONS = {
    "test_can_set_attention_dynamically": "an unknown attn_implementation is refused, in other words than theirs",
}

# What a model in the library's own folders has: tests find its classes and their labels by these names.
modeling_auto.MODEL_MAPPING_NAMES["titans"] = "TitansModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["titans"] = "TitansForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["titans"] = "TitansForSequenceClassification"


def add_package(name: str, contents: dict[str, Any]) -> None:
    """Makes a package of a folder of tests, or of what is given."""
    made = ModuleType(name)
    made.__path__ = [os.path.join(FOLDER, *name.split(".")[1:])]
    vars(made).update(contents)
    sys.modules[name] = made


add_package("transformers_tests", {})
for module, contents in DEEPER.items():
    if not os.path.exists(os.path.join(FOLDER, *module.split(".")) + ".py"):
        add_package(f"transformers_tests.{module.split('.')[0]}", {})
        add_package(f"transformers_tests.{module}", contents)

from transformers_tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from transformers_tests.test_configuration_common import ConfigTester  # noqa: E402
from transformers_tests.test_modeling_common import ModelTesterMixin  # noqa: E402


class Batch:
    """A small model and a batch for it, as the tests ask for them."""

    batch_size = 3
    seq_length = 13
    is_training = True

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.num_hidden_layers = self.get_config().num_hidden_layers
        self.hidden_size = self.get_config().hidden_size

    def get_config(self) -> TitansConfig:
        return config(self.variant)

    def prepare_config_and_inputs_for_common(self) -> tuple[TitansConfig, dict[str, Any]]:
        ids = torch.randint(VOCAB, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class CommonTests(ModelTesterMixin, GenerationTesterMixin):
    all_model_classes = (TitansModel, TitansForCausalLM, TitansForSequenceClassification)
    test_can_init_all_missing_weights_before_2023 = True  # the year is that in the head of a file
    variant: str

    def setUp(self) -> None:
        self.model_tester = Batch(self.variant)
        self.has_attentions = "sdpa" in self._testMethodName  # weights of attention are not returned
        if self._testMethodName in WITHOUT_WEIGHTS:
            loads = classmethod(PreTrainedModel.from_pretrained.__func__)
            patch = unittest.mock.patch.object(TitansPreTrainedModel, "from_pretrained", loads)
            patch.start()
            self.addCleanup(patch.stop)

    def assertRaises(self, expected: Any, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint that does not fit is a ``ValueError`` here."""
        wanted = (RuntimeError, ValueError) if expected is RuntimeError else expected
        return super().assertRaises(wanted, *args, **kwargs)

    def test_config(self) -> None:
        ConfigTester(self, config_class=TitansConfig, variant=self.variant, hidden_size=24).run_common_tests()


for variant in VARIANTS:
    made = type(f"Test{variant.upper()}", (CommonTests, unittest.TestCase), {"variant": variant})
    for name, reason in EXCEPTIONS.items():
        setattr(made, name, pytest.mark.xfail(reason=reason, strict=True)(getattr(made, name)))
    globals()[made.__name__] = made
del made, CommonTests, GenerationTesterMixin, ModelTesterMixin
