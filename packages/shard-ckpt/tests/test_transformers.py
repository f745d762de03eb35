"""What an export is for: models of the transformers library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shard_ckpt import Naming, export_hf, load_hf, save
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_threads

transformers: Any = pytest.importorskip("transformers", reason="needs transformers")


@pytest.mark.parametrize("tied", [True, False])
def test_from_pretrained_reads_an_export(tmp_path: Path, tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    held = model.state_dict()
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def saved(comm: Comm) -> None:
        state = {
            f"_orig_mod.{name}": shard_tensor(tensor, comm=comm, name=name)
            for name, tensor in held.items()
        }
        names = Naming(strip=("_orig_mod",), ties=ties)
        save({"model": state}, tmp_path / "ckpt", comm=comm, rename=names)

    run_threads(saved, 3)  # each rank holds pieces of copies: only the declaration makes them one
    names = Naming(ties=ties)
    made = export_hf(tmp_path / "ckpt", tmp_path / "hf", names=names, max_shard_size=8000)
    assert made[-1] == "model.safetensors.index.json"
    config.save_pretrained(tmp_path / "hf")

    with safe_open(tmp_path / "hf" / made[0], framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert torch.equal(file.get_tensor(name), held[name]), name
    again, told = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)

    model.save_pretrained(tmp_path / "theirs")
    other = transformers.LlamaForCausalLM(config)
    load_hf(other, tmp_path / "theirs", comm=SoloComm(), names=names)
    with torch.no_grad():
        assert torch.equal(other(tokens).logits, model(tokens).logits)
