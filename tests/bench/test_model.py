"""The random model with another context."""

import json

from bench.model import longer


def test_a_longer_model_has_a_config_of_its_own_and_the_same_weights(tmp_path):
    model = tmp_path / "f32"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 2048, "hidden_size": 8}')
    (model / "model.safetensors").write_bytes(b"weights")

    folder = longer(model, 8192)
    again = longer(model, 8192)

    assert folder == again == tmp_path / "f32-8192"
    config = json.loads((folder / "config.json").read_text())
    assert config == {"max_position_embeddings": 8192, "hidden_size": 8}
    assert (folder / "model.safetensors").samefile(model / "model.safetensors")
    assert json.loads((model / "config.json").read_text())["max_position_embeddings"] == 2048
