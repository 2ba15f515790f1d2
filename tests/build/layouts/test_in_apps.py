"""Every layout in its real app: `make test-apps` installs nothing, and skips the apps that are not there.

Trained checkpoints are verified clip by clip. Random ones, of other shapes, are written and loaded; an app
that returns tokens returns those of the checkpoint.
"""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whisperport import judge
from whisperport.build.layouts import all_layouts, layout_of
from whisperport.build.layouts.convert import ConvertOptions, convert
from whisperport.build.layouts.environments import command_of
from whisperport.errors import LoweringError, VerificationError
from whisperport.program.dims import Dims

pytest.importorskip("torch")
from tests.micro import whisper_dims
from tests.outlier_checkpoints import NAMES, outlier_checkpoint

from whisperport.build.layouts.client import run_client
from whisperport.build.layouts.verifying import verify_layout
from whisperport.model.checkpoint import load_checkpoint
from whisperport.verification.clips import shipped_audio, shipped_clips

SHAPES = {
    "tiny": whisper_dims(384, 4),
    "English-only": replace(whisper_dims(64, 2, 1), n_vocab=51864),
    "turbo in miniature": replace(
        whisper_dims(64, 6, 1), n_mels=128, n_text_layer=4, n_vocab=51866
    ),
}
# With the app's own spectrogram the text of one clip repeats four words, in float32 on a CPU as well.
LOOPS = {("sherpa-onnx-qnn", "last-tail"), ("sherpa-onnx-rknn", "last-tail")}
# These apps give no prompt. The embedded model then emits its language up to 14 times and the last word up
# to six times, in float32 as well (a word error rate of 38%), and rounding changes how often.
WITHOUT_PROMPT = {("executorch-runner", "w8"), ("qualcomm-ai-hub", "w8a16")}
ALL = os.environ.get("WHISPERPORT_TEST_APPS") == "1"
# Half a minute for a lowering, a minute or two in a simulator; their own tests have small ones.
SLOW = (
    *("react-native-executorch", "executorch-runner"),
    *("sherpa-onnx-qnn", "sherpa-onnx-rknn", "qualcomm-ai-hub"),
)
CASES = [
    (app, precision)
    for layout in all_layouts()
    for app in layout.apps
    for precision in layout.precisions
]


def needs_app(app: str) -> None:
    """Skip a test whose app is not installed, and without `make test-apps`, one in another environment."""
    command = command_of(layout_of(app).apps[app])
    if command is None:
        pytest.skip(f"{app} is not installed: whisperport apps --install {app}")
    if not ALL and (command != [sys.executable] or app in SLOW):
        pytest.skip("make test-apps runs it")


def options_of(app: str, **chosen: Any) -> ConvertOptions:
    """Options with a chip, if the app's files are compiled for one."""
    entry = layout_of(app).apps[app]
    return ConvertOptions(chip=entry.devices[0] if entry.compile else "", **chosen)


def out_of(app: str, folder: Path) -> Path:
    return folder / f"out{layout_of(app).suffix}"


@pytest.mark.parametrize(("app", "precision"), CASES)
def test_the_embedded_model_is_verified(app: str, precision: str, tmp_path: Path) -> None:
    needs_app(app)
    out = out_of(app, tmp_path)
    if (app, precision) in WITHOUT_PROMPT:
        with pytest.raises(VerificationError, match="does not return what the checkpoint emits"):
            convert("default", app, out, options_of(app, precision=precision))
        return
    assert convert("default", app, out, options_of(app, precision=precision))
    assert verify_layout(out).is_verified
    assert judge(out, "default", app=app)


def test_a_browser_returns_what_node_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a folder of transformers.js, and a browser
    needs_app("transformers.js")
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    monkeypatch.setenv("WHISPERPORT_BROWSER", browser)
    layout, clips = layout_of("transformers.js"), shipped_clips()
    layout.write(load_checkpoint("default"), "fp32", tmp_path)
    # when a page and Node run the app
    job = (layout.apps["transformers.js"], tmp_path, clips, "fp32", "en")
    page, node = (run_client(*job, device) for device in ("browser", "Node"))
    # then the tokens are the same
    assert all(result.tokens for result in page.results)
    assert page.results == node.results
    assert page.versions["browser"].startswith("Chromium")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("app", [app for layout in all_layouts() for app in layout.apps])
def test_an_outlier_checkpoint_is_verified(app: str, name: str, tmp_path: Path) -> None:
    needs_app(app)
    folder = outlier_checkpoint(name, tmp_path)
    if (app, name) in LOOPS:
        with pytest.raises(VerificationError, match="does not return what the checkpoint emits"):
            convert(folder, app, out_of(app, tmp_path), options_of(app))
        return
    assert convert(folder, app, out_of(app, tmp_path), options_of(app))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("app", [app for layout in all_layouts() for app in layout.apps])
def test_a_random_checkpoint_is_loaded(app: str, shape: str, tmp_path: Path) -> None:
    # given a checkpoint of a published shape, and a short clip
    needs_app(app)
    checkpoint, clips = random_checkpoint(SHAPES[shape]), tmp_path / "clips"
    clips.mkdir()
    shutil.copy(min(shipped_audio(), key=lambda audio: audio.seconds).path, clips)
    # when it is converted, which random text does not prevent
    options = options_of(app, verify_with=clips, allow_unverified=True)
    if why := layout_of(app).unsupported(checkpoint, layout_of(app).precisions[0]):
        with pytest.raises(LoweringError) as error:
            convert(checkpoint, app, out_of(app, tmp_path), options)
        assert error.value.why == why
        return
    converted = convert(checkpoint, app, out_of(app, tmp_path), options)
    # then the app decodes the clip, and its tokens are the checkpoint's
    assert converted.run is not None
    assert len(converted.run.results) == 1
    assert converted or layout_of(app).apps[app].compared != "tokens"


def random_checkpoint(dims: Dims) -> Any:
    """Return a checkpoint whose weights are random float16 numbers."""
    import torch

    from whisperport.model.checkpoint.checkpoint import Checkpoint, Source
    from whisperport.model.network.whisper import Whisper
    from whisperport.speech.text.vocabulary import openai_generation, openai_tokenizer

    torch.manual_seed(0)
    model = Whisper(dims).eval()
    for table in (model.encoder.positional_embedding, model.decoder.positional_embedding):
        torch.nn.init.normal_(table, std=0.02)
    heads = ((dims.n_text_layer - 1, 0),)
    return Checkpoint(
        dims=dims,
        generation=replace(openai_generation(dims.n_vocab), alignment_heads=heads),
        weights={name: w.detach().half().float() for name, w in model.state_dict().items()},
        tokenizer_json=openai_tokenizer(dims.n_vocab).to_str().encode(),
        source=Source(kind="openai", name="random", sha256={}),
    )
