"""Models whose linear layers bitsandbytes, torchao or PyTorch has quantised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.cases import VARIANTS, config, in_pieces, tokens
from titans import TitansForCausalLM

WIDE = {"hidden_size": 64, "intermediate_size": 128, "memory_heads": 4, "num_attention_heads": 4}
IDS = tokens(24)


def fresh(variant: str) -> TitansForCausalLM:
    torch.manual_seed(0)
    return TitansForCausalLM(config(variant, **WIDE)).eval()


def loader(variant: str, folder: Path) -> Callable[..., TitansForCausalLM]:
    fresh(variant).save_pretrained(folder)
    return lambda **options: TitansForCausalLM.from_pretrained(folder, device_map="cpu", **options)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@torch.no_grad()
def error(made: TitansForCausalLM, variant: str, decoding: float) -> float:
    """Of the logits, after a look at token-by-token decoding and at ``generate``."""
    logits = made(IDS).logits
    assert relative(in_pieces(made, IDS, [*range(10, 16)])[0], logits) <= decoding
    assert made.generate(IDS[:, :6], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 9)
    return relative(logits, fresh(variant)(IDS).logits)


def bits(**options: object) -> object:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; make test-tools installs it")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


EVERY = [pytest.param(name, marks=() if name == "mac" else pytest.mark.slow) for name in VARIANTS]


@pytest.mark.parametrize("variant", EVERY)
def test_eight_bits_of_bitsandbytes_stay_close_without_a_list_of_exceptions(variant: str, tmp_path: Path) -> None:
    made = loader(variant, tmp_path)(quantization_config=bits(load_in_8bit=True))
    assert type(made.model.layers[0].memory.to_qkv).__name__ == "Linear8bitLt"
    assert error(made, variant, decoding=1e-4) <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eight_bits_of_a_half_precision_model_stay_close(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = loader(variant, tmp_path)(quantization_config=bits(load_in_8bit=True), dtype=dtype)
    assert error(made, variant, decoding=0.02) <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_four_bits_of_bitsandbytes_run(variant: str, tmp_path: Path) -> None:
    made = loader(variant, tmp_path)(quantization_config=bits(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    assert type(made.model.layers[0].memory.to_qkv).__name__ == "Linear4bit"
    assert error(made, variant, decoding=1e-4) <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_gives_close_logits_through_transformers_and_on_its_own(
    variant: str, kind: str, tmp_path: Path
) -> None:
    torchao = pytest.importorskip(
        "torchao.quantization", reason="torchao is not installed; make test-tools installs it"
    )
    from transformers import TorchAoConfig

    made = loader(variant, tmp_path)(quantization_config=TorchAoConfig(getattr(torchao, kind)()))
    alone = fresh(variant)
    torchao.quantize_(alone, getattr(torchao, kind)())
    for quantised in (made, alone):
        assert type(quantised.model.layers[0].memory.to_qkv.weight).__name__ == "Int8Tensor"
        assert error(quantised, variant, decoding=0.02) <= 0.03


def test_a_token_alone_notices_that_the_weights_have_been_quantised() -> None:
    torchao = pytest.importorskip(
        "torchao.quantization", reason="torchao is not installed; make test-tools installs it"
    )
    made, ids = fresh("mal"), IDS[:, :12]
    with torch.no_grad():
        _, cache = in_pieces(made, ids, [*range(8, 12)])
        before = copy.deepcopy(cache)
        torchao.quantize_(made, torchao.Int8WeightOnlyConfig())
        last = made(IDS[:, 12:13], past_key_values=cache).logits
        cold = made(IDS[:, 12:13], past_key_values=before, output_hidden_states=True).logits
    torch.testing.assert_close(last, cold)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantisation_of_pytorch_runs(variant: str) -> None:
    made = torch.ao.quantization.quantize_dynamic(fresh(variant), {torch.nn.Linear}, dtype=torch.qint8)
    assert error(made, variant, decoding=0.1) <= 0.1
