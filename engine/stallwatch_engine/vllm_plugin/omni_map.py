"""The Code2Wav stage of vLLM-Omni (MiniCPM-o 4.5) as data: which of its steps the worker is in.

Off unless STALLWATCH_CODE2WAV says so: a number of seconds, which is then the limit of every step, or
`on`, which leaves the limits to the supervisor's table. Names are those of the published wheel
(tests/engine/code2wav_names.json); one that an installed version lacks is reported, not wrapped.
The stage runs inside a worker RPC, so all of it lies on the lane of the thread that runs the model.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from stallwatch_engine.phasemap import HERE, Row
from stallwatch_engine.vllm_plugin.code2wav import Size, Stage

VARIABLE = "STALLWATCH_CODE2WAV"

_log = logging.getLogger("stallwatch")
_MODULE = "vllm_omni.model_executor.models.minicpmo_4_5"
_STAGE = f"{_MODULE}.minicpmo_4_5_code2wav:MiniCPMO45Code2Wav"
_TOKEN2WAV = f"{_MODULE}.batched_token2wav:BatchedToken2Wav"
_CFM = f"{_MODULE}.cuda_graph_wrapper:CFMGraphWrapper"
_HIFT = f"{_MODULE}.cuda_graph_wrapper:HiFTGraphWrapper"
_RUNNER = "vllm_omni.worker.gpu_generation_model_runner:GPUGenerationModelRunner"


def _cfm_mode(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """How this step of the flow matching is computed: which mode hangs is the question."""
    if kwargs.get("valid_lengths") is not None:
        return "cfm_ragged"
    stage = args[0] if args else None
    if getattr(stage, "_trt_stepper", None) is not None:
        return "cfm_trt"
    # With graphs, replay and capture are steps of their own.
    return "cfm_step" if getattr(stage, "_cfm_graph_wrapper", None) is not None else "cfm_eager"


def rows(limit_s: float = 0.0) -> list[Row]:
    """The map. Positions count `self` as 0."""
    step = Stage(limit_s).step
    batch_size = Size("batch", 2, "batch_size")

    def shape(keyword: str, batch: int = 0, frames: int = 2) -> tuple[Size, Size]:
        return Size("batch", 1, keyword, batch), Size("frames", 1, keyword, frames)

    wraps = (
        (f"{_STAGE}.forward", "code2wav", step("code2wav")),
        (f"{_TOKEN2WAV}.prepare_prompt", "setup_prompt", step("setup_prompt")),
        (f"{_TOKEN2WAV}.setup_batch", "setup", step("setup", batch_size)),
        (f"{_TOKEN2WAV}._encode_chunk", "encoder", step("encoder", *shape("tokens", frames=1))),
        (f"{_TOKEN2WAV}._decode_cfm", "cfm", step("cfm", *shape("mu"))),
        (
            f"{_TOKEN2WAV}._estimator_step",
            "cfm_step",
            step(
                "cfm_step", Size("rows", 99, "x", 0), Size("frames", 99, "x", 2), choose=_cfm_mode
            ),
        ),
        (f"{_CFM}.replay", "cfm_graph", step("cfm_graph", *shape("estimator_input"))),
        (f"{_CFM}._eager", "cfm_eager", step("cfm_eager")),
        (f"{_CFM}._capture", "cfm_capture", step("cfm_capture", cls="start")),
        (
            f"{_TOKEN2WAV}._stack_flow_cache",
            "cache_stack",
            step("cache_stack", Size("batch", 1, "states")),
        ),
        (
            f"{_TOKEN2WAV}._split_flow_cache",
            "cache_materialise",
            step("cache_materialise", batch_size),
        ),
        (f"{_TOKEN2WAV}._hift_inference", "hift", step("hift", *shape("mel"))),
        (f"{_HIFT}.replay", "hift_graph", step("hift_graph", *shape("speech_feat"))),
        (f"{_HIFT}._capture", "hift_capture", step("hift_capture", cls="start")),
        (f"{_RUNNER}.sample_tokens", "output_copy", step("output_copy")),
    )
    return [Row(target, HERE, phase, wrap=wrap) for target, phase, wrap in wraps]


def from_environment(environ: Mapping[str, str] = os.environ) -> list[Row]:
    """The map if it is switched on, else nothing; an unusable value is said and leaves it off."""
    value = environ.get(VARIABLE, "").strip().lower().removesuffix("s")
    if value in ("", "0", "off"):
        return []
    if value == "on":
        return rows()
    try:
        limit_s = float(value)
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        _log.warning("stallwatch: %s=%r is not used: seconds, or on", VARIABLE, value)
        return []
    return rows(limit_s)
