"""Whatever bytes a checkpoint holds, it opens or is refused by BadCheckpoint: no other error, no absurd work."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.errors import BadCheckpoint
from stallwatch_engine.checkpoint.parse import parse_config
from stallwatch_engine.checkpoint.tiny import make_tiny, tiny_settings
from stallwatch_engine.checkpoint.view import CheckpointView

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, 2**31, 2**63, "", "silu", "linear_attention", "default"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(tiny_settings())), JSON, min_size=1, max_size=2),
    extra=st.dictionaries(
        st.sampled_from(["quantization_config", "num_nextn", "sliding_window", "torch_dtype"]),
        JSON,
        max_size=1,
    ),
)
def test_any_field_may_hold_anything(changes, extra):
    """Each field replaced by any JSON value gives a configuration or BadCheckpoint in one line."""
    refused = ""
    try:
        config = parse_config({**tiny_settings(), **changes, **extra})
    except BadCheckpoint as error:
        refused = str(error)
    else:
        assert isinstance(config, ModelConfig)
    assert "\n" not in refused
    assert len(refused) < 300


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "tiny"
    make_tiny(folder)
    return folder


def opened(folder, raw: bytes) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(raw)
    blamed = str(file)
    try:
        with CheckpointView.open(folder) as view:
            view.read("lm_head.weight")
    except BadCheckpoint as error:
        blamed = error.file
    assert blamed == str(file)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_header_may_hold_anything(good, data):
    """Bytes of the header changed, or one entry replaced by any JSON value: opened or refused."""
    file = good / "model.safetensors"
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    try:
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, 8 + size - 1))
            changed = raw[:place] + data.draw(st.binary(min_size=1, max_size=4)) + raw[place + 1 :]
        else:
            header = json.loads(raw[8 : 8 + size])
            name = data.draw(st.sampled_from(sorted(header)))
            header[name] = data.draw(
                JSON | st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON})
            )
            text = json.dumps(header).encode()
            changed = struct.pack("<Q", len(text)) + text + raw[8 + size :]
        opened(good, changed)
    finally:
        file.write_bytes(raw)
